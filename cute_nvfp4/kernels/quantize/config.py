"""The configuration of the quantization kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...scale_layout import ATOM_COLS, ATOM_ROWS
from ...target import Architecture

WARP = 32
# a warp takes rows r, r + 32, r + 64, r + 96 of a scale atom: their scales of four columns are sixteen contiguous bytes
WARP_ROWS = 4
ROW_STEP = 32
_LINE = 128
# contiguous bytes that a lane reads for the largest magnitude of rotated elements: a multiple of every rotation
AMAX_RUN = 64
# loads that a lane has in flight: in a pass of its own; within the quantizing kernel, also limited by their bytes
_AMAX_LOADS, _MOST_AMAX_LOADS, _MOST_AMAX_BYTES = 4, 8, 128


@dataclass(frozen=True)
class Element:
    """An element type: its mantissa bits, exponent bias and largest value, and a word of its NaN codes."""

    mantissa_bits: int
    exponent_bias: int
    max_value: float
    nan_word: int


ELEMENTS = {
    "e2m1": Element(1, 1, 6.0, 0x77777777),
    "e4m3": Element(3, 7, 448.0, 0x7F7F7F7F),
    "e5m2": Element(2, 15, 57344.0, 0x7F7F7F7F),
}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class QuantizeConfig:
    """One variant: everything that the compiled code depends on.

    element, scale, block: of the format ("e2m1", "e4m3", "e5m2"; "e4m3", "ue8m0"; 16, 32). top, min_scale, exponent,
    choice: of the rule; ``top`` is its ``max_code`` or the format's largest element. full_scale: amax / global scale.
    dtype: of x. hadamard: elements along K that are rotated together, 0 for none. tile: whether a scale belongs to a
    square tile. transposed: whether K is the strided dimension of x. global_scale: "none", "given" (a pointer to it),
    "amax" (a pointer to the largest magnitude, from which the kernel computes and stores it) or "computed" (each
    cluster finds the largest magnitude first). cluster: its CTAs, a power of two. stochastic: whether rounding is.
    layout: of the scales, "blocked" or "rowmajor". scale_word: whether one store may write four row-major scales.
    ragged: whether some rows or blocks of a work tile may not exist. bulk: whether bulk copies bring rows to shared
    memory (x is aligned to 16 bytes); if not, vector_bytes: the widest load that x's alignment allows. warps: of a CTA,
    at most 32, and a power of two except with ``error_table``. min_blocks: CTAs that must fit on an SM, which bounds
    the registers (0: no bound). fast_path: whether blocks may take it. error_table: whether ``optimal`` looks errors up
    (for bf16 that is not rotated, where no instruction converts to E2M1). defers: whether 4/6 may defer blocks and read
    them again from x.
    """

    arch: Architecture
    element: str = "e2m1"
    scale: str = "e4m3"
    block: int = 16
    top: float = 6.0
    min_scale: float = 0.0
    exponent: str = "rceil"
    choice: str = ""
    full_scale: float = 2688.0
    dtype: str = "bfloat16"
    hadamard: int = 0
    tile: bool = False
    transposed: bool = False
    global_scale: str = "given"
    cluster: int = 1
    stochastic: bool = False
    layout: str = "blocked"
    scale_word: bool = True
    ragged: bool = False
    bulk: bool = True
    vector_bytes: int = 16
    warps: int = 4
    min_blocks: int = 8
    fast_path: bool = True
    error_table: bool = False
    defers: bool = True

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of x."""
        return ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of x under one scale."""
        return self.block * self.item_bytes

    @property
    def out_bytes(self) -> int:
        """Bytes of data under one scale."""
        return self.block // 2 if self.element == "e2m1" else self.block

    @property
    def lane_rows(self) -> int:
        """``transposed``: rows of the result of which a lane holds blocks, as many as a word has elements of x."""
        return 4 // self.item_bytes

    @property
    def warps_along_k(self) -> int:
        """``transposed``: warps of a CTA that take the same rows of the result."""
        return self.warps * WARP * self.lane_rows // ATOM_ROWS

    @property
    def blocks_along_k(self) -> int:
        """``transposed``: blocks of a CTA's work tile: at least a line of data, and four scales for each warp."""
        return max(_LINE // self.out_bytes, ATOM_COLS * self.warps_along_k)

    @property
    def amax_loads(self) -> int:
        """Loads that a lane has in flight while it looks for the largest magnitude."""
        if self.hadamard:
            return AMAX_RUN // self.vector_bytes
        if self.global_scale == "computed":
            return min(_MOST_AMAX_LOADS, _MOST_AMAX_BYTES // self.vector_bytes)
        return _AMAX_LOADS

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row in memory that a warp reads at once while it looks for the largest magnitude."""
        # with a rotation, a transposed read takes one word from each of a block's rows
        return WARP * (4 if self.transposed and self.hadamard else self.amax_loads * self.vector_bytes)

    @property
    def rounds_in_f16(self) -> bool:
        """Whether the fast path rounds in binary16, where it can detect ties: no instruction converts to E2M1."""
        return self.has_fast_path and not self.arch.has_fp4_convert

    @property
    def defers_undecided(self) -> bool:
        """Whether a warp quantizes undecided blocks again, after the other blocks of their work tile."""
        return self.has_fast_path and self.choice != ""

    @property
    def in_runs(self) -> bool:
        """Whether a CTA's work tiles follow one another. Addresses then take fewer instructions, but more places of
        memory are read at a time, which would slow ``max`` down."""
        return self.defers_undecided

    @property
    def runs_of_warps(self) -> bool:
        """Whether each warp, and not each CTA, has such a run: all CTAs then share what is left at the end."""
        return self.in_runs and self.min_blocks == 1

    @property
    def ring_rows(self) -> int:
        """Rows of a warp that are in shared memory or on their way there."""
        return 2 if self.error_table else WARP_ROWS

    @property
    def rows_together(self) -> int:
        """Rows of a work tile that share a barrier: they are fetched together."""
        return 2 if self.defers_undecided else 1

    @property
    def has_fast_path(self) -> bool:
        """Whether blocks take the fast path (``optimal`` has another)."""
        # 4/6 has a fast path only where it reads rows as they lie
        apart = self.choice != "" and (self.tile or self.transposed or not self.defers)
        plain = self.fast_path and self.scale == "e4m3" and self.item_bytes == 2
        return plain and not (self.stochastic or self.hadamard or self.tries_all_scales or apart)

    @property
    def tries_all_scales(self) -> bool:
        """Whether every scale is a candidate."""
        return self.choice == "optimal"

    @property
    def after_rotation(self) -> QuantizeConfig:
        """The variant for blocks that need no rotation any more: those that were rotated are fp32."""
        return replace(self.with_dtype("float32"), hadamard=0) if self.hadamard else self

    def with_dtype(self, dtype: str) -> QuantizeConfig:
        """The variant for an x of ``dtype``."""
        return replace(self, dtype=dtype)

"""The variants of the quantization kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...scale_layout import ATOM_COLS, ATOM_ROWS
from ...target import Architecture

WARP = 32
# rows r, r + 32, r + 64 and r + 96 of a scale atom: their scales of four columns are sixteen contiguous bytes
WARP_ROWS = 4
ROW_STEP = 32
_LINE = 128
# bytes that a lane takes together where it looks for the largest magnitude of rotated elements: whole rotations
AMAX_RUN = 64
# elsewhere: loads of a lane that are under way in a pass of its own; and, with their bytes, where few warps read all
_AMAX_LOADS, _MOST_AMAX_LOADS, _MOST_AMAX_BYTES = 4, 8, 128


@dataclass(frozen=True)
class Element:
    """An element type: its mantissa bits, its exponent's bias, its largest value, and its code of NaN in every byte."""

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
    """One variant: everything the compiled code depends on.

    element, scale, block: those of the format ("e2m1", "e4m3", "e5m2"; "e4m3", "ue8m0"; 16, 32); top, min_scale,
    exponent, choice: those of the rule, ``top`` being its ``max_code`` or the format's largest element; full_scale:
    amax / global scale; dtype: of x; hadamard: how many elements along K are rotated together, 0 for none;
    tile: whether scales are those of square tiles; transposed: whether K is the strided dimension of x;
    global_scale: "none", "given" (a pointer to it), "amax" (a pointer to the largest magnitude, from which the kernel
    computes and stores it) or "computed" (each cluster finds the largest magnitude first); cluster: CTAs of one, a
    power of two; stochastic: rounding; layout: of the scales, "blocked" or "rowmajor"; scale_word: whether
    row-major scales may be stored four at a time; ragged: whether some of the rows or blocks of a work tile may not
    exist; bulk: whether rows come to shared memory by bulk copies (x is aligned to 16 bytes); vector_bytes: widest load
    that the alignment of x allows, if not; warps: of a CTA, at most 32, a power of two but with ``error_table``;
    min_blocks: CTAs that must fit on a multiprocessor, which bounds the registers (0: no bound); fast_path: whether
    blocks may take it; error_table: whether ``optimal`` looks up errors (of bf16 that is not rotated, where nothing
    converts to E2M1); defers: whether 4/6 may leave blocks for later, and read them once more from x.
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
        """``transposed``: rows of the result of which a lane holds blocks, as many as a word has elements."""
        return 4 // self.item_bytes

    @property
    def warps_along_k(self) -> int:
        """``transposed``: warps of a CTA that take the same rows of the result."""
        return self.warps * WARP * self.lane_rows // ATOM_ROWS

    @property
    def blocks_along_k(self) -> int:
        """``transposed``: blocks of a CTA's work tile: at least a line of data, and for each warp four scales."""
        return max(_LINE // self.out_bytes, ATOM_COLS * self.warps_along_k)

    @property
    def amax_loads(self) -> int:
        """Loads of a lane that are under way where it looks for the largest magnitude."""
        if self.hadamard:
            return AMAX_RUN // self.vector_bytes
        if self.global_scale == "computed":
            return min(_MOST_AMAX_LOADS, _MOST_AMAX_BYTES // self.vector_bytes)
        return _AMAX_LOADS

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row in memory that a warp takes at once where it looks for the largest magnitude."""
        # a rotation of a transposed read takes a word of each of a block's rows
        return WARP * (4 if self.transposed and self.hadamard else self.amax_loads * self.vector_bytes)

    @property
    def rounds_in_f16(self) -> bool:
        """Whether the fast path rounds in binary16, where ties can be told apart: no instruction converts to E2M1."""
        return self.has_fast_path and not self.arch.has_fp4_convert

    @property
    def defers_undecided(self) -> bool:
        """Whether undecided blocks are quantized again after the others of their work tile."""
        return self.has_fast_path and self.choice != ""

    @property
    def in_runs(self) -> bool:
        """Whether the work tiles of a CTA follow one another: fewer instructions for addresses, but more places of
        memory are read at a time, which ``max`` would notice."""
        return self.defers_undecided

    @property
    def runs_of_warps(self) -> bool:
        """Whether each warp has such a run, and not each CTA: what is left at the end is shared by all CTAs."""
        return self.in_runs and self.min_blocks == 1

    @property
    def ring_rows(self) -> int:
        """Rows of a warp that are in shared memory, or on their way."""
        return 2 if self.error_table else WARP_ROWS

    @property
    def rows_together(self) -> int:
        """Rows of a work tile that are fetched and waited for together."""
        return 2 if self.defers_undecided else 1

    @property
    def has_fast_path(self) -> bool:
        """Whether blocks take the fast path (``optimal`` has its own)."""
        # 4/6 has one for rows that are read as they lie
        apart = self.choice != "" and (self.tile or self.transposed or not self.defers)
        plain = self.fast_path and self.scale == "e4m3" and self.item_bytes == 2
        return plain and not (self.stochastic or self.hadamard or self.tries_all_scales or apart)

    @property
    def tries_all_scales(self) -> bool:
        """Whether all scales are candidates."""
        return self.choice == "optimal"

    @property
    def after_rotation(self) -> QuantizeConfig:
        """The variant for blocks that are rotated already, which are fp32, or that need no rotation."""
        return replace(self.with_dtype("float32"), hadamard=0) if self.hadamard else self

    def with_dtype(self, dtype: str) -> QuantizeConfig:
        """The variant for an x of ``dtype``."""
        return replace(self, dtype=dtype)

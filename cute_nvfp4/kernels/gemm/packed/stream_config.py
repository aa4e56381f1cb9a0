"""The configuration of the streaming GEMM of packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....errors import explain
from ....target import ARCHITECTURES, Architecture
from ....weight_layout import DTYPES, PACKINGS, SLAB_ROWS, TILE_K, Packing
from ...dequantize.config import DequantizeConfig
from ..config import GATE_NAMES

WARP = 32
LOADING_WARPS = 2
"""The loading warps: one for weights, one for x."""
MMA_COLUMNS = 8
"""Rows of x in one MMA, as its columns."""
RESERVED_SHARED = 2048
"""Bytes of shared memory that the system keeps for each CTA, and that aligning buffers may cost."""
MAX_STAGES = 32
X_SCALE_BYTES = 16
"""Bytes of a row of x in a scale atom; a packed tile uses four of them."""


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """One variant of the kernel for out (M, N) = x (M, K) · weight (N, K)ᵀ of few rows of x.

    dtype: the dtype of x, to which weights are decoded. packing: the packing of the weight.
    columns: the most rows of x, one of ``columns_possible``. slabs: 1, 2, 4 or 8 slabs of 16 rows of the weight a work
        tile.
    warps_m, warps_k: the MMA warps; warps_m divide the slabs, and warps_k take stages in turn.
    stage_tiles: packed tiles along K in a stage. stages: the most stages of the ring; 0: as many as fit.
    quantized_x: whether x is NVFP4. factors: device scalars that multiply the alpha of each product.
    vector: whether four neighbours in a row of the output are stored at once. gate: as in ``WgmmaConfig``.
    first: the configuration of a kernel that decodes x first.
    programmatic: "weights" if the kernel may start while the launch before it still runs. Until that launch has ended,
        it prefetches weights into L2 and touches nothing else. "": it may not.
    """

    dtype: str = "bfloat16"
    packing: str = "nvfp4"
    out: str = "bfloat16"
    columns: int = 8
    slabs: int = 8
    warps_m: int = 4
    warps_k: int = 2
    stage_tiles: int = 1
    stages: int = 0
    ctas_per_sm: int = 1
    quantized_x: bool = False
    factors: int = 0
    vector: bool = True
    gate: str = ""
    programmatic: str = ""
    first: DequantizeConfig | None = None
    arch: Architecture = ARCHITECTURES["sm_90a"]

    ways_to_start: ClassVar[tuple[str, ...]] = ("", "weights")
    """The values of ``programmatic``."""
    columns_possible: ClassVar[tuple[int, ...]] = (8, 16, 32)
    """The values of ``columns``; CuTe aborts for TMA copies of 24 rows."""

    @property
    def products(self) -> int:
        return 2 if self.gate else 1

    @property
    def rows(self) -> int:
        """Rows of the weight in a work tile."""
        return SLAB_ROWS * self.slabs

    @property
    def out_rows(self) -> int:
        """Columns of the output in a work tile."""
        return self.rows // self.products

    @property
    def warp_slabs(self) -> int:
        return self.slabs // self.warps_m

    @property
    def warps(self) -> int:
        """The MMA warps of a CTA."""
        return self.warps_m * self.warps_k

    @property
    def threads(self) -> int:
        """Threads of a CTA: the loading warps, which come first, and the MMA warps."""
        return WARP * (LOADING_WARPS + self.warps)

    @property
    def stage_k(self) -> int:
        return TILE_K * self.stage_tiles

    @property
    def weights(self) -> Packing:
        return PACKINGS[self.packing][DTYPES[self.dtype]]

    @property
    def tile_bytes(self) -> int:
        """Bytes of a work tile's slabs in a packed tile: codes, then scales."""
        return self.slabs * (self.weights.slab_code_bytes + self.weights.slab_scale_bytes)

    @property
    def x_bytes(self) -> int:
        """Bytes of x that belong to one packed tile."""
        return self.columns * (TILE_K // 2 + X_SCALE_BYTES if self.quantized_x else TILE_K * 2)

    @property
    def stage_bytes(self) -> int:
        return self.stage_tiles * (self.tile_bytes + self.x_bytes)

    @property
    def table_bytes(self) -> int:
        """Bytes of shared memory for a table of groups."""
        return 0

    @property
    def sums_pitch(self) -> int:
        """Floats from one column of sums in shared memory to the next: a lane's columns fall into different banks."""
        return self.rows + 4

    @property
    def sums_bytes(self) -> int:
        return 4 * self.warps_k * self.columns * self.sums_pitch

    @property
    def ring_stages(self) -> int:
        """Stages in shared memory, a multiple of ``warps_k``."""
        room = self.arch.shared_bytes // self.ctas_per_sm - RESERVED_SHARED - self.sums_bytes - self.table_bytes
        found = min(room // (self.stage_bytes + 16), self.stages or MAX_STAGES)
        return found // self.warps_k * self.warps_k


def can_implement(c: StreamConfig) -> str:
    """The reason why no kernel implements ``c``, or an empty string."""
    if c.columns not in c.columns_possible:
        return explain("columns", got=c.columns, expected=f"one of {', '.join(map(str, c.columns_possible))}")
    if c.slabs not in (1, 2, 4, 8) or c.slabs % c.warps_m:
        return explain("slabs, warps_m", got=(c.slabs, c.warps_m), expected="1, 2, 4 or 8, and a divisor of them")
    if c.gate not in ("", *GATE_NAMES):
        return explain("gate", got=repr(c.gate), expected=f"one of {', '.join(GATE_NAMES)}")
    if c.programmatic not in c.ways_to_start:
        return explain(
            "programmatic", got=repr(c.programmatic), expected=f"one of {', '.join(map(repr, c.ways_to_start))}"
        )
    if c.quantized_x and c.dtype != "float16":
        return explain("dtype of NVFP4 times packed weights", got=c.dtype, expected="float16")
    if not 1 <= c.warps <= 16:
        return explain("warps_m · warps_k", got=c.warps, expected="at most 16")
    if c.ring_stages < 2:
        return explain("stages", got=c.ring_stages, expected="at least 2, and as many for each of warps_k")
    return ""

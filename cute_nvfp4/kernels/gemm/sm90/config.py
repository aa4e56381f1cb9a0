"""What a GEMM of packed weights is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ....errors import explain
from ....target import ARCHITECTURES, Architecture
from ....weight_layout import TILE_BYTES, TILE_K, TILE_ROWS

WARPGROUP = 128
"""Threads of a warpgroup."""
MMA_ROWS = 64
"""Rows of A of a wgmma: one warpgroup's."""
STAGE_TILES = 2
"""Packed tiles along K in a stage: while one is multiplied the other is decoded."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the system keeps for each CTA."""
OUT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
EPILOGUE_COLUMNS = 16
"""Columns of an epilogue tile of 16-bit outputs."""
EPILOGUE_PITCH = 2 * MMA_ROWS + 16
"""Bytes from one column of an epilogue tile to the next in shared memory: no two of eight columns in the same banks."""


@dataclass(frozen=True, kw_only=True)
class WgmmaConfig:
    """One variant of the kernel for out (M, N) = x (M, K) · weight (N, K)ᵀ.

    The weight is operand A of the MMA, so a tile has ``tile_m`` rows of the weight and ``tile_n`` rows of x. dtype: of
    x, and what weights are decoded to. warpgroups: that multiply, 64 rows of the weight each. ctas_per_sm: CTAs of a
    multiprocessor. cluster_rows: CTAs along the weight's rows that load x for each other by multicast. stages: 0 for as
    many as fit. scheduler, raster: as in ``GemmTiling``.
    """

    dtype: str = "bfloat16"
    out: str = "bfloat16"
    tile_n: int = 128
    warpgroups: int = 2
    ctas_per_sm: int = 1
    cluster_rows: int = 1
    stages: int = 0
    scheduler: str = "stream_k"
    raster: str = "m"
    factors: int = 0
    arch: Architecture = ARCHITECTURES["sm_90a"]

    # for the tile schedulers
    split_k, ctas = 1, 1

    @property
    def cluster(self) -> tuple[int, int]:
        """CTAs along the weight's rows, and along those of x."""
        return self.cluster_rows, 1

    @property
    def tile_m(self) -> int:
        return MMA_ROWS * self.warpgroups

    @property
    def tile_k(self) -> int:
        return STAGE_TILES * TILE_K

    @property
    def threads(self) -> int:
        """Those of the warpgroups that multiply, and of one whose first warp loads."""
        return WARPGROUP * (self.warpgroups + 1)

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.tile_m // TILE_ROWS * STAGE_TILES * TILE_BYTES

    @property
    def x_bytes(self) -> int:
        """Of a stage."""
        return self.tile_n * self.tile_k * 2

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.x_bytes

    @property
    def epilogue_bytes(self) -> int:
        """Shared memory in which a CTA turns its output."""
        return self.warpgroups * EPILOGUE_COLUMNS * EPILOGUE_PITCH

    @cached_property
    def ring_stages(self) -> int:
        """Stages in shared memory."""
        room = self.arch.shared_bytes // self.ctas_per_sm - RESERVED_SHARED - self.epilogue_bytes - 1024
        return self.stages or min(room // (self.stage_bytes + 16), 16)


def can_implement(c: WgmmaConfig) -> str:
    """Why no kernel can be made of ``c``, or an empty string."""
    if c.arch.capability != (9, 0):
        return explain("architecture of a wgmma kernel", got=c.arch.name, expected="sm_90a")
    if c.tile_n % 8 or not 8 <= c.tile_n <= 256:
        return explain("tile_n", got=c.tile_n, expected="a multiple of 8 up to 256")
    if c.cluster_rows not in (1, 2, 4) or c.tile_n % (8 * c.cluster_rows):
        return explain("cluster_rows", got=c.cluster_rows, expected=f"1, 2 or 4, at most {c.tile_n // 8}: tile_n / 8")
    if c.warpgroups not in (2, 4):
        return explain("warpgroups", got=c.warpgroups, expected="2 or 4: whole packed tiles")
    if c.ring_stages < 2:
        return explain("stages", got=c.ring_stages, expected="at least 2")
    return ""

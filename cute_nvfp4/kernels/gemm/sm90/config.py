"""What a GEMM of packed weights is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ....errors import explain
from ....target import ARCHITECTURES, Architecture
from ....weight_layout import TILE_BYTES, TILE_K, TILE_ROWS
from ..config import GATE_NAMES, OUT_BYTES

WARPGROUP = 128
"""Threads of a warpgroup."""
TILE_N = (8, 16, 32, 64, 128, 256)
"""Rows of x in a tile."""
MMA_ROWS = 64
"""Rows of A of a wgmma: one warpgroup's."""
LOADING_WARPS = 2
"""One for weights, one for x."""
STAGE_TILES = 2
"""Packed tiles along K of a work tile's step: while one is multiplied the other is decoded."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the system keeps for each CTA, beside ``Architecture.shared_bytes``."""
ALIGNMENT = 256
"""Bytes that the alignment of what lies in shared memory may cost."""
MAX_STAGES = 16


@dataclass(frozen=True, kw_only=True)
class WgmmaConfig:
    """One variant of the kernel for out (M, N) = x (M, K) · weight (N, K)ᵀ.

    The weight is operand A of the MMA, so a tile has ``tile_m`` rows of the weight and ``tile_n`` rows of x. dtype: of
    x, and what weights are decoded to. warpgroups: that multiply, 64 rows of the weight each. ctas_per_sm: CTAs of a
    multiprocessor. cluster_rows: CTAs along the weight's rows that load x for each other by multicast. split_k: CTAs of
    a cluster that share a tile along K, and of which each stores some of its rows of x; there are as many clusters as
    tiles then. stage_tiles: packed tiles along K in a stage. stages: 0 for as many as fit. scheduler, raster: as in
    ``GemmTiling``.
    factors: device scalars that multiply alpha. vector: whether rows of the output are 16-bit numbers and start at
    multiples of 16 bytes. bias: its dtype, or "". gate: "" for one product; else the weight has rows of two in turn,
    eight of each, and the output is gate(first) · second: ``factors`` are of each of them.
    """

    dtype: str = "bfloat16"
    out: str = "bfloat16"
    tile_n: int = 128
    warpgroups: int = 2
    ctas_per_sm: int = 1
    cluster_rows: int = 1
    split_k: int = 1
    stage_tiles: int = STAGE_TILES
    stages: int = 0
    scheduler: str = "stream_k"
    raster: str = "m"
    factors: int = 0
    vector: bool = True
    bias: str = ""
    gate: str = ""
    arch: Architecture = ARCHITECTURES["sm_90a"]

    # for the tile schedulers
    ctas = 1
    # of a table of groups in shared memory
    table_bytes = 0

    @property
    def cluster(self) -> tuple[int, int]:
        """CTAs along the weight's rows, and along those of x."""
        return self.cluster_rows, 1

    @property
    def clustered(self) -> bool:
        """Whether a cluster is more than a CTA."""
        return self.cluster_rows * self.split_k > 1

    @property
    def products(self) -> int:
        return 2 if self.gate else 1

    @property
    def tile_m(self) -> int:
        return MMA_ROWS * self.warpgroups

    @property
    def out_rows(self) -> int:
        """Columns of the output in a tile."""
        return self.tile_m // self.products

    @property
    def tile_k(self) -> int:
        return STAGE_TILES * TILE_K

    @property
    def stage_k(self) -> int:
        return self.stage_tiles * TILE_K

    @property
    def threads(self) -> int:
        """Those of a warpgroup whose first warps load, and of those that multiply."""
        return WARPGROUP * (self.warpgroups + 1)

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.tile_m // TILE_ROWS * self.stage_tiles * TILE_BYTES

    @property
    def x_bytes(self) -> int:
        """Of a stage."""
        return self.tile_n * self.stage_k * 2

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.x_bytes

    @property
    def epilogue_columns(self) -> int:
        """Rows of x that a warp turns at a time: columns of the MMA become rows of the output."""
        return 16 * self.products

    @property
    def epilogue_pitch(self) -> int:
        """Bytes from one of them to the next in shared memory, 32 (gated: 16) of them used: no two of eight in the same
        banks."""
        return 16 if self.gate else 48

    @property
    def epilogue_bytes(self) -> int:
        """Shared memory in which the warps of a CTA turn their output."""
        return 4 * self.warpgroups * self.epilogue_columns * self.epilogue_pitch if self.vector else 0

    @property
    def received_bytes(self) -> int:
        """Shared memory for the sums of the other CTAs that share a tile along K."""
        return (self.split_k - 1) * self.tile_m * self.tile_n // self.split_k * 4

    @property
    def part_columns(self) -> int:
        """Those that a CTA stores of a tile shared along K."""
        return self.tile_n // self.split_k

    @property
    def piece_columns(self) -> int:
        """Those of which sums are received, and stored, together."""
        return min(self.part_columns, self.epilogue_columns)

    @property
    def pieces(self) -> int:
        return self.part_columns // self.piece_columns if self.split_k > 1 else 0

    @cached_property
    def ring_stages(self) -> int:
        """Stages in shared memory."""
        each = (self.arch.shared_bytes + RESERVED_SHARED) // self.ctas_per_sm - RESERVED_SHARED
        kept = self.epilogue_bytes + self.received_bytes + 8 * self.pieces + self.table_bytes
        room = each - kept - ALIGNMENT
        return self.stages or min(room // (self.stage_bytes + 16), MAX_STAGES)


def can_implement(c: WgmmaConfig) -> str:
    """Why no kernel can be made of ``c``, or an empty string."""
    if c.arch.generation not in ("sm90", "sm120"):
        return explain("architecture of packed weights", got=c.arch.name, expected="sm_90a, sm_120a or sm_121a")
    if c.arch.generation == "sm120" and (c.clustered or c.warpgroups != 2 or c.tile_n > 128):
        got = f"clusters of {c.cluster_rows * c.split_k}, {c.warpgroups} warpgroups, tiles of {c.tile_n} columns"
        return explain(
            f"a plan for {c.arch.name}", got=got, expected="clusters of 1, 2 warpgroups, at most 128 columns"
        )
    if c.tile_n not in TILE_N:
        return explain("tile_n", got=c.tile_n, expected=f"one of {', '.join(map(str, TILE_N))}")
    if c.cluster_rows not in (1, 2, 4) or c.tile_n % (8 * c.cluster_rows):
        return explain("cluster_rows", got=c.cluster_rows, expected=f"1, 2 or 4, at most {c.tile_n // 8}: tile_n / 8")
    if c.split_k not in (1, 2, 4) or c.tile_n % (8 * c.split_k):
        return explain("split_k", got=c.split_k, expected=f"1, 2 or 4, at most {c.tile_n // 8}: tile_n / 8")
    if c.split_k > 1 and (c.cluster_rows > 1 or c.scheduler != "static"):
        got = f"{c.split_k} with cluster_rows {c.cluster_rows} and scheduler {c.scheduler}"
        return explain("split_k", got=got, expected="cluster_rows 1 and scheduler static")
    if c.stage_tiles not in (1, STAGE_TILES):
        return explain("stage_tiles", got=c.stage_tiles, expected=f"1 or {STAGE_TILES}")
    if c.tile_n == 256 and c.warpgroups == 4:
        return explain("warpgroups of tiles of 256 columns", got=4, expected="2: four have too few registers")
    if c.ctas_per_sm not in (1, 2) or (c.ctas_per_sm == 2 and (c.warpgroups != 2 or c.tile_n > 64)):
        got = f"{c.ctas_per_sm} with {c.warpgroups} warpgroups and tiles of {c.tile_n} columns"
        return explain("ctas_per_sm", got=got, expected="1, or 2 with 2 warpgroups and at most 64 columns")
    if c.gate not in ("", *GATE_NAMES):
        return explain("gate", got=repr(c.gate), expected=f"one of {', '.join(GATE_NAMES)}")
    if c.gate and c.bias:
        return explain("bias of a gated GEMM", got=c.bias, expected="none")
    if c.vector and OUT_BYTES[c.out] != 2:
        return explain("output stored in vectors", got=c.out, expected="float16 or bfloat16")
    if c.warpgroups not in (2, 4):
        return explain("warpgroups", got=c.warpgroups, expected="2 or 4: whole packed tiles")
    if c.ring_stages * c.stage_tiles < 3:
        return explain("stages", got=c.ring_stages, expected="at least 2, of one tile 3: one is read ahead")
    return ""

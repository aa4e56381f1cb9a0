"""What a GEMM of packed weights is compiled for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

from ....target import ARCHITECTURES, Architecture
from ....weight_layout import DTYPES, PACKINGS, TILE_K, TILE_ROWS, Packing
from ...dequantize.config import DequantizeConfig
from ...quantize.fp8_config import Fp8RowsConfig
from ..sm100.packed_plan import TENSOR_COLUMNS, divided
from .schedules import EqualShares, Schedule

WARPGROUP = 128
"""Threads of a warpgroup."""
TILE_N = (8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Rows of x in a tile."""
MMA_ROWS = 64
"""Rows of A of a wgmma: one warpgroup's."""
LOADING_WARPS = 2
"""One for weights, one for x."""
GATHER_THREADS = 64  # of two warps, which copy rows of x that lie anywhere, or rows of a weight
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

    The weight is operand A of the MMA, so a tile has ``tile_m`` rows of the weight and ``tile_n`` rows of x.

    dtype: of x, and what weights are decoded to. packing: that of the weight (``weight_layout.PACKINGS``). warpgroups:
    those that multiply, each 64 rows of the weight. ctas_per_sm: CTAs of a multiprocessor. stage_tiles: packed tiles
    along K in a stage. stages: stages of the ring, 0 for as many as fit. schedule: how CTAs share the work.
    factors: device scalars that multiply alpha. vector: whether rows of the output are 16-bit numbers and start at
    multiples of 16 bytes. bias: its dtype, or "". gate: "" for one product; else the weight has rows of two products in
    turn, eight of each, the output is gate(first) · second, and each product has ``factors``. promoted: whether sums of
    FP8 products, of which tensor cores keep about 14 bits, are added in fp32 after each k-tile. first: a kernel that
    quantizes or decodes x before; this one starts meanwhile. decodes_x: whether x is NVFP4 and the loading warps decode
    it. batched: whether the operands are batches that nobody packed. programmatic: as in ``StreamConfig``.
    """

    dtype: str = "bfloat16"
    packing: str = "nvfp4"
    out: str = "bfloat16"
    tile_n: int = 128
    warpgroups: int = 2
    ctas_per_sm: int = 1
    stage_tiles: int = STAGE_TILES
    stages: int = 0
    schedule: Schedule = field(default_factory=EqualShares)
    factors: int = 0
    vector: bool = True
    bias: str = ""
    gate: str = ""
    promoted: bool = False
    first: Fp8RowsConfig | DequantizeConfig | None = None
    decodes_x: bool = False
    batched: bool = False
    programmatic: str = ""
    arch: Architecture = ARCHITECTURES["sm_90a"]

    # for the tile schedulers
    ctas = 1
    # of a table of groups in shared memory
    table_bytes = 0
    # whether threads copy rows of x, each by its index
    gathered = False
    ways_to_start: ClassVar[tuple[str, ...]] = ("", "weights")
    tiles_n: ClassVar[tuple[int, ...]] = TILE_N

    scheduler, raster = property(attrgetter("schedule.scheduler")), property(attrgetter("schedule.raster"))
    cluster_rows, overlap = property(attrgetter("schedule.cluster_rows")), property(attrgetter("schedule.overlap"))
    split_k, k_groups = property(attrgetter("schedule.split_k")), property(attrgetter("schedule.k_groups"))

    @property
    def columns_of_two(self) -> int:
        """Columns of a tile up to which two CTAs share the registers of a multiprocessor."""
        return 64

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
    def row_groups(self) -> int:
        """Warpgroups that have different rows."""
        return self.warpgroups // self.k_groups

    @property
    def tile_m(self) -> int:
        return MMA_ROWS * self.row_groups

    @property
    def half_tiles(self) -> bool:
        """Whether a tile has an odd number of halves of packed tiles: they are copied one by one."""
        return self.row_groups % 2 > 0

    @property
    def out_rows(self) -> int:
        """Columns of the output in a tile."""
        return self.tile_m // self.products

    @property
    def tile_k(self) -> int:
        return STAGE_TILES * TILE_K * self.k_groups

    @property
    def stage_k(self) -> int:
        return self.stage_tiles * TILE_K

    @property
    def k_tile_stages(self) -> int:
        return self.tile_k // self.stage_k

    @property
    def box_rows(self) -> int:
        """Rows of x that are copied at a time."""
        return self.part_columns if self.overlap else self.tile_n

    @property
    def in_tensor_memory(self) -> bool:
        """Whether tcgen05 multiplies, of which an operand and sums lie in tensor memory."""
        return self.arch.generation == "sm100"

    @property
    def group_rows(self) -> int:
        """Rows of the weight of each warpgroup that multiplies: of tcgen05 those of two of ``warpgroups``."""
        return MMA_ROWS * (2 if self.in_tensor_memory else 1)

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warpgroup whose first warps load, and those that multiply."""
        return WARPGROUP * (self.warpgroups * MMA_ROWS // self.group_rows + 1)

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory that each warpgroup has for decoded weights."""
        return TENSOR_COLUMNS * self.group_rows // self.tile_m - self.tile_n

    @property
    def slots_ahead(self) -> int:
        """CTAs whose sums are loaded before the first's are added: several where few registers hold them, and decoding,
        which is what these tiles take, was shared by many CTAs."""
        return 4 if self.in_tensor_memory and self.tile_n <= 64 else 1

    @property
    def decoded_stages(self) -> int:
        """Stages of the ring whose weights are in tensor memory at a time: a divisor of ``ring_stages``."""
        return divided(self)[1]

    @property
    def weights(self) -> Packing:
        return PACKINGS[self.packing][DTYPES[self.dtype]]

    @property
    def left_out(self) -> float:
        """What sums are multiplied with: decoded weights are so much smaller, and x where loading warps decode it."""
        return self.weights.factor ** (2 if self.decodes_x else 1)

    @property
    def fp8(self) -> bool:
        """Whether both operands are E4M3, and rows of both have factors."""
        return self.weights.by_table

    @property
    def mma_k(self) -> int:
        """Elements of K of one wgmma: 32 bytes."""
        return 32 // self.x_item

    @property
    def tile_steps(self) -> int:
        """wgmmas along K of a packed tile."""
        return TILE_K // self.mma_k

    @property
    def x_item(self) -> int:
        """Bytes of an element of x."""
        return self.weights.dtype.itemsize

    @property
    def tile_bytes(self) -> int:
        """Bytes of the packed tiles of a stage that are neighbours along K."""
        return self.stage_tiles * self.weights.tile_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed tiles of a stage."""
        return self.tile_m * self.tile_bytes // TILE_ROWS

    @property
    def x_bytes(self) -> int:
        """Bytes of x in a stage."""
        return self.tile_n * self.stage_k * self.x_item

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
        """Shared memory in which the warps of a CTA turn their output: with ``k_groups`` that of the first stages."""
        return 4 * self.warpgroups * self.epilogue_columns * self.epilogue_pitch if self.vector else 0

    @property
    def row_factors(self) -> bool:
        """Whether rows of x have factors."""
        return self.fp8

    @property
    def factor_bytes(self) -> int:
        """Bytes of shared memory, after those, for each warpgroup's factors of a tile's rows of x."""
        return self.warpgroups * self.factor_pitch if self.row_factors else 0

    @property
    def factor_pitch(self) -> int:
        """Bytes from a warpgroup's factors to the next one's."""
        return 4 * self.tile_n

    @property
    def k_parts(self) -> int:
        """Sums that make a tile shared along K: a warpgroup's each."""
        return self.split_k * self.k_groups

    @property
    def received_bytes(self) -> int:
        """Shared memory for the sums of the other CTAs that share a tile along K."""
        return (self.split_k - 1) * self.warpgroups * MMA_ROWS * self.part_columns * 4

    @property
    def joined_bytes(self) -> int:
        """Memory of the first stages for the sums of the other warpgroups that have the same rows."""
        return (self.k_groups - 1) * self.warpgroups * MMA_ROWS * self.split_k * self.part_columns * 4

    @property
    def part_columns(self) -> int:
        """Columns that a warpgroup stores of a tile shared along K."""
        return self.tile_n // self.k_parts

    @property
    def sums_columns(self) -> int:
        """Columns of an epilogue tile: those of which sums are received, and stored, together."""
        part, most = self.part_columns, self.epilogue_columns
        return part if self.split_k == 1 or part <= most else math.gcd(part, most)

    @property
    def part_epilogue_tiles(self) -> int:
        """Epilogue tiles of a warpgroup's columns of a tile shared along K."""
        return self.part_columns // self.sums_columns

    @property
    def epilogue_tiles(self) -> int:
        """Epilogue tiles of a CTA whose sums come from other CTAs."""
        return self.k_groups * self.part_epilogue_tiles if self.split_k > 1 else 0

    @cached_property
    def most_stages(self) -> int:
        """Stages that fit into shared memory."""
        each = (self.arch.shared_bytes + RESERVED_SHARED) // self.ctas_per_sm - RESERVED_SHARED
        own = self.epilogue_bytes + self.factor_bytes if self.k_groups == 1 else 0
        kept = own + self.received_bytes + 8 * self.epilogue_tiles + self.table_bytes
        room = each - kept - ALIGNMENT
        return min(room // (self.stage_bytes + 16), MAX_STAGES)

    @property
    def ring_stages(self) -> int:
        """Stages in shared memory: as many for each of ``k_groups``. A warpgroup that took a stage after another one
        would ask for its second phase without having seen its first: parities do not tell that from the phase before
        the first, so it would not wait."""
        if self.in_tensor_memory:
            return divided(self)[0]
        return self.stages or self.most_stages - self.most_stages % self.k_groups

"""The configuration of a GEMM of packed weights on WGMMA, which the kernels for sm_100 and sm_120 share."""

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
"""Widths of a tile: its rows of x, which are columns of the MMA."""
MMA_ROWS = 64
"""Rows of operand A of one wgmma, which one warpgroup multiplies."""
LOADING_WARPS = 2
"""The warps that load by bulk copies and TMA: one loads weights, one loads x."""
GATHER_THREADS = 64  # of two warps, which copy rows of x that lie anywhere, or rows of a weight
STAGE_TILES = 2
"""Packed tiles along K of a k-tile: the warps decode one while the tensor cores multiply the other."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the system keeps for each CTA, besides ``Architecture.shared_bytes``."""
ALIGNMENT = 256
"""The most bytes of shared memory that aligning its buffers costs."""
MAX_STAGES = 16


@dataclass(frozen=True, kw_only=True)
class WgmmaConfig:
    """One variant of the kernel for out (M, N) = x (M, K) · weight (N, K)ᵀ.

    The weight is operand A of the MMA, so a tile has ``tile_m`` rows of the weight and ``tile_n`` rows of x.

    dtype: the dtype of x, to which weights are decoded. packing: the packing of the weight
        (``weight_layout.PACKINGS``).
    warpgroups: the MMA warpgroups; each has 64 rows of the weight. ctas_per_sm: resident CTAs of an SM.
    stage_tiles: packed tiles along K in a stage. stages: stages of the ring; 0: as many as fit.
    schedule: how CTAs share the work. factors: device scalars that multiply the alpha of each product.
    vector: whether the output has 16-bit elements and its rows start at multiples of 16 bytes.
    bias: the dtype of the bias, or "". gate: "" for one product. With a gate, eight rows of the gate weight and eight
        rows of the up weight alternate, and the output is gate(first) · second.
    promoted: whether fp32 registers add the sums of an FP8 product after each k-tile, since tensor cores keep only
        about 14 bits of them.
    first: the configuration of a kernel that quantizes or decodes x first; this kernel starts while that one still
        runs.
    decodes_x: whether x is NVFP4 and the loading warps decode it. batched: whether the operands are batches of rows.
    programmatic: as in ``StreamConfig``.
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

    # CTAs of one MMA, which the tile schedulers ask for
    ctas = 1
    # bytes of shared memory for a table of groups, which only grouped kernels have
    table_bytes = 0
    # whether threads gather rows of x by index
    gathered = False
    ways_to_start: ClassVar[tuple[str, ...]] = ("", "weights")
    tiles_n: ClassVar[tuple[int, ...]] = TILE_N

    scheduler, raster = property(attrgetter("schedule.scheduler")), property(attrgetter("schedule.raster"))
    cluster_rows, overlap = property(attrgetter("schedule.cluster_rows")), property(attrgetter("schedule.overlap"))
    split_k, k_groups = property(attrgetter("schedule.split_k")), property(attrgetter("schedule.k_groups"))

    @property
    def columns_of_two(self) -> int:
        """The widest tile for which two CTAs fit into the registers of an SM."""
        return 64

    @property
    def cluster(self) -> tuple[int, int]:
        """CTAs of a cluster along the rows of the weight, and along those of x."""
        return self.cluster_rows, 1

    @property
    def clustered(self) -> bool:
        """Whether a cluster has more than one CTA."""
        return self.cluster_rows * self.split_k > 1

    @property
    def products(self) -> int:
        return 2 if self.gate else 1

    @property
    def row_groups(self) -> int:
        """Warpgroups that have different rows of the weight."""
        return self.warpgroups // self.k_groups

    @property
    def tile_m(self) -> int:
        return MMA_ROWS * self.row_groups

    @property
    def half_tiles(self) -> bool:
        """Whether a tile ends in the middle of a packed tile, so that halves of packed tiles are copied one by one."""
        return self.row_groups % 2 > 0

    @property
    def out_rows(self) -> int:
        """Columns of the output in a tile: rows of the weight, or pairs of rows of a gated product."""
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
        """Rows of x in one TMA copy."""
        return self.part_columns if self.overlap else self.tile_n

    @property
    def in_tensor_memory(self) -> bool:
        """Whether tcgen05 multiplies, whose decoded operand and accumulators lie in tensor memory."""
        return self.arch.generation == "sm100"

    @property
    def group_rows(self) -> int:
        """Rows of the weight of each MMA warpgroup. On tcgen05 a warpgroup has the rows of two of ``warpgroups``."""
        return MMA_ROWS * (2 if self.in_tensor_memory else 1)

    @property
    def threads(self) -> int:
        """Threads of a CTA: the loading warpgroup, and the MMA warpgroups."""
        return WARPGROUP * (self.warpgroups * MMA_ROWS // self.group_rows + 1)

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory that each warpgroup has for decoded weights."""
        return TENSOR_COLUMNS * self.group_rows // self.tile_m - self.tile_n

    @property
    def slots_ahead(self) -> int:
        """CTAs whose partial sums a thread loads before it adds the first: several where a slot needs few registers.
        Decoding is what takes such a tile's time, and many CTAs share it."""
        return 4 if self.in_tensor_memory and self.tile_n <= 64 else 1

    @property
    def decoded_stages(self) -> int:
        """Stages whose weights are decoded in tensor memory at a time: a divisor of ``ring_stages``."""
        return divided(self)[1]

    @property
    def weights(self) -> Packing:
        return PACKINGS[self.packing][DTYPES[self.dtype]]

    @property
    def left_out(self) -> float:
        """The factor of sums that decoding leaves out: once for weights, and again for x that loading warps decode."""
        return self.weights.factor ** (2 if self.decodes_x else 1)

    @property
    def fp8(self) -> bool:
        """Whether both operands are E4M3, and the rows of both have factors."""
        return self.weights.by_table

    @property
    def mma_k(self) -> int:
        """Elements along K of one wgmma: 32 bytes."""
        return 32 // self.x_item

    @property
    def tile_steps(self) -> int:
        """The wgmmas along K of a packed tile."""
        return TILE_K // self.mma_k

    @property
    def x_item(self) -> int:
        """Bytes of an element of x."""
        return self.weights.dtype.itemsize

    @property
    def tile_bytes(self) -> int:
        """Bytes that a stage copies from one row of packed tiles, which are contiguous along K."""
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
        """Rows of x that a warp transposes at a time: columns of the MMA become rows of the output."""
        return 16 * self.products

    @property
    def epilogue_pitch(self) -> int:
        """Bytes from one of these columns to the next in shared memory, of which 32 (gated: 16) hold data: eight
        neighbours fall into different banks."""
        return 16 if self.gate else 48

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of shared memory in which warps transpose their output. With ``k_groups`` these are those of the first
        stages."""
        return 4 * self.warpgroups * self.epilogue_columns * self.epilogue_pitch if self.vector else 0

    @property
    def row_factors(self) -> bool:
        """Whether rows of x have factors."""
        return self.fp8

    @property
    def factor_bytes(self) -> int:
        """Bytes of shared memory, after the epilogue's, for each warpgroup's factors of a tile's rows of x."""
        return self.warpgroups * self.factor_pitch if self.row_factors else 0

    @property
    def factor_pitch(self) -> int:
        """Bytes from the factors of one warpgroup to those of the next."""
        return 4 * self.tile_n

    @property
    def k_parts(self) -> int:
        """Parts of K of a tile. One warpgroup has the sums of each part for its rows."""
        return self.split_k * self.k_groups

    @property
    def received_bytes(self) -> int:
        """Bytes of shared memory for the sums that the other CTAs of the cluster send (split-K)."""
        return (self.split_k - 1) * self.warpgroups * MMA_ROWS * self.part_columns * 4

    @property
    def joined_bytes(self) -> int:
        """Bytes of the first stages that ``k_groups`` reuses for the sums of the warpgroups that have the same rows."""
        return (self.k_groups - 1) * self.warpgroups * MMA_ROWS * self.split_k * self.part_columns * 4

    @property
    def part_columns(self) -> int:
        """Columns that each of ``k_parts`` warpgroups stores of a tile shared along K."""
        return self.tile_n // self.k_parts

    @property
    def sums_columns(self) -> int:
        """Columns of an epilogue tile, whose sums a warpgroup receives and stores together."""
        part, most = self.part_columns, self.epilogue_columns
        return part if self.split_k == 1 or part <= most else math.gcd(part, most)

    @property
    def part_epilogue_tiles(self) -> int:
        """Epilogue tiles in the ``part_columns`` of a warpgroup."""
        return self.part_columns // self.sums_columns

    @property
    def epilogue_tiles(self) -> int:
        """Epilogue tiles of a CTA whose sums come from other CTAs."""
        return self.k_groups * self.part_epilogue_tiles if self.split_k > 1 else 0

    @cached_property
    def most_stages(self) -> int:
        """The most stages that fit into shared memory."""
        each = (self.arch.shared_bytes + RESERVED_SHARED) // self.ctas_per_sm - RESERVED_SHARED
        own = self.epilogue_bytes + self.factor_bytes if self.k_groups == 1 else 0
        kept = own + self.received_bytes + 8 * self.epilogue_tiles + self.table_bytes
        room = each - kept - ALIGNMENT
        return min(room // (self.stage_bytes + 16), MAX_STAGES)

    @property
    def ring_stages(self) -> int:
        """Stages in shared memory, a multiple of ``k_groups``. A warpgroup that met a stage for the first time in its
        second phase would not wait: that phase has the parity that the barrier had before its first phase."""
        if self.in_tensor_memory:
            return divided(self)[0]
        return self.stages or self.most_stages - self.most_stages % self.k_groups

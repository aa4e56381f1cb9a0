"""Which kernel multiplies a packed weight: the streaming one for few rows of x (sm_90a, sm_120a), WGMMA for more
(sm_90a)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import OperandError, OperandTypeError, explain
from ..kernels.gemm.sm90.config import MMA_ROWS, STAGE_TILES, WgmmaConfig
from ..kernels.gemm.sm90.config import can_implement as can_wgmma
from ..kernels.gemm.sm90.stream_config import StreamConfig
from ..kernels.gemm.sm90.stream_config import can_implement as can_stream
from ..runtime.bounded import remembered
from ..target import Architecture
from ..weight_layout import TILE_K, packed_rows, tiles

STREAM_ROWS = 16
"""Rows of x up to which weights are streamed: more are faster on WGMMA."""
LEAST_BUSY = 0.8
"""Share of the multiprocessors that must have units of their own for none to be cut."""
START_US = 5.0
"""Launch, first bytes and last store."""
STAGE_US = {32: 0.40, 64: 0.49, 128: 0.65, 256: 1.22}
"""µs of a multiprocessor for 128 rows of the weight and 128 of K, by rows of x in a tile; with these, measured on an
NVIDIA H200 on 2026-11-22 at 8192 x 8192."""
FIX_UP_US = {32: 3.5, 64: 4.5, 128: 8.3, 256: 12.0}
"""µs to add the partial sums of stream-K."""
EXCHANGE_US = {32: 0.5, 64: 1.3, 128: 1.7}
"""µs to add those of two CTAs of a cluster."""
SHARED_CTAS = {32: 2, 64: 1, 128: 1}
"""CTAs of a multiprocessor where tiles are shared along K."""
SHARED_STAGE_TILES = {32: 2, 64: 2, 128: 1}
"""Packed tiles of a stage there: short stages where the ring would have few."""
SPLIT_K = 2
"""CTAs of a cluster that share a tile along K: of four there are fewer at once than multiprocessors."""


@dataclass(frozen=True, kw_only=True)
class PackedProblem:
    """out (m, n) = x (m, k) · weight (n, k)ᵀ, or two such products, joined by ``gate``. quantized: x is NVFP4. vector:
    rows of the output start at multiples of 16 bytes. factors: device scalars that multiply alpha, of each product.
    bias: its dtype, or "". packing: of the weight."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    out: str = "bfloat16"
    quantized: bool = False
    vector: bool = True
    factors: int = 0
    bias: str = ""
    gate: str = ""
    packing: str = "nvfp4"

    @property
    def rows(self) -> int:
        """Of the packed weight."""
        return packed_rows(self.n, bool(self.gate))


class ScratchSize(NamedTuple):
    """fp32 numbers of partial sums, and flags, of a launch."""

    floats: int
    flags: int


@dataclass(frozen=True)
class PackedPlan:
    """A kernel and the clusters of CTAs it is launched with."""

    config: StreamConfig | WgmmaConfig
    workers: int

    @property
    def streams(self) -> bool:
        return isinstance(self.config, StreamConfig)

    def scratch(self, n: int) -> ScratchSize:
        """Of a launch for a weight of ``n`` rows: none where no unit or tile is cut."""
        c = self.config
        if isinstance(c, StreamConfig):
            cut = -(-n // c.out_rows) % self.workers > 0
            return ScratchSize(2 * self.workers * c.columns * c.rows, 2 * self.workers) if cut else ScratchSize(0, 0)
        if c.scheduler != "stream_k":
            return ScratchSize(0, 0)
        groups = self.workers * c.cluster_rows * c.warpgroups
        return ScratchSize(groups * MMA_ROWS * c.tile_n, groups)


@remembered
def choose(problem: PackedProblem, arch: Architecture, sm_count: int, given: PackedPlan | None = None) -> PackedPlan:
    """The plan for ``problem`` on ``sm_count`` multiprocessors, or the caller's with what the problem decides.

    Raises:
        OperandError: no kernel can run it.
    """
    if given is None:
        plan = _chosen(problem, arch, sm_count)
    else:
        check_plan(given)
        plan = replace(given, config=replace(given.config, arch=arch, **_decided(problem, given.streams)))
    reason = _refused(problem, plan) or (can_stream if plan.streams else can_wgmma)(plan.config)
    if reason:
        raise OperandError(reason)
    return plan


def check_plan(given: PackedPlan | None) -> None:
    """Raises OperandTypeError for what is neither None nor a plan."""
    if given is not None and not isinstance(given, PackedPlan):
        raise OperandTypeError.of("config", got=type(given).__name__, expected="a PackedPlan of planning.packed")


def _refused(p: PackedProblem, plan: PackedPlan) -> str:
    """Why a caller's plan cannot run the problem, or an empty string."""
    if plan.workers < 1:
        return explain("workers", got=plan.workers, expected="at least 1")
    c = plan.config
    if not plan.streams and c.split_k > 1:
        tiles, steps = _tiles(p, c), -(-p.k // c.tile_k)
        if plan.workers != tiles:
            return explain("workers of a plan with split_k", got=plan.workers, expected=f"{tiles}: a tile each")
        if steps < c.split_k:
            return explain("split_k", got=c.split_k, expected=f"at most {steps}: steps of {c.tile_k} along K")
    if plan.streams and not _streams(p):
        got = f"{p.m} rows of x, K {p.k}, {'a' if p.bias else 'no'} bias"
        expected = f"at most {STREAM_ROWS} rows, no bias, K a multiple of {STAGE_TILES * TILE_K} if x is NVFP4"
        return explain("streaming kernel", got=got, expected=expected)
    return ""


def _chosen(p: PackedProblem, arch: Architecture, sm_count: int) -> PackedPlan:
    # sm_120a has the streaming kernel alone: what it cannot run is refused
    if _streams(p) or arch.generation == "sm120":
        return _streamed(p, arch, sm_count)
    # a tile wider than need be: the next narrower covers all rows of x
    widths = [tile_n for tile_n in STAGE_US if tile_n == min(STAGE_US) or tile_n // 2 < p.m]
    plans = [_wgmma(p, arch, sm_count, tile_n, scheduler) for tile_n in widths for scheduler in ("static", "stream_k")]
    if p.k > STAGE_TILES * TILE_K:
        plans += [_shared(p, arch, tile_n) for tile_n in widths if tile_n in EXCHANGE_US]
    return min(plans, key=lambda plan: predict(plan, p, sm_count))


def _tiles(p: PackedProblem, c: WgmmaConfig) -> int:
    return -(-p.rows // c.tile_m) * -(-p.m // c.tile_n)


def predict(plan: PackedPlan, p: PackedProblem, sm_count: int) -> float:
    """Modelled µs of a WGMMA plan on an H200, launch included; within about 15 % of what was measured there."""
    c = plan.config
    tiles, steps = _tiles(p, c), -(-p.k // c.tile_k)
    if c.scheduler == "stream_k":
        work = tiles * steps
        return START_US + work / min(sm_count, work) * STAGE_US[c.tile_n] + FIX_UP_US[c.tile_n]
    rounds = -(-tiles * c.split_k // sm_count)
    exchange = EXCHANGE_US[c.tile_n] if c.split_k > 1 else 0.0
    return START_US + rounds * -(-steps // c.split_k) * STAGE_US[c.tile_n] + exchange


def _wgmma(p: PackedProblem, arch: Architecture, sm_count: int, tile_n: int, scheduler: str) -> PackedPlan:
    """The plan with this tile and scheduler."""
    ctas_per_sm = 2 if tile_n <= 64 else 1
    config = WgmmaConfig(
        arch=arch, tile_n=tile_n, ctas_per_sm=ctas_per_sm, scheduler=scheduler, **_decided(p, streams=False)
    )
    slots, tiles = sm_count * ctas_per_sm, _tiles(p, config)
    if scheduler == "stream_k":
        return PackedPlan(config, min(slots, tiles * -(-p.k // config.tile_k)))
    even = -(-p.rows // config.tile_m) % 2 == 0
    if even and (tile_n == 128 or (tile_n == 256 and tiles >= 2 * slots)):
        # x from L2 once for two CTAs
        return PackedPlan(replace(config, cluster_rows=2), min(tiles, slots) // 2)
    return PackedPlan(config, min(tiles, slots))


def _shared(p: PackedProblem, arch: Architecture, tile_n: int) -> PackedPlan:
    """The plan whose clusters share tiles along K."""
    config = WgmmaConfig(
        arch=arch,
        tile_n=tile_n,
        ctas_per_sm=SHARED_CTAS[tile_n],
        split_k=SPLIT_K,
        stage_tiles=SHARED_STAGE_TILES[tile_n],
        scheduler="static",
        **_decided(p, streams=False),
    )
    return PackedPlan(config, _tiles(p, config))


def _streams(p: PackedProblem) -> bool:
    """Whether the streaming kernel takes the problem: NVFP4 x must have scales for every tile of the weight."""
    return p.m <= STREAM_ROWS and not p.bias and not (p.quantized and p.k % (STAGE_TILES * TILE_K))


def _streamed(p: PackedProblem, arch: Architecture, sm_count: int) -> PackedPlan:
    """The tallest units of which every CTA has whole ones while few multiprocessors idle: sums that meet in global
    memory take longer, for memory is the limit. Units are cut where there are none such."""
    k_tiles = tiles(p.rows, p.k)[1]
    long_stage = 4 if k_tiles % 4 == 0 else STAGE_TILES
    # eight warps along K need eight stages, and as many sums, in shared memory
    warps_k = 8 if arch.generation == "sm90" else 4
    half = {"slabs": 4, "warps_m": 8 // warps_k, "warps_k": warps_k, "stage_tiles": STAGE_TILES, "stages": 16}
    quarter = {"slabs": 2, "warps_m": 2, "warps_k": 4, "stage_tiles": long_stage, "stages": 64 // long_stage}
    for tiling in (half, quarter):
        config = StreamConfig(arch=arch, **tiling, **_decided(p, streams=True))
        units = -(-p.rows // config.rows)
        each = -(-units // sm_count)
        if units >= each * sm_count * LEAST_BUSY:
            return PackedPlan(config, -(-units // each))
    config = StreamConfig(arch=arch, **half, **_decided(p, streams=True))
    return PackedPlan(config, min(sm_count, -(-p.rows // config.rows) * (k_tiles // config.stage_tiles)))


def _decided(p: PackedProblem, streams: bool) -> dict[str, Any]:
    """The fields of a configuration that the problem decides."""
    found = {"dtype": p.dtype, "packing": p.packing, "out": p.out, "factors": p.factors, "gate": p.gate}
    if streams:
        # rows that are aligned may still end within a vector: a single one, or those of a slice
        vector = p.vector and p.n % 4 == 0
        return found | {"columns": 8 if p.m <= 8 else 16, "quantized_x": p.quantized, "vector": vector}
    return found | {"vector": p.vector and p.out != "float32", "bias": p.bias}

"""A model of how long a GEMM takes on a B200: formulae over published figures. No time from here is a measurement.

    t = start + round trip + max(mma, l2, latency + dram) + reduction + epilogue

start: launch, prologue and exit, and the barriers of a cluster. round trip: from the request for a stage to the end of
its MMAs, once, for the first stage. Later stages are bound by the slowest of these over the N k-tiles of the busiest
CTA:

* mma: N times the cycles of the instructions of a k-tile; or, if that is longer, the time of a device full of CTAs at
  the best rate published for whole kernels;
* l2: the bytes that all CTAs load, multicast counted once, over L2's bandwidth;
* latency + dram: a ring of S stages requests the next S k-tiles once a round trip, so N of them take N · round trip /
  S. The time of the bytes of DRAM is added, because CTAs that started together request, and wait, together.

``docs/explanation/gemm_plans.md`` has the reasons, the fit, its errors, and what the model does not know.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..kernels.gemm.config import CTA_ROWS, GemmConfig
from ..kernels.gemm.shared_plan import MIN_STAGES
from ..kernels.gemm.sm100.memory_plan import Tcgen05SharedPlan, TensorPlan
from ..scale_layout import ATOM_COLS, ATOM_ROWS
from . import rates

LABEL = "model"
"""The name that every figure of this module must have wherever it is shown."""


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


@dataclass(frozen=True)
class Prediction:
    """A modelled time in microseconds, and its terms (see the module). ``label`` is always "model".

    steps: k-tiles of the busiest CTA, one after the other. waves: tiles of the busiest CTA. ctas: CTAs that run at
    once. bytes_in_flight: bytes of all their rings.
    """

    start_us: float
    round_trip_us: float
    mainloop_us: float
    latency_us: float
    dram_us: float
    mma_us: float
    l2_us: float
    reduction_us: float
    epilogue_us: float
    steps: int
    waves: float
    ctas: int
    stages: int
    bytes_in_flight: int
    dram_bytes: float
    flops: float
    label: str = LABEL

    @property
    def us(self) -> float:
        """The whole time."""
        return self.start_us + self.round_trip_us + self.mainloop_us + self.reduction_us + self.epilogue_us

    @property
    def bound(self) -> str:
        """The largest term of the mainloop."""
        return max(("mma", "l2", "latency", "dram"), key=lambda term: getattr(self, f"{term}_us"))


@dataclass(frozen=True)
class Minimum:
    """What any kernel must move and compute: each operand, scale and result byte once, without padding."""

    bytes: float
    flops: float

    @property
    def speed_of_light_us(self) -> float:
        """Published bound: the longer of memory and arithmetic at their peaks."""
        return max(self.bytes / rates.PEAK_BYTES_S, self.flops / rates.PEAK_FLOP_S) * 1e6

    @property
    def ceiling_us(self) -> float:
        """The bound of ``speed_of_light_us`` at the best rates published for whole kernels; launch not counted."""
        return max(self.bytes / rates.BEST_BYTES_S, self.flops / rates.BEST_FLOP_S) * 1e6


@dataclass(frozen=True)
class _Stage:
    """What the model needs to know of a stage: their number, its bytes (all, A's, B's, with scales), its MMAs' time."""

    stages: int
    loaded: int
    a: int
    b: int
    mma_us: float
    sustained_us: float
    acc_stages: int


_STAGE_FIELDS = (
    "arch", "a_format", "b_format", "tile_n", "pair", "split_k", "stages", "acc_stages", "scheduler", "store", "out",
    "products", "shared",
)  # fmt: skip
_stage_values = operator.attrgetter(*_STAGE_FIELDS)


def _stage(c: GemmConfig) -> _Stage:
    return _stage_of(*_stage_values(c))


@functools.lru_cache(maxsize=4096)
def _stage_of(*values: object) -> _Stage:
    """The stage, cached by the few fields that matter: a choice compares many clusters with the same stage."""
    c = GemmConfig(**dict(zip(_STAGE_FIELDS, values)))
    c = replace(c, cluster=(c.ctas, 1))
    plan = Tcgen05SharedPlan(c)
    b = sum(size for name, size in plan.stage.parts if "B" in name)
    cycles = c.products * c.blocks_k * rates.MMA_CYCLES[c.ctas, c.tile_n]
    # 8-bit kinds do half the operations in the same cycles, so the sustained rate is one of cycles, for columns of N
    ideal_flops = c.products * c.blocks_k * 2 * CTA_ROWS * c.tile_n * 64
    sustained = ideal_flops / (rates.SUSTAINED_FLOP_S / rates.SM_COUNT) * 1e6
    loaded = plan.stage.loaded
    mma_us = cycles / rates.CLOCK_GHZ * 1e-3
    return _Stage(plan.stages, loaded, loaded - b, b, mma_us, sustained, TensorPlan(c).acc_stages)


def has_room(config: GemmConfig) -> bool:
    """Whether shared memory holds enough stages to model the configuration."""
    return _stage(config).stages >= MIN_STAGES


def traffic(
    config: GemmConfig, m: int, n: int, k: int, batch: int, ctas: int, l2_bytes: float = rates.L2_BYTES
) -> float:
    """Bytes between DRAM and L2: every operand once, with the padding of its scales, and the output.

    If L2 cannot hold both operands, the one along which consecutive tiles do not move is read once a wave of tiles.
    """
    fa, fb = config.formats
    count_a, count_b = config.counts
    a = count_a * (m * k / fa.elements_per_byte + _up(m, ATOM_ROWS) * _up(k // fa.block, ATOM_COLS))
    b = count_b * (n * k / fb.elements_per_byte + _up(n, ATOM_ROWS) * _up(k // fb.block, ATOM_COLS))
    out = m * n * config.out_bytes
    if a + b > l2_bytes:
        tiles = max(1, ctas // config.ctas)
        tiles_m, tiles_n = -(-m // config.tile_m), -(-n // config.tile_n)
        if config.raster == "m":
            a *= -(-tiles_n // max(1, tiles // tiles_m)) if a > l2_bytes else 1
        else:
            b *= -(-tiles_m // max(1, tiles // tiles_n)) if b > l2_bytes else 1
    return batch * (a + b + out)


def _partial_bytes(c: GemmConfig, work: int, workers: int, k_tiles: int) -> int:
    """Bytes of partial sums in global memory: every cluster whose equal share starts inside a tile writes them once.

    L2 may keep them beyond the launch; it may keep the output, too, which is counted.
    """
    if c.scheduler != "stream_k":
        return 0
    share, longer = divmod(work, workers)
    inside = sum((w * share + min(w, longer)) % k_tiles != 0 for w in range(workers))
    return inside * c.products * c.tile_m * c.tile_n * 4


class Distributed(NamedTuple):
    """How work is distributed: ``work`` k-tiles, or work tiles, to ``workers`` clusters, with ``ctas`` CTAs at once.

    The busiest CTA has ``steps`` k-tiles of ``waves`` work tiles.
    """

    work: int
    workers: int
    ctas: int
    steps: int
    waves: float


def distributed(c: GemmConfig, tiles: int, k_tiles: int, workers: int, fit: int) -> Distributed:
    """Distributes ``tiles`` of ``k_tiles`` each to ``workers`` clusters (0: ``fit``, those at once), at most to all."""
    stream = c.scheduler == "stream_k"
    work = tiles * k_tiles if stream else tiles
    workers = min(workers or fit, work)
    share = -(-work // workers) * -(-workers // fit)
    steps, waves = (share, share / k_tiles) if stream else (share * -(-k_tiles // c.split_k), float(share))
    return Distributed(work, workers, min(workers, fit) * c.cluster_size, steps, waves)


def predict(
    config: GemmConfig,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    workers: int = 0,
    sm_count: int = rates.SM_COUNT,
    *,
    dram_bytes: float | None = None,
    mma_flops: float | None = None,
) -> Prediction:
    """Models one launch of ``config`` on A (M, K) and B (N, K) as the kernel sees them (after any swap).

    workers: the clusters launched (0: as many as run at once, or as there are tiles). dram_bytes, mma_flops: counts of
    the simulator in the place of the analytic bytes of DRAM and floating-point operations of the MMAs.

    Raises:
        ValueError: the configuration has no room for two stages, or the device for one of its clusters.
    """
    c, stage = config, _stage(config)
    cluster_m, cluster_n = c.cluster
    tiles = -(-m // (CTA_ROWS * cluster_m)) * -(-n // (c.tile_n * cluster_n)) * batch
    k_tiles = -(-k // c.tile_k)
    fit = rates.concurrent_clusters(c.cluster_size, sm_count)
    if fit == 0:
        raise ValueError(f"no cluster of {c.cluster_size} CTAs fits on {sm_count} multiprocessors")
    if stage.stages < MIN_STAGES:
        raise ValueError(f"shared memory has room for {stage.stages} stages of {c}, expected at least {MIN_STAGES}")
    work, workers, ctas, steps, waves = distributed(c, tiles, k_tiles, workers, fit)

    if dram_bytes is None:
        dram_bytes = traffic(c, m, n, k, batch, ctas) + _partial_bytes(c, work, workers, k_tiles)
    executed = 2.0 * c.products * tiles * k_tiles * c.tile_k * CTA_ROWS * cluster_m * c.tile_n * cluster_n
    flops = executed if mma_flops is None else mma_flops
    mma = steps * max(stage.mma_us, stage.sustained_us) * (flops / executed)
    asked = stage.a / cluster_n + stage.b * c.ctas / cluster_m
    l2 = steps * ctas * asked / rates.L2_BYTES_S * 1e6
    round_trip = rates.STAGE_LATENCY_US + stage.loaded / rates.SM_BYTES_S * 1e6 + stage.mma_us
    latency = (steps - 1) * round_trip / stage.stages
    dram = dram_bytes / rates.DRAM_BYTES_S * 1e6
    mainloop = max(mma, l2, latency + dram)

    reduction, epilogue = _reduction(c, steps, k_tiles), _epilogue(c)
    # with one accumulator, a tile's MMAs wait for the last tile's epilogue; with two only for a longer one
    exposed = epilogue if stage.acc_stages == 1 else max(0.0, epilogue - mainloop / max(waves, 1.0))
    epilogue += max(0.0, math.ceil(waves) - 1) * exposed
    start = rates.START_US + (rates.CLUSTER_US if c.cluster_size > 1 else 0.0)
    return Prediction(
        start_us=start,
        round_trip_us=round_trip,
        mainloop_us=mainloop,
        latency_us=latency,
        dram_us=dram,
        mma_us=mma,
        l2_us=l2,
        reduction_us=reduction,
        epilogue_us=epilogue,
        steps=steps,
        waves=waves,
        ctas=ctas,
        stages=stage.stages,
        bytes_in_flight=ctas * min(stage.stages, steps) * stage.loaded,
        dram_bytes=dram_bytes,
        flops=flops,
    )


def _reduction(c: GemmConfig, steps: int, k_tiles: int) -> float:
    """The time of sums from other CTAs, through distributed shared memory, or through global memory and back."""
    if c.split_k > 1:
        sent = (c.split_k - 1) * c.products * CTA_ROWS * c.slice_n * 4
        return rates.DSMEM_LATENCY_US + sent / rates.DSMEM_BYTES_S * 1e6
    if c.scheduler == "stream_k" and steps % k_tiles:
        tile = c.products * CTA_ROWS * c.tile_n * 4
        return 2 * (rates.STAGE_LATENCY_US + tile / rates.SM_BYTES_S * 1e6)
    return 0.0


def _epilogue(c: GemmConfig) -> float:
    """The time of one tile's epilogue; threads that store rows fill the sectors of memory less well than TMA."""
    epi_tiles = c.products * c.slice_n / 32
    by_threads = rates.DIRECT_FACTOR if c.out_major == "n" else rates.COLUMN_FACTOR
    return epi_tiles * rates.EPI_TILE_US * (by_threads if c.store == "direct" else 1.0)

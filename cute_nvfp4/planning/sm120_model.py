"""A model of how long a GEMM takes on a GPU of sm_120a or sm_121a. No time from here is a measurement.

    t = start + round trip + max(mma, latency, dram) + epilogues

mma: the k-tiles of the busiest CTA at the rate that whole kernels were seen to reach; latency: a ring of S stages
requests the next S k-tiles once a round trip; dram: all bytes at the published bandwidth; epilogues: those of every
tile of the busiest CTA, which nothing hides, because the warps that multiply hold the accumulators in registers. Rings
are short and stay full: latency and bandwidth bound the rate of the same loads, and do not add up as they do in the few
steps of the B200's model.
"""

from __future__ import annotations

import math

from ..kernels.gemm.config import CTA_ROWS, GemmConfig
from ..kernels.gemm.shared_plan import MIN_STAGES, StagePlan
from ..kernels.gemm.sm90.config import WgmmaConfig
from ..kernels.gemm.sm120.memory_plan import MmaSyncSharedPlan
from ..weight_layout import TILE_K, TILE_ROWS
from .gemm_model import Prediction, distributed, traffic
from .packed_costs import PackedCosts
from .sm120_rates import DRAM_SHARE, EPILOGUE_CYCLES, LATENCY_US, START_US, STEP_CYCLES, part_of


def has_room(config: GemmConfig) -> bool:
    """Whether shared memory holds enough stages."""
    return MmaSyncSharedPlan(config).stages >= MIN_STAGES


def predict(
    config: GemmConfig,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    workers: int = 0,
    sm_count: int = 170,
    *,
    dram_bytes: float | None = None,
) -> Prediction:
    """Models one launch of ``config``, as ``gemm_model.predict`` does for a B200."""
    part = part_of(sm_count)
    tiles = -(-m // CTA_ROWS) * -(-n // config.tile_n) * batch
    k_tiles = -(-k // config.tile_k)
    stream = config.scheduler == "stream_k"
    _, workers, ctas, steps, waves = distributed(config, tiles, k_tiles, workers, sm_count)
    flops = 2.0 * config.products * tiles * k_tiles * config.tile_k * CTA_ROWS * config.tile_n
    # an instruction with 8-bit operands takes the cycles of one with 4-bit operands and twice the K
    slow = 64 / config.kind.k
    mma = steps * (flops / tiles / k_tiles) * slow / part.sm_flop_s * 1e6
    if dram_bytes is None:
        dram_bytes = traffic(config, m, n, k, batch, ctas, part.l2_bytes)
        # the sums of tiles that two CTAs share are written and read once
        dram_bytes += 2 * workers * config.products * CTA_ROWS * config.tile_n * 4 if stream else 0
    dram = dram_bytes / (part.dram_bytes_s * DRAM_SHARE) * 1e6
    stages, loaded = MmaSyncSharedPlan(config).stages, StagePlan(config).loaded
    round_trip = LATENCY_US + mma / steps
    latency = (steps - 1) * round_trip / stages
    columns = config.products * config.tile_n / 128
    epilogue = math.ceil(waves) * columns * EPILOGUE_CYCLES / part.clock_ghz * 1e-3
    reduction = 2 * LATENCY_US if stream and steps % k_tiles else 0.0
    return Prediction(
        start_us=START_US,
        round_trip_us=round_trip,
        mainloop_us=max(mma, latency, dram),
        latency_us=latency,
        dram_us=dram,
        mma_us=mma,
        l2_us=0.0,
        reduction_us=reduction,
        epilogue_us=epilogue,
        steps=steps,
        waves=waves,
        ctas=ctas,
        stages=stages,
        bytes_in_flight=ctas * min(stages, steps) * loaded,
        dram_bytes=dram_bytes,
        flops=flops,
    )


def packed_costs(config: WgmmaConfig, columns: int, sm_count: int) -> PackedCosts:
    """The costs of products of 16-bit x and a packed weight, for tiles with ``columns`` rows of x.

    sm_count: the number of busy multiprocessors. A step takes the time of the tensor cores, or of its share of memory.
    """
    part, weights = part_of(sm_count), config.tile_m * config.tile_k
    mma = 2 * weights * columns / part.sm_f16_flop_s + STEP_CYCLES / part.clock_ghz * 1e-9
    packed = weights * config.weights.tile_bytes / (TILE_ROWS * TILE_K)
    step = max(mma, packed * sm_count / (part.dram_bytes_s * DRAM_SHARE)) * 1e6
    return PackedCosts(START_US, LATENCY_US, step, columns / 128 * EPILOGUE_CYCLES / part.clock_ghz * 1e-3)

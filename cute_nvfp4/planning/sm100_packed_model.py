"""The modelled time of a GEMM of 16-bit x and packed weights on a B200, from the published figures of ``rates`` and two
cycle counts of the simulator that no publication gives. No time from here is a measurement."""

from __future__ import annotations

from ..kernels.gemm.config import MMA_BYTES
from ..kernels.gemm.sm90.config import WgmmaConfig
from ..weight_layout import TILE_K, TILE_ROWS
from . import rates
from .packed_costs import PackedCosts
from .rates import Figure

_CLOCK = "the simulator's clock of a B200, of the kernel's own machine code"
DECODE_CYCLES = Figure(430, "cycles", "fitted", f"{_CLOCK}: a warpgroup decodes a packed tile to tensor memory")
STORE_CYCLES = Figure(3900, "cycles", "fitted", f"{_CLOCK}: a warpgroup stores 128 x 128 sums, 64 after 64")
LEAST_MMA_CYCLES = 32
"""The fewest cycles of an MMA of 128 rows with operand A in tensor memory: 64, 128 and 256 columns take 32, 64 and 128
(SemiAnalysisAI/microbench-blackwell, umma_throughput)."""


def packed_costs(config: WgmmaConfig, columns: int, sm_count: int) -> PackedCosts:
    """The costs of tiles with ``columns`` rows of x. sm_count: busy SMs."""
    each, groups = config.tile_k // TILE_K, config.tile_m // config.group_rows
    mma = groups * each * (TILE_K * 2 // MMA_BYTES) * max(LEAST_MMA_CYCLES, columns / 2)
    step = max(mma, each * DECODE_CYCLES) / (rates.CLOCK_GHZ * 1e3)
    weights = config.tile_m * config.tile_k * config.weights.tile_bytes / (TILE_ROWS * TILE_K)
    x = columns * config.tile_k * config.x_item
    dram, l2 = (
        sm_count * size / rate * 1e6 for size, rate in ((weights, rates.DRAM_BYTES_S), (weights + x, rates.L2_BYTES_S))
    )
    store = columns / 128 * STORE_CYCLES / (rates.CLOCK_GHZ * 1e3)
    return PackedCosts(rates.PUBLISHED_START_US, rates.PUBLISHED_STAGE_LATENCY_US, max(step, dram, l2), store)

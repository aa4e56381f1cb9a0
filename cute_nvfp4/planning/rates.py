"""Published figures of B200-class GPUs, on which the models of kernel times rest; none was measured by us.

Each figure names its source, and says what kind of statement it is: ``peak`` (a data sheet or a published bound),
``measured`` (by the source, on its machine), ``fitted`` (by us, to published times of another kernel or to modelled
times of ours, which `benchmarks/records/gemm_model.md` names), or ``assumed`` (nobody has published it; the text gives
the reason for the value). All are for one GPU with its 148 multiprocessors; times are in microseconds, sizes in bytes.
NVFP4, MXFP4 and MXFP8 instructions of one shape take the same time.
"""

from __future__ import annotations

_SEMIANALYSIS = "github.com/SemiAnalysisAI/microbench-blackwell @9a068d8"
_STUART_SUL = "github.com/StuartSul/gpu-experiments @4cb7ade"
_FLASHINFER = "github.com/flashinfer-ai/flashinfer/pull/2540 (GB200, 128x128 tiles, L2 cold)"
_CLOCK = "the simulator's clock of a B200: its times of 300 random plans (benchmarks/gemm_refit.py)"
_HACKATHON = "published speed of light of GPU MODE's NVFP4 hackathon (B200 at 1.5 GHz)"


class Figure(float):
    """A number with its unit, the kind of statement it is (see the module), and its source."""

    unit: str
    basis: str
    source: str

    def __new__(cls, value: float, unit: str, basis: str, source: str) -> Figure:
        figure = super().__new__(cls, value)
        figure.unit, figure.basis, figure.source = unit, basis, source
        return figure


PEAK_BYTES_S = Figure(7.68e12, "B/s", "peak", _HACKATHON)
PEAK_FLOP_S = Figure(6.90e15, "FLOP/s", "peak", f"{_HACKATHON}: dense FP4")
BEST_BYTES_S = Figure(5.91e12, "B/s", "measured", "the hackathon's winner: realistic ceiling of a B200")
BEST_FLOP_S = Figure(5.797e15, "FLOP/s", "measured", "the hackathon's winner: realistic ceiling of a B200, dense FP4")
CLOCK_GHZ = Figure(1.965, "GHz", "measured", f"{_SEMIANALYSIS}: clock that its cycles are given in")
SUSTAINED_FLOP_S = Figure(
    6.69e15, "FLOP/s", "measured", "FlashInfer: best NVFP4 rate of its benchmark, which rests between runs"
)
DRAM_BYTES_S = Figure(7.53e12, "B/s", "measured", f"{_STUART_SUL} 094: TMA loads of 512 MB, every byte once")
L2_BYTES_S = Figure(20.5e12, "B/s", "measured", f"{_STUART_SUL} 094: TMA loads of 8 to 78 MB, again and again")
L2_BYTES = Figure(78e6, "B", "measured", f"{_STUART_SUL} 094: up to here repeated loads come from L2 (of 126 MB)")
SM_BYTES_S = Figure(
    155e9, "B/s", "measured", f"{_SEMIANALYSIS} cutlass_gemm_mainloop: what a single multiprocessor can load"
)
LAUNCH_US = Figure(
    1.54, "us", "measured", "smallest cold GPU time of a published GEMM kernel (bf16 split-K, M = 1, N = 8192, K = 128)"
)
START_US = Figure(
    1.725, "us", "fitted", f"{_CLOCK}: all but mainloop and epilogue: launch, descriptors, barriers, exit"
)
STAGE_LATENCY_US = Figure(0.4704, "us", "fitted", f"{_CLOCK}: round trip of a stage, less its transfer and its MMAs")
EPI_TILE_US = Figure(0.09059, "us", "fitted", f"{_CLOCK}: 32 columns of the epilogue")
DIRECT_FACTOR = Figure(
    2.0, "", "assumed", "row-major stores by threads, which fill half sectors at a time, against TMA stores"
)
COLUMN_FACTOR = Figure(2.357, "", "fitted", f"{_CLOCK}: column-major stores by threads, against TMA stores")
CLUSTER_US = Figure(0.352, "us", "fitted", f"{_CLOCK}: barriers of a cluster, at its start and at its exit")
DSMEM_BYTES_S = Figure(36.61e9, "B/s", "fitted", f"{_CLOCK}: from one multiprocessor to another, 19 B a cycle")
DSMEM_LATENCY_US = Figure(
    0.1369, "us", "fitted", f"{_CLOCK}: a store to another multiprocessor, its mbarrier, and the wait for the slowest"
)
PUBLISHED_START_US = Figure(2.600, "us", "fitted", f"{_FLASHINFER}: START_US of that kernel")
PUBLISHED_STAGE_LATENCY_US = Figure(0.665, "us", "fitted", f"{_FLASHINFER}: STAGE_LATENCY_US of that kernel")
PUBLISHED_EPI_TILE_US = Figure(
    0.06, "us", "assumed", "of that kernel: 8 KB through shared memory at 128 B a cycle, as much again else"
)

FIGURES = {name.lower(): figure for name, figure in vars().items() if isinstance(figure, Figure)}
"""Every figure, by its name in lower case."""

SM_COUNT = 148
"""Multiprocessors of the GPU that the figures are for; rates of the whole chip do not depend on how many are in use."""

MMA_CYCLES = {
    (1, 64): 48.0,
    (1, 128): 64.0,
    (1, 192): 96.0,
    (1, 256): 128.0,
    (2, 64): 43.0,
    (2, 128): 64.0,
    (2, 192): 96.0,
    (2, 256): 128.0,
}
"""Cycles from one tcgen05.mma to the next, by (CTAs that share it, N), for M = 128 in each CTA, 32 bytes of K, and
operands in shared memory: SemiAnalysisAI/microbench-blackwell, umma_throughput. It timed kind::mxf8f6f4; the data
sheet's peak implies that kind::mxf4nvf4 takes as long. N = 192 is interpolated: from 128 on the cycles are N / 2."""

TMA_BYTES_IN_FLIGHT = (
    (2 << 10, 0.60e12),
    (4 << 10, 1.13e12),
    (8 << 10, 2.15e12),
    (16 << 10, 3.6e12),
    (32 << 10, 5.6e12),
    (64 << 10, 7.14e12),
    (128 << 10, 7.12e12),
)
"""(bytes in flight on each of 148 multiprocessors, B/s of TMA loads from DRAM): SemiAnalysisAI/microbench-blackwell,
ncu, middle of its range. The model does not use them; docs/explanation/gemm_plans.md compares it with them."""

CONCURRENT_CTAS = {1: 148, 2: 148, 4: 132, 8: 120, 16: 112}
"""The CTAs that a B200 runs at once, by size of cluster, for a kernel with one CTA a multiprocessor: a cluster lies
within one GPC, and GPCs have several sizes (StuartSul/gpu-experiments, 107-preferred-cluster)."""


def concurrent_clusters(size: int, sm_count: int) -> int:
    """The clusters of ``size`` CTAs, one CTA a multiprocessor, that run at once; the wasted share is that of a B200."""
    if sm_count < size:
        return 0
    most = CONCURRENT_CTAS[size] * sm_count // SM_COUNT
    return max(1, most // size)

"""Published figures of the GPUs of sm_120a and sm_121a; none was measured by us (``rates`` explains the kinds of
statements)."""

from __future__ import annotations

from dataclasses import dataclass

from .rates import Figure

_FLOP_PER_CLOCK = 4096
"""Dense NVFP4 or MXFP4 operations of one multiprocessor; an m16n8k64 takes four clocks."""
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper"
_SPARK = "NVIDIA DGX Spark data sheet"
_MEASURED = "users' reports of the CuTe DSL's NVFP4 GEMM"


@dataclass(frozen=True)
class Part:
    """One GPU.

    clock_ghz: the boost clock. sustained: the share of its peak that whole kernels were seen to reach on large
    problems. f16_flop_per_clock: dense operations of one multiprocessor on 16-bit values with float32 sums.
    """

    name: str
    sm_count: int
    clock_ghz: Figure
    dram_bytes_s: Figure
    l2_bytes: Figure
    sustained: Figure
    f16_flop_per_clock: Figure

    @property
    def sm_flop_s(self) -> float:
        """The rate of one multiprocessor for 4-bit operands; 8-bit operands take twice as long."""
        return _FLOP_PER_CLOCK * self.clock_ghz * 1e9 * self.sustained

    @property
    def sm_f16_flop_s(self) -> float:
        """The rate of one multiprocessor for 16-bit operands and float32 sums."""
        return self.f16_flop_per_clock * self.clock_ghz * 1e9 * self.sustained


PARTS = (
    Part(
        "RTX 5090",
        170,
        Figure(2.407, "GHz", "peak", _BLACKWELL),
        Figure(1.792e12, "B/s", "peak", _BLACKWELL),
        Figure(96 * 2**20, "B", "peak", _BLACKWELL),
        Figure(0.827, "", "assumed", "as the RTX PRO 6000, which has the same multiprocessors"),
        Figure(512, "FLOP", "peak", f"{_BLACKWELL}: 209.5 TFLOPS of dense FP16 with FP32 accumulate"),
    ),
    Part(
        "RTX PRO 6000",
        188,
        Figure(2.617, "GHz", "peak", "NVIDIA RTX PRO 6000 Blackwell data sheet: 4000 TOPS of sparse FP4"),
        Figure(1.792e12, "B/s", "peak", "NVIDIA RTX PRO 6000 Blackwell data sheet"),
        Figure(128 * 2**20, "B", "peak", _BLACKWELL),
        Figure(0.827, "", "fitted", f"{_MEASURED}: 1629 TFLOPS at 8192 x 8192 x 8192"),
        Figure(1024, "FLOP", "peak", f"{_BLACKWELL}: 503.8 TFLOPS of dense FP16 with FP32 accumulate"),
    ),
    Part(
        "GB10",
        48,
        Figure(2.55, "GHz", "peak", f"{_SPARK}: 1 PFLOP of sparse FP4"),
        Figure(0.273e12, "B/s", "peak", _SPARK),
        Figure(24 * 2**20, "B", "peak", "NVIDIA at Hot Chips 2025"),
        Figure(0.735, "", "fitted", f"{_MEASURED}: 356 TFLOPS at 4096 x 14336 x 4096"),
        Figure(1024, "FLOP", "assumed", "as the RTX PRO 6000: a quarter of the 4-bit rate"),
    ),
)

DRAM_SHARE = Figure(0.9, "", "assumed", "of the peak bandwidth that a kernel reaches, as on other GPUs")
START_US = Figure(3.0, "us", "assumed", "launch, descriptors, barriers, exit: the order of B200's fitted 2.6")
LATENCY_US = Figure(0.7, "us", "assumed", "round trip of a stage, as fitted for B200")
EPILOGUE_CYCLES = Figure(
    1200.0, "cycles", "assumed", "a tile of 128 x 128: 64 results a lane, a few instructions each, eight warps"
)

STEP_CYCLES = Figure(
    100.0, "cycles", "assumed", "a step of a 16-bit kernel beside its MMAs: a barrier, and fragments before the first"
)


def part_of(sm_count: int) -> Part:
    """The part with this number of multiprocessors, or with the nearest one."""
    return min(PARTS, key=lambda part: abs(part.sm_count - sm_count))

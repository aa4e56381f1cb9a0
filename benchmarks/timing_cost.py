"""Measures what the clock costs: ``python benchmarks/timing_cost.py`` prints a table of CPU seconds in Markdown.

Each launch is executed without checks and clock, with the clock for the first time (ptxas and nvdisasm run), and with
the clock again. A figure is the CPU seconds of this process and its children, the smaller of two runs, so that other
work on the machine does not count.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing_cases import Case, call_of

import cute_nvfp4
from cute_nvfp4.harness.tuning import operands
from cute_nvfp4.planning.gemm_problem import GemmProblem

HOPPER = (
    Case("gemv", 4096, 4096),
    Case("gemv", 3072, 1536, 6),
    Case("quantize", 1024, 4096, rule="max"),
    Case("quantize", 208, 5120, rule="four_six_mse"),
    Case("rmsnorm_quantize", 320, 5120),
    Case("silu_mul_quantize", 448, 5120),
    *(Case("gemm", m, k, n=n) for m, n, k in ((1, 2048, 4096), (40, 3072, 2048), (224, 2048, 3072))),
    Case("gated_gemm", 64, 2048, n=2048),
    Case("grouped_gemm", 24, 2048, 4, n=2048),
)
BLACKWELL = ((128, 2048, 2048), (512, 2048, 1024))
"""(m, n, k) of plain GEMMs."""


class Cost(NamedTuple):
    """CPU seconds of one launch."""

    functional: float
    first: float
    again: float


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def cost(call: Callable[[], object], arch: str, clock: str) -> Cost:
    def seconds(**options: str) -> float:
        begin = cpu_seconds()
        with cute_nvfp4.simulating(arch, checks=False, **options):
            call()
        return cpu_seconds() - begin

    seconds()  # the first run compiles the kernel
    functional = min(seconds(), seconds())
    first = seconds(clock=clock)
    return Cost(functional, first, min(seconds(clock=clock), seconds(clock=clock)))


def blackwell(m: int, n: int, k: int) -> Callable[[], object]:
    a, b = operands(GemmProblem(m, n, k), "cpu")
    return functools.partial(cute_nvfp4.gemm, a, b, backend="sim")


def main() -> int:
    torch.set_num_threads(1)
    print("| launch | functional | with the clock | times | the first time |\n|---|---|---|---|---|")
    hopper = ((f"{c.name}, sm_90a", call_of(c, "cpu"), "sm_90a", "h200") for c in HOPPER)
    other = ((f"gemm {m} x {n} x {k}, sm_100a", blackwell(m, n, k), "sm_100a", "b200") for m, n, k in BLACKWELL)
    for name, call, arch, clock in (*hopper, *other):
        c = cost(call, arch, clock)
        ratio = f"{c.again / c.functional:.1f}"
        print(f"| {name} | {c.functional:.2f} | {c.again:.2f} | {ratio} | {c.first:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares the GEMM model with another kernel's published times, and fits the two constants of that kernel.

``python benchmarks/gemm_validation.py`` replaces our start, round trip and epilogue by the published kernel's, and
compares the model with the 147 points of ``data/nvfp4_dense_gb200.csv``. ``--fit`` fits the first two again, to the
points with M = 64 and M = 512 alone. Runs nothing on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.planning import rates
from cute_nvfp4.planning.gemm_model import predict

DATA = Path(__file__).resolve().parent / "data" / "nvfp4_dense_gb200.csv"
FITTED_M = (64, 512)
"""The constants were fitted to the points with these M, and to no others."""
SM_COUNT = 152
"""Multiprocessors of a GB200; 448 tiles took it three waves, not four."""
CONFIG = GemmConfig(tile_n=128, out="bfloat16")
"""The published kernel's tile; its five stages follow from the same bytes."""
CONSTANTS = ("START_US", "STAGE_LATENCY_US", "EPI_TILE_US")
"""Constants in which kernels differ; ``rates`` also has the published kernel's values."""


@contextlib.contextmanager
def of_that_kernel() -> Iterator[None]:
    """Within this block the model uses the published kernel's constants of ``rates``."""
    before = {name: getattr(rates, name) for name in CONSTANTS}
    try:
        for name in CONSTANTS:
            setattr(rates, name, getattr(rates, f"PUBLISHED_{name}"))
        yield
    finally:
        for name, value in before.items():
            setattr(rates, name, value)


@dataclass(frozen=True)
class Point:
    m: int
    n: int
    k: int
    us: float

    @property
    def error(self) -> float:
        """Relative error of the model: positive where it says longer than was measured."""
        with of_that_kernel():
            return predict(CONFIG, self.m, self.n, self.k, sm_count=SM_COUNT).us / self.us - 1


@dataclass(frozen=True)
class Errors:
    """Errors over several points: how many, their mean size, their mean, and the worst point."""

    count: int
    mean: float
    bias: float
    worst: Point

    @classmethod
    def of(cls, points: list[Point]) -> Errors:
        errors = [point.error for point in points]
        worst = max(points, key=lambda point: abs(point.error))
        return cls(len(points), sum(map(abs, errors)) / len(points), sum(errors) / len(points), worst)

    def __str__(self) -> str:
        w = self.worst
        return (
            f"{self.count:4d} {100 * self.mean:6.1f} % {100 * self.bias:+6.1f} % {100 * w.error:+6.1f} %  "
            f"at {w.m} x {w.n} x {w.k}, {w.us} us"
        )


def points() -> list[Point]:
    """Reads the published times."""
    lines = (line for line in DATA.read_text().splitlines() if not line.startswith("#"))
    return [Point(int(r["m"]), int(r["n"]), int(r["k"]), float(r["us"])) for r in csv.DictReader(lines)]


def fit(chosen: list[Point]) -> tuple[float, float]:
    """(start_us, stage_latency_us) with the least mean square of relative errors over ``chosen``, by coordinate
    search."""
    before = rates.PUBLISHED_START_US, rates.PUBLISHED_STAGE_LATENCY_US

    def loss(start: float, latency: float) -> float:
        rates.PUBLISHED_START_US, rates.PUBLISHED_STAGE_LATENCY_US = start, latency
        return sum(point.error**2 for point in chosen)

    try:
        at, step = [2.0, 0.5], [0.5, 0.2]
        least = loss(*at)
        while max(step) > 1e-4:
            moves = [(i, d) for i in (0, 1) for d in (step[i], -step[i])]
            tried = [([x + (d if j == i else 0) for j, x in enumerate(at)]) for i, d in moves]
            found = min(tried, key=lambda x: loss(*x))
            if loss(*found) < least:
                at, least = found, loss(*found)
            else:
                step = [x / 2 for x in step]
    finally:
        rates.PUBLISHED_START_US, rates.PUBLISHED_STAGE_LATENCY_US = before
    return at[0], at[1]


def groups(everything: list[Point]) -> dict[str, list[Point]]:
    """The points by purpose: the fitted, the held out, and by M."""
    parts = {
        "fitted": [p for p in everything if p.m in FITTED_M],
        "held out": [p for p in everything if p.m not in FITTED_M],
        "held out, M > 16": [p for p in everything if p.m not in FITTED_M and p.m > 16],
        "held out, M <= 16, N < 8192": [p for p in everything if p.m <= 16 and p.n < 8192],
        "held out, M <= 16, N >= 8192": [p for p in everything if p.m <= 16 and p.n >= 8192],
    }
    for m in sorted({p.m for p in everything}):
        parts[f"M = {m}"] = [p for p in everything if p.m == m]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="find the fitted constants again")
    options = parser.parse_args()
    everything = points()
    if options.fit:
        start, latency = fit([p for p in everything if p.m in FITTED_M])
        print(f"start_us {start:.3f} (in use: {rates.PUBLISHED_START_US})")
        print(f"stage_latency_us {latency:.3f} (in use: {rates.PUBLISHED_STAGE_LATENCY_US})")
    print(f"{'model against published times':30} {'n':>4} {'mean':>8} {'bias':>8} {'worst':>8}")
    for name, part in groups(everything).items():
        print(f"{name:30} {Errors.of(part)}")


if __name__ == "__main__":
    main()

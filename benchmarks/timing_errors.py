"""Writes how far the clock was off, by GPU, for the package: ``python benchmarks/timing_errors.py --write``. Measures
nothing.

Each launch with a known time, measured or published, to which the clock was not fitted, gives a ratio: the known time
over the modelled one. Both are times of kernels without the launch; where launches were timed too, their cost on that
host is subtracted. ``harness/clock_errors.yml`` keeps how many ratios a GPU has, and the range of nine in ten of them;
``cute-nvfp4 eval --clock`` derives a score's uncertainty from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import published
import timing_b200
from timing import PREDICTED, RESULTS, Row, rows
from timing_cases import HELD_OUT_3, HELD_OUT_4, HELD_OUT_5, Case

from cute_nvfp4.harness.modelled_score import FILE, ClockErrors

HELD_OUT: dict[str, tuple[tuple[tuple[Case, ...], Path, Path], ...]] = {
    "h200": (
        (HELD_OUT_3, PREDICTED, RESULTS / "timing_fresh_nvidia_h200.json"),
        (HELD_OUT_4, PREDICTED, RESULTS / "timing_held_out_nvidia_h200.json"),
        (HELD_OUT_5, PREDICTED, RESULTS / "timing_held_out_5_nvidia_h200.json"),
    ),
    "h100": (
        (HELD_OUT_4, RESULTS / "timing_predicted_h100.json", RESULTS / "timing_fresh_nvidia_h100_80gb_hbm3.json"),
    ),
}
"""Launches that were predicted before they were measured: the cases, the predictions, and the measurement. The current
clock models those of a GPU's last entry."""


def held_out(clock: str) -> list[list[Row]]:
    """The launches of each measurement."""
    return [rows(*of) for of in HELD_OUT[clock]]


def ratios(clock: str) -> list[float]:
    """Known over modelled times of kernels, of the set of launches that was measured last."""
    if clock in HELD_OUT:
        return [1 / (1 + row.kernel_error) for row in held_out(clock)[-1]]
    out = []
    for name, table in published.TABLES.items():
        found = json.loads(timing_b200.results(name).read_text())["times"]
        out += [point.us / found[point.name]["modelled_us"] for point in table.points() if point.name in found]
    return out


def errors(clock: str) -> ClockErrors:
    """What the package keeps of a GPU's ratios."""
    found = ratios(clock)
    twentieths = statistics.quantiles(found, n=20, method="inclusive")
    known = "measured" if clock in HELD_OUT else "published"
    return ClockErrors(
        known, len(found), *(round(x, 3) for x in (twentieths[0], statistics.median(found), twentieths[-1]))
    )


def text() -> str:
    """The content of the file."""
    lines = ["# Known times over modelled ones, by GPU: made by benchmarks/timing_errors.py, not typed."]
    for clock in ("b200", "h100", "h200"):
        lines.append(f"{clock}: {{{', '.join(f'{k}: {v}' for k, v in errors(clock)._asdict().items())}}}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} of the package")
    if parser.parse_args().write:
        FILE.write_text(text())
    print(text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

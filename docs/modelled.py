"""Tables of modelled times: of plans, and how far the clock is off."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

from table_cells import table


def plans(of: dict[str, Any]) -> str:
    """The modelled times of the contest's products, beside the best public ones. Nothing of it was measured by us."""
    rows = []
    for r in of["rows"]:
        shape = ", ".join(str(r["shape"][name]) for name in "mnk")
        rows.append(
            [
                r["benchmark"].removeprefix("nvfp4_"),
                shape,
                r["plan"],
                f"{r['model_us']:.1f}",
                f"{r['best_public_us']:g}",
            ]
        )
    return table(["problem", "m, n, k", "plan", "model, µs", "best public, µs"], rows)


def clock(record: Callable[[str], Any]) -> str:
    """How far the clock's times are off, of launches that it had not seen. record: gives a results file."""
    return table(["times", "launches", "mean error", "worst", "pairs in order"], _compared(record))


def w4a16(record: Callable[[str], Any]) -> str:
    """bfloat16 times a prepared weight on a B200: what the clock says, beside what others have published."""
    from published import records

    found, rows = record("ours_modelled_b200"), []
    for r in records("w4a16_b200.csv"):
        ours = found.get(f"w4a16 {r['m']} x {r['n']} x {r['k']} gemm")
        if ours:
            rows.append([r["m"], f"{ours['modelled_us']:.1f}", f"{float(r['flashinfer']):g}"])
    return table(["M", "gemm, modelled, µs", "FlashInfer, published, µs"], rows)


def error(record: Callable[[str], Any]) -> str:
    """The smallest and the largest mean error of ``clock``'s sets of launches, in whole percent."""
    means = sorted(float(row[2].rstrip("%")) for row in _compared(record))
    return f"{means[0]:.0f} to {means[-1]:.0f} %"


def launch_us() -> str:
    """What a launch costs by the machine file of an H200, in microseconds."""
    from cute_nvfp4.sim.clock.machine import machine

    return f"{machine('h200')['launch.empty_us']:g}"


def _compared(record: Callable[[str], Any]) -> list[list[str]]:
    """The rows of ``clock``."""
    import published
    import timing_b200
    from timing_cases import HELD_OUT_3

    measured, modelled = record("timing_fresh_nvidia_h200"), record("timing_predicted_h200")["cases"]
    errors = []
    for case in HELD_OUT_3:
        if case.name in measured["microseconds"] and case.name in modelled:
            own = measured["launch"]["stream" if case.sizes else "graph"]
            errors.append(round(own + modelled[case.name]["microseconds"], 3) / measured["microseconds"][case.name] - 1)
    rows = [["H200, measured by us after the prediction was committed", *_error_cells(errors, len(errors)), ""]]
    of = {
        "dense": "a GB200's, published: FlashInfer's NVFP4 GEMM, executed as it is",
        "grouped": "a B200's, published: FlashInfer's grouped NVFP4 GEMM",
        "bf16": "a B300's, published: NVIDIA's bf16 examples",
    }
    for name, text in of.items():
        points = published.TABLES[name].points()
        found = json.loads(timing_b200.results(name).read_text())["times"]
        right, pairs = timing_b200.ranked([p for p in points if p.name in found], found)
        some = timing_b200.errors(points, found)["all"]
        rows.append([text, *_error_cells(some, len(points)), f"{right / pairs:.1%}"])
    return rows


def _error_cells(errors: list[float], of: int) -> tuple[str, str, str]:
    """How many launches, their mean error and the worst one."""
    count = str(of) if len(errors) == of else f"{len(errors)} of {of}"
    return count, f"{statistics.mean(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"

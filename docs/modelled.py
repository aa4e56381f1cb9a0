"""Tables of modelled times: those of plans, and the errors of the clock."""

from __future__ import annotations

import functools
import json
import statistics
from typing import Any

from table_cells import table


def plans(of: dict[str, Any]) -> str:
    """Modelled times of the contest's products, beside the best public ones. We measured none of them."""
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


def clocked() -> str:
    """The package's plans for the contest's shapes that the clock decided. Nothing of it was measured."""
    from cute_nvfp4.harness.evaluation import Options, task_of
    from cute_nvfp4.planning.clocked import entries

    contest = set()
    for problem in ("nvfp4_group_gemm", "nvfp4_gemm", "nvfp4_dual_gemm"):
        for case in task_of(Options(problem=problem)).benchmarks:
            contest.add(tuple(zip(*(case[x] if isinstance(case[x], list) else [case[x]] for x in "mnk"))))

    heads = ["problem", "m, n, k", "tile", "K split", "store", "the model's choice, µs", "this plan, µs", "clock"]
    rows = []
    shown = (entry for entry in entries().values() if entry.sizes in contest)
    for entry in sorted(shown, key=lambda e: (e.grouped, e.products, e.sizes)):
        kind = "group_gemm" if entry.grouped else "gemm" if entry.products == 1 else "dual_gemm"
        several = ["/".join(map(str, dict.fromkeys(sizes))) for sizes in zip(*entry.sizes)]
        several[0] = "/".join(str(m) for m, _, _ in entry.sizes)
        tile = f"{256 if entry.tiling['pair'] else 128} x {entry.tiling['tile_n']}{', swap' if entry.swap else ''}"
        cells = (str(entry.tiling["split_k"]), entry.tiling["store"], f"{entry.replaced_us:.2f}", f"{entry.us:.2f}")
        rows.append([kind, ", ".join(several), tile, *cells, entry.clock])
    return table(heads, rows)


def clock() -> str:
    """The errors of the clock's times, for launches that it was not fitted to."""
    return table(["times", "launches", "mean error", "worst", "pairs in order"], _compared())


def w4a16(clocked: dict[str, Any]) -> str:
    """bfloat16 times a prepared weight on a B200: the times of planning's model, the clock's times of the launches that
    it executed, and published times."""
    from published import records

    from cute_nvfp4.planning.packed import PackedProblem, choose, predict
    from cute_nvfp4.target import ARCHITECTURES

    rows = []
    for r in records("w4a16_b200.csv"):
        problem = PackedProblem(**{key: int(r[key]) for key in "mnk"})
        plan = choose(problem, ARCHITECTURES["sm_100a"], ARCHITECTURES["sm_100a"].sm_count)
        found = clocked.get(f"w4a16 {r['m']} x {r['n']} x {r['k']} gemm", {}).get("modelled_us")
        by_model = f"{predict(plan, problem, ARCHITECTURES['sm_100a'].sm_count):.1f}"
        rows.append([r["m"], str(plan), by_model, f"{found:.1f}" if found else "—", r["flashinfer"]])
    return table(["M", "plan", "model, µs", "clock, µs", "FlashInfer, published, µs"], rows)


def error() -> str:
    """The smallest and the largest mean error of ``clock``'s sets of launches, in whole percent."""
    means = sorted(float(row[2].rstrip("%")) for row in _compared())
    return f"{means[0]:.0f} to {means[-1]:.0f} %"


def choice_loss() -> str:
    """How much longer than the fastest the planner's choices take by the clock, on problems that it was not fitted
    to."""
    return f"{100 * statistics.mean(_lost()):.1f} %"


def choice_worst() -> str:
    """The largest of these losses."""
    return f"{100 * max(_lost()):.1f} %"


def launch_us() -> str:
    """The cost of a launch in an H200's machine file, in microseconds."""
    from cute_nvfp4.sim.clock.machine import machine

    return f"{machine('h200')['launch.empty_us']:g}"


@functools.cache
def _lost() -> list[float]:
    import gemm_refit

    *_, choices = json.loads(gemm_refit.RECORD.read_text())["choices"].values()
    return gemm_refit.losses(choices, {})


def _compared() -> list[list[str]]:
    """The rows of ``clock``."""
    import published
    import timing_b200
    import timing_errors

    rows = []
    for clock in ("h200", "h100"):
        sets = timing_errors.held_out(clock)
        for number, found in enumerate(sets):
            which = f", set {number + 1}" if len(sets) > 1 else ""
            text = f"{clock.upper()}, measured by us after the prediction was committed{which}"
            rows.append([text, *_error_cells([row.error for row in found], len(found)), ""])
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
    """How many launches, their mean error and the worst error."""
    count = str(of) if len(errors) == of else f"{len(errors)} of {of}"
    return count, f"{statistics.mean(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"

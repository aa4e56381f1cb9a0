"""Compares the clock with published times of a B200: ``python benchmarks/timing_b200.py --table grouped``. Measures
nothing.

Others have published times of public programs (``published.py``): this script executes those programs in the simulator
with ``clock="b200"``, at the published sizes, and compares. Published times are kernel durations from a profiler,
without the launch; so the launch counts here as an empty kernel's duration (``launch.duration_us``).

Every few points it writes ``results/timing_modelled_b200.json`` (``timing_modelled_b200_grouped.json``, …), which the
next call continues; ``--report`` only prints that record, ``--plot FILE`` draws it. ``--every 5`` takes the first point
of a table and every fifth after it, ``--table all`` takes all tables one after the other; ``--only-now`` reports only
points that this version of the clock has timed. Products are skipped (``clock_only.py``). Nothing in
``sim/clock/machines/b200.yml`` is fitted to these times.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published import TABLES, Point, Published

from cute_nvfp4.sim.clock.machine import machine

HERE = Path(__file__).resolve().parent
CLOCK = HERE.parent / "cute_nvfp4" / "sim" / "clock"
PAGE = HERE / "records" / "timing_checked.md"
T, R = TypeVar("T"), TypeVar("R")
UNLIKE = 1.1
"""Two times whose ratio is smaller than this are not ranked."""


def results(table: str) -> Path:
    """The path of a table's record."""
    return HERE / "results" / f"timing_modelled_b200{'' if table == 'dense' else '_' + table}.json"


def version() -> str:
    """A digest of the clock, which changes with its code and with the machine's figures."""
    found = hashlib.sha256()
    for path in [*sorted(CLOCK.rglob("*.py")), CLOCK / "machines" / "b200.yml"]:
        found.update(path.read_bytes())
    return found.hexdigest()[:8]


def timings(
    program: Path, arguments: list[str], figures: dict[str, float] | None = None, *, gains: bool = True
) -> list[dict[str, Any]]:
    """The clock's results, from a separate process, for each launch of a program that it can time. figures: replace
    figures of the machine file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(HERE / "clock_only.py"), *(() if gains else ("bare",))]
        command += ["sim", "--arch", "sm_100a", "--no-checks", "--time"]
        command += [word for name, value in (figures or {}).items() for word in ("--figure", f"{name}={value}")]
        command += ["--json", str(report), program.name, *arguments]
        done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        launches = [launch for launch in json.loads(report.read_text())["launches"] if launch["timing"]]
    empty, out = machine("b200")["launch.duration_us"], []
    for launch in launches:
        timing = launch["timing"]
        out.append(
            {
                "modelled_us": round(empty + timing["microseconds"] - timing["launch_us"], 3),
                "roofline_us": round(max(timing["bounds_us"].values()), 3),
                "bound_by": max(sorted(timing["lost"]), key=timing["lost"].__getitem__),
                "phases": [{"bound_by": p["bound_by"], "share": round(p["share"], 2)} for p in timing["phases"]],
                "gains": {name: round(saved, 3) for name, saved in timing["gains"].items() if saved >= 0.01},
                "seconds": round(launch["seconds"], 1),
                "clock": version(),
            }
        )
    return out


def beside(jobs: int, function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Yields each item and the function's result, ``jobs`` at a time, in order of completion; errors are printed."""
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(function, item): item for item in items}
        for one in as_completed(running):
            if error := one.exception():
                print(f"no time: {error}"[:400], file=sys.stderr, flush=True)
            else:
                yield running[one], one.result()


def modelled(table: Published, points: list[Point]) -> dict[str, dict[str, Any]]:
    """The clock's result for each point."""
    found = timings(*table.command(points), table.figures, gains=False)
    if len(found) != len(points):
        raise RuntimeError(f"{len(found)} launches for {len(points)} points: {', '.join(p.name for p in points)}")
    return {point.name: what for point, what in zip(points, found)}


def versions(found: Iterable[dict[str, Any]]) -> str:
    """A sentence that says how many times come from other versions of the clock; empty if none do."""
    of = [time.get("clock") for time in found]
    others = len(of) - of.count(version())
    return f" {others} of the {len(of)} times are by earlier versions of the clock." if others else ""


def ranked(points: list[Point], times: dict[str, dict[str, Any]]) -> tuple[int, int]:
    """(pairs in the right order, pairs whose published times differ by more than a tenth)."""
    pairs = [(a, b) for a, b in itertools.combinations(points, 2) if max(a.us, b.us) > UNLIKE * min(a.us, b.us)]
    value = {p.name: times[p.name]["modelled_us"] for p in points}
    return sum((a.us < b.us) == (value[a.name] < value[b.name]) for a, b in pairs), len(pairs)


def errors(points: Iterable[Point], times: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Relative errors by row of the report, and under "all"."""
    out: dict[str, list[float]] = {}
    for p in points:
        if p.name in times:
            out.setdefault(p.row, []).append(times[p.name]["modelled_us"] / p.us - 1)
    return out | ({"all": [error for some in out.values() for error in some]} if out else {})


def report(points: list[Point], times: dict[str, dict[str, Any]]) -> None:
    known = [p for p in points if p.name in times]
    print(f"{'':>34} {'published':>10} {'modelled':>9} {'error':>7} {'roofline':>9}")
    for p in known:
        us, roofline = times[p.name]["modelled_us"], times[p.name]["roofline_us"]
        print(f"{p.name:>34} {p.us:10.2f} {us:9.2f} {us / p.us - 1:+7.1%} {roofline:9.2f}")
    for row, some in errors(points, times).items():
        mean, bias = statistics.mean(map(abs, some)), statistics.mean(some)
        print(f"{row}: {len(some)} points, mean error {mean:.1%}, worst {max(some, key=abs):+.1%}, mean {bias:+.1%}")
    right, pairs = ranked(known, times)
    print(f"{len(known)} of {len(points)} points; of {pairs} pairs {right / max(1, pairs):.1%} are in the right order")
    print(f"by this version of the clock: {sum(times[p.name].get('clock') == version() for p in known)}")


def write(table: str, points: list[Point], times: dict[str, dict[str, Any]]) -> None:
    """Writes the errors into benchmarks/records/timing_checked.md, between two markers."""
    right, pairs = ranked([p for p in points if p.name in times], times)
    lines = [f"| {TABLES[table].rows} | points | mean error | worst | mean with its sign |", "|---|---|---|---|---|"]
    for row, some in errors(points, times).items():
        mean, worst = statistics.mean(map(abs, some)), max(some, key=abs)
        name = row.removeprefix("M = ").removesuffix(" groups")
        lines.append(f"| {name} | {len(some)} | {mean:.1%} | {worst:+.1%} | {statistics.mean(some):+.1%} |")
    share = f"{right / pairs:.1%} are ordered rightly."
    lines += ["", f"Of {pairs} pairs whose published times differ by more than a tenth, {share}"]
    lines[-1] += versions(times[p.name] for p in points if p.name in times)
    mark = f"<!-- timing_b200.py --table {table} --write -->"
    before, _, after = PAGE.read_text().split(mark)
    PAGE.write_text(mark.join((before, "\n" + "\n".join(lines) + "\n", after)))


def plot(table: Published, times: dict[str, dict[str, Any]], path: Path) -> None:
    """Plots modelled over published times, both on logarithmic axes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5.4))
    known = [p for p in table.points() if p.name in times]
    for row in dict.fromkeys(p.row for p in known):
        mine = [p for p in known if p.row == row]
        axes.loglog([p.us for p in mine], [times[p.name]["modelled_us"] for p in mine], "o", ms=4, label=row)
    ends = [0.8 * min(p.us for p in known), 1.25 * max(p.us for p in known)]
    axes.plot(ends, ends, "k-", lw=0.8)
    for factor in (0.88, 1.12):
        axes.plot(ends, [factor * x for x in ends], "k:", lw=0.8)
    axes.set(xlabel="published, µs", ylabel="modelled, µs", title=f"{table.title}; dotted: ±12 %")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def update(name: str, given: argparse.Namespace) -> None:
    """Times the points that a table's record lacks or that are stale, and reports."""
    table, output = TABLES[name], given.output or results(name)
    points, together = table.points(), given.together or table.together
    record = json.loads(output.read_text()) if output.exists() and not given.again else {"times": {}}
    now = version()
    done = {name for name, found in record["times"].items() if not given.stale or found.get("clock") == now}
    left = [p for p in points[:: given.every] if p.name not in done and fnmatch(p.name, given.only)]
    left = [] if given.report else left[: given.most or None]
    parts = [left[begin : begin + together] for begin in range(0, len(left), together)]
    for _, times in beside(given.jobs, functools.partial(modelled, table), parts):
        record["times"] |= times
        record |= {"program": table.program(), "clock": "b200"}
        output.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{len(record['times'])} of {len(points)}: {', '.join(times)}", flush=True)
    times = {p: t for p, t in record["times"].items() if not given.only_now or t.get("clock") == now}
    report(points, times)
    if given.write:
        write(name, points, times)
    if given.plot:
        plot(table, times, given.plot)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--table", choices=(*TABLES, "all"), default="dense", help="which published times (default: dense)"
    )
    parser.add_argument("--report", action="store_true", help="execute nothing")
    parser.add_argument("--write", action="store_true", help="the errors into benchmarks/records/timing_checked.md")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="at most N more points")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only points whose names match PATTERN")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th point of the table")
    parser.add_argument("--again", action="store_true", help="forget earlier times")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--stale", action="store_true", help="also points that another version of the clock timed")
    parser.add_argument("--only-now", action="store_true", help="report no times of other versions of the clock")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the table's record in results")
    parser.add_argument("--together", type=int, metavar="N", help="points in one process (default: the table's)")
    given = parser.parse_args()
    if given.table == "all" and (given.output or given.plot):
        parser.error("--output and --plot are of one table")
    for name in TABLES if given.table == "all" else (given.table,):
        update(name, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The clock against published times of a B200: ``python benchmarks/timing_b200.py``. Measures nothing.

FlashInfer has published what one of its kernels takes at 147 shapes (``data/nvfp4_dense_gb200.csv``). Its source is
public: this compiles and executes that program (flashinfer-python, not part of this project; install it first) in the
simulator with ``clock="b200"``, at those shapes, and compares. Published are durations of kernels, as a profiler has
them, without the launch; so the launch counts here as much as an empty kernel's duration (``launch.duration_us``).

Writes ``results/timing_modelled_b200.json`` after every few shapes, and goes on from there; ``--report`` only tells
what it holds, ``--plot FILE`` draws it. Nothing in ``sim/clock/machines/b200.yml`` is fitted to these times.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cute_nvfp4.sim.clock.machine import machine

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE / "data" / "nvfp4_dense_gb200.csv"
RESULTS = HERE / "results" / "timing_modelled_b200.json"
PAGE = HERE.parent / "docs" / "timing.md"
DRIVER = HERE.parent / "tests" / "public" / "libraries" / "flashinfer_programs.py"
GB200 = {"sms": 152, "l2.dirty_bytes": 132_644_864}
"""What differs from a B200: a GB200 has more SMs, and FlashInfer clears L2 (126.5 MiB) by writing zeros, which leaves
dirty what was in it (``bench_gpu_time_with_cupti``)."""
UNLIKE = 1.1
"""Two times that differ by less are not ranked."""


class Point(NamedTuple):
    """A shape and its time, in microseconds."""

    m: int
    n: int
    k: int
    us: float

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


def published() -> list[Point]:
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    return [Point(int(r["m"]), int(r["n"]), int(r["k"]), float(r["us"])) for r in csv.DictReader(lines)]


def modelled(points: list[Point]) -> dict[str, dict[str, float]]:
    """What the clock says of each point, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "cute_nvfp4", "sim", "--arch", "sm_100a", "--no-checks", "--time"]
        command += [word for name, value in GB200.items() for word in ("--figure", f"{name}={value}")]
        command += ["--json", str(report), DRIVER.name, "mm_fp4_published", f"sms={GB200['sms']}"]
        command += ["points=" + ",".join(p.name for p in points)]
        done = subprocess.run(command, cwd=DRIVER.parent, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        launches = [launch for launch in json.loads(report.read_text())["launches"] if launch["timing"]]
    if len(launches) != len(points):
        raise RuntimeError(f"{len(launches)} launches for {len(points)} points: {done.stdout[-2000:]}")
    empty = machine("b200")["launch.duration_us"]
    out = {}
    for point, launch in zip(points, launches):
        timing = launch["timing"]
        out[point.name] = {
            "modelled_us": round(empty + timing["microseconds"] - timing["launch_us"], 3),
            "roofline_us": round(max(timing["bounds_us"].values()), 3),
            "seconds": round(launch["seconds"], 1),
        }
    return out


def ranked(points: list[Point], times: dict[str, dict[str, float]]) -> tuple[int, int]:
    """(pairs whose order is right, pairs whose published times differ by more than a tenth)."""
    pairs = [(a, b) for a, b in itertools.combinations(points, 2) if max(a.us, b.us) > UNLIKE * min(a.us, b.us)]
    value = {p.name: times[p.name]["modelled_us"] for p in points}
    return sum((a.us < b.us) == (value[a.name] < value[b.name]) for a, b in pairs), len(pairs)


def report(times: dict[str, dict[str, float]]) -> None:
    points = [p for p in published() if p.name in times]
    print(f"{'m, n, k':>20} {'published':>10} {'modelled':>9} {'error':>7} {'roofline':>9}")
    errors: dict[int, list[float]] = {}
    for p in points:
        found = times[p.name]
        error = found["modelled_us"] / p.us - 1
        errors.setdefault(p.m, []).append(error)
        print(f"{p.name:>20} {p.us:10.2f} {found['modelled_us']:9.2f} {error:+7.1%} {found['roofline_us']:9.2f}")
    everything = [error for some in errors.values() for error in some]
    for m, of_m in [*sorted(errors.items()), ("all", everything)]:
        mean, bias = statistics.mean(map(abs, of_m)), statistics.mean(of_m)
        print(f"M = {m}: {len(of_m)} shapes, mean error {mean:.1%}, worst {max(of_m, key=abs):+.1%}, mean {bias:+.1%}")
    right, pairs = ranked(points, times)
    share = right / max(1, pairs)
    print(f"{len(points)} of {len(published())} shapes; of {pairs} pairs {share:.1%} are in the right order")


TABLE = "<!-- timing_b200.py --write -->"


def write(times: dict[str, dict[str, float]]) -> None:
    """The errors by M into docs/timing.md, between two lines that say so."""
    errors: dict[int, list[float]] = {}
    for p in published():
        if p.name in times:
            errors.setdefault(p.m, []).append(times[p.name]["modelled_us"] / p.us - 1)
    everything = [error for some in errors.values() for error in some]
    right, pairs = ranked([p for p in published() if p.name in times], times)
    lines = ["| M | shapes | mean error | worst | mean with its sign |", "|---|---|---|---|---|"]
    for m, some in [*sorted(errors.items()), ("all", everything)]:
        mean, worst = statistics.mean(map(abs, some)), max(some, key=abs)
        lines.append(f"| {m} | {len(some)} | {mean:.1%} | {worst:+.1%} | {statistics.mean(some):+.1%} |")
    share = f"{right / pairs:.1%} are ordered rightly."
    lines += ["", f"Of {pairs} pairs whose published times differ by more than a tenth, {share}"]
    before, _, after = PAGE.read_text().split(TABLE)
    PAGE.write_text(TABLE.join((before, "\n" + "\n".join(lines) + "\n", after)))


def plot(times: dict[str, dict[str, float]], path: Path) -> None:
    """Modelled over published times, both on logarithmic axes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5.4))
    for m in sorted({p.m for p in published()}):
        of_m = [p for p in published() if p.m == m and p.name in times]
        axes.loglog([p.us for p in of_m], [times[p.name]["modelled_us"] for p in of_m], "o", ms=4, label=f"M = {m}")
    ends = [3.0, 60.0]
    axes.plot(ends, ends, "k-", lw=0.8)
    for factor in (0.88, 1.12):
        axes.plot(ends, [factor * x for x in ends], "k:", lw=0.8)
    axes.set(xlabel="published, µs", ylabel="modelled, µs", title="NVFP4 GEMM of FlashInfer on a GB200; dotted: ±12 %")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="execute nothing")
    parser.add_argument("--write", action="store_true", help="the errors by M into docs/timing.md")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="at most N more shapes")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th shape of the table")
    parser.add_argument("--again", action="store_true", help="forget earlier times")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FILE", help=f"default: {RESULTS.name}")
    parser.add_argument("--together", type=int, default=4, metavar="N", help="shapes in one process (default: 4)")
    given = parser.parse_args()
    record = json.loads(given.output.read_text()) if given.output.exists() and not given.again else {"times": {}}
    left = [p for p in published()[:: given.every] if p.name not in record["times"]]
    left = [] if given.report else left[: given.most or None]
    parts = [left[begin : begin + given.together] for begin in range(0, len(left), given.together)]
    with ThreadPoolExecutor(given.jobs) as pool:
        for done in as_completed([pool.submit(modelled, part) for part in parts]):
            times = done.result()
            record["times"] |= times
            record |= {"program": f"flashinfer-python {metadata.version('flashinfer-python')}", "clock": "b200"}
            given.output.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{len(record['times'])} of {len(published())}: {', '.join(times)}", flush=True)
    report(record["times"])
    if given.write:
        write(record["times"])
    if given.plot:
        plot(record["times"], given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())

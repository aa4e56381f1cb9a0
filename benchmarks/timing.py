"""Measures and models times of the same launches: ``python benchmarks/timing.py --measure`` on a GPU, or ``--model``.

``timing_cases.py`` has the launches. Some were known while the clock was built; the held-out ones were written down,
and predicted, before anybody measured them. Measured times are medians of a CUDA graph of one call between two events
(for other programs than ours, of the call itself), launch included, L2 cold and clean. Modelled times come from
``sim.run(..., clock="h200")`` (docs/explanation/timing.md). Each goes to its own file in ``benchmarks/results``;
without an option the script prints both side by side, with ``--markdown`` as the tables of
benchmarks/records/timing_checked.md. ``--launch`` measures what a launch costs on this host (a second): the clock takes
it as ``--launch-us``.

Exit codes: 0 done, 2 no CUDA device to measure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import RESULTS, gpu_target, machine, write
from timing_cases import (
    HELD_OUT,
    HELD_OUT_2,
    HELD_OUT_3,
    HELD_OUT_4,
    HELD_OUT_5,
    OTHERS_SEEN,
    SEEN,
    SEEN_EARLY,
    Case,
    call_of,
)

import cute_nvfp4
from cute_nvfp4.harness.timing import ColdL2, StopRule, time_cuda
from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.sim.clock.machine import machine as clock_machine
from cute_nvfp4.sim.observe.timing import Timing

_RULE = StopRule(repeats=100, relative_error=0.002, seconds=3.0)
MEASURED, MODELLED = RESULTS / "timing_nvidia_h200.json", RESULTS / "timing_modelled_h200.json"
PREDICTED = RESULTS / "timing_predicted_h200.json"
COUNTED = (2000, 4000)
"""Cycles that the kernels count to measure the cost of a launch."""
LONG = 400_000
"""Cycles of a kernel that measures the frequency of this run."""


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    """Captures ``call`` as a CUDA graph: its replay has no host time of the call."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def median_us(call: Callable[[], object], clear: ColdL2) -> float:
    """Median microseconds between two events around ``call``, L2 cold and clean."""
    return statistics.median(time_cuda(call, rule=_RULE, clear=clear)) / 1e3


def measure_launch(clear: ColdL2, clock: str) -> dict[str, float]:
    """The cost of a launch on this host, from a graph and straight from a stream: the time of kernels with a CTA an SM
    that count cycles, minus these cycles. Also this run's frequency in MHz, from one long kernel of this kind."""
    sys.path.insert(0, str(Path(__file__).parent / "microbench"))
    from device import Module

    module = Module((Path(__file__).parent / "microbench" / "whole.cu").read_text())
    kept = torch.zeros(64, dtype=torch.int64, device="cuda")
    sms, found = torch.cuda.get_device_properties(0).multi_processor_count, {"graph": [], "stream": []}

    def call(cycles: int) -> None:
        module.launch("count", sms, 128, [kept, cycles])

    for cycles in COUNTED:
        counted = cycles / clock_machine(clock)["clock_mhz"]
        found["graph"].append(median_us(graph_of(lambda cycles=cycles: call(cycles)), clear) - counted)
        found["stream"].append(median_us(lambda cycles=cycles: call(cycles), clear) - counted)
    short, long = (median_us(graph_of(lambda cycles=cycles: call(cycles)), clear) for cycles in (COUNTED[-1], LONG))
    launch = {way: round(statistics.mean(times), 3) for way, times in found.items()}
    return launch | {"mhz": round((LONG - COUNTED[-1]) / (long - short), 1)}


def durations(cases: tuple[Case, ...]) -> None:
    """Prints beside each median the profiler's durations of the call's kernels, from start to end on the GPU. The rest
    of the call's time is the launch, whatever the kernel."""
    from torch.profiler import ProfilerActivity, profile

    clear = ColdL2()

    def kernels(calls: int, call: Callable[[], object], before: Callable[[], None]) -> dict[str, list[float]]:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(calls):
                before()
                call()
                torch.cuda.synchronize()
        out: dict[str, list[float]] = {}
        for event in found.events():
            out.setdefault(event.name, []).append(event.device_time)
        return out

    for case in cases:
        try:
            call = call_of(case, "cuda")
            call()
            between = median_us(call if case.sizes else graph_of(call), clear)
            mine = kernels(1, call, lambda: None)
            found = {name: times for name, times in kernels(20, call, clear).items() if name in mine}
        except Exception as error:
            print(case.name, repr(error)[:300], file=sys.stderr, flush=True)
            continue
        took = sum(statistics.median(times) for times in found.values())
        parts = f"kernel {took:7.2f}, beyond {between - took:6.2f}, {len(mine)} kernels"
        print(f"{case.name:45} {between:7.2f} us, {parts}", flush=True)


def measure(cases: tuple[Case, ...], output: Path, clock: str) -> None:
    """Writes medians in microseconds, by name, and the cost of a launch; after each case."""
    clear, out = ColdL2(), {}
    launch = measure_launch(clear, clock)
    ways = ", ".join(f"{launch[way]:.2f} us from a {way}" for way in ("graph", "stream"))
    print(f"a launch: {ways}, at {launch['mhz']} MHz", flush=True)
    for case in cases:
        try:
            call = call_of(case, "cuda")  # the reference keeps the operands alive: a graph does not
            call()
            out[case.name] = round(median_us(call if case.sizes else graph_of(call), clear), 3)
        except Exception as error:
            print(case.name, repr(error)[:300], file=sys.stderr, flush=True)
            continue
        print(f"{case.name:45} {out[case.name]:9.2f} us measured", flush=True)
        write({"machine": machine(), "launch": launch, "microseconds": out}, output)


def modelled(case: Case, clock: str) -> Timing:
    """The clock's time of a case: of the last launch, because on a first call another launch may clear scratch
    memory."""
    if case.sizes:
        with simulated_gpu("sm_90a", checks=False, clock=clock) as session:
            call = call_of(case, "cuda")
            call()
            torch.cuda.synchronize()
            return session.launches[-1].result.timing
    call = call_of(case, "cpu")
    with cute_nvfp4.simulating("sm_90a", checks=False, clock=clock, sm_count=132) as runs:
        call()
    return runs[-1].result.timing


def model(cases: tuple[Case, ...], output: Path, clock: str) -> None:
    """Writes modelled microseconds without the launch, and their parts, by name; after each case."""
    out = json.loads(output.read_text())["cases"] if output.exists() else {}
    for case in cases:
        if case.name in out:
            continue
        begin = time.perf_counter()
        try:
            timing = modelled(case, clock)
        except Exception as error:
            print(case.name, repr(error)[:300], file=sys.stderr, flush=True)
            continue
        seconds = time.perf_counter() - begin
        out[case.name] = {
            "microseconds": round(timing.microseconds - timing.launch_us, 3),
            "roofline": round(timing.roofline_us - timing.launch_us, 3),
            "bound_by": timing.bound_by,
            "seconds": round(seconds, 1),
        }
        write({"clock": clock, "launch": "not in these times", "cases": out}, output)
        print(f"{case.name:45} {timing.microseconds:9.2f} us modelled ({seconds:.1f} s)", flush=True)


class Row(NamedTuple):
    """A launch, measured and modelled; the model includes the launch cost of the measurement's host."""

    case: Case
    measured: float
    modelled: float
    roofline: float
    bound_by: str
    launch: float

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1

    @property
    def kernel_error(self) -> float:
        """The relative error for the kernel alone: both times minus the launch cost, which otherwise flatters short
        kernels."""
        return (self.modelled - self.launch) / (self.measured - self.launch) - 1


def rows(cases: tuple[Case, ...], modelled: Path, measured: Path) -> list[Row]:
    """The rows of the cases that both records have."""
    record, entries = json.loads(measured.read_text()), json.loads(modelled.read_text())["cases"]
    out = []
    for case in cases:
        if case.name in record["microseconds"] and case.name in entries:
            launch, entry = record["launch"]["stream" if case.sizes else "graph"], entries[case.name]
            times = [round(launch + entry[key], 3) for key in ("microseconds", "roofline")]
            out.append(Row(case, record["microseconds"][case.name], *times, entry["bound_by"], launch))
    return out


def summary(title: str, found: list[Row]) -> str:
    """A row of the table of errors."""
    sizes, worst = [abs(r.error) for r in found], max(found, key=lambda r: abs(r.error))
    cells = (len(found), f"{statistics.mean(sizes):.1%}", f"{statistics.median(sizes):.1%}")
    cells += (f"{worst.error:+.1%} ({worst.case.name})", f"{statistics.mean(r.error for r in found):+.1%}")
    alone = max(found, key=lambda r: abs(r.kernel_error))
    cells += (f"{statistics.mean(abs(r.kernel_error) for r in found):.1%}",)
    cells += (f"{alone.kernel_error:+.1%} ({alone.case.name})",)
    return f"| {title} | " + " | ".join(map(str, cells)) + " |"


def kind(case: Case) -> str:
    """The group of a launch in tables."""
    if case.operation.startswith("nvidia"):
        return "NVIDIA's examples"
    return "plain programs" if case.sizes else case.operation


def compare(markdown: bool, modelled: Path, measured: Path) -> None:
    """Prints measured and modelled times side by side, and the errors of the model."""
    groups = {
        "held out": HELD_OUT_5,
        "held out before, seen since": HELD_OUT_4 + HELD_OUT_3 + HELD_OUT_2 + HELD_OUT,
        "seen": SEEN,
        "others, seen": OTHERS_SEEN,
    }
    found = {title: part for title, cases in groups.items() if (part := rows(cases, modelled, measured))}
    every = [row for part in found.values() for row in part]
    print(
        "| launches | number | mean | median | worst | mean with sign | mean of the kernel alone | worst |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for title, part in (*found.items(), ("all", every)):
        print(summary(title, part))
    for word in dict.fromkeys(kind(r.case) for r in every):
        print(summary(f"of these: {word}", [r for r in every if kind(r.case) == word]))
    for title, part in found.items():
        head = "| launch | measured | modelled | roofline | error | bound by |\n|---|---|---|---|---|---|"
        print(f"\n{title}, µs:\n\n{head}" if markdown else f"\n{title}")
        for r in part:
            cells = (f"{r.measured:.2f}", f"{r.modelled:.2f}", f"{r.roofline:.2f}", f"{r.error:+.0%}", r.bound_by)
            row = f"| {r.case.name} | " + " | ".join(cells) + " |"
            print(row if markdown else f"{r.case.name:45}" + "".join(f"{c:>9}" for c in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure on this machine's GPU")
    parser.add_argument("--launch", action="store_true", help="measure what a launch costs on this host, only")
    parser.add_argument("--durations", action="store_true", help="beside a profiler's durations; writes nothing")
    parser.add_argument("--model", action="store_true", help="ask the clock")
    parser.add_argument("--only", default="", help="only launches whose name contains this")
    parser.add_argument("--cases", default="all", choices=("seen", "held-out", "others", "all"))
    parser.add_argument("--share", default="0/1", help="every n-th case from the i-th: i/n, such as 0/2")
    parser.add_argument("--output", type=Path, help="where the record goes")
    parser.add_argument("--against", type=Path, default=MODELLED, help="the modelled times to compare")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="the measured times to compare them with")
    parser.add_argument("--clock", default="h200", help="the GPU that is measured or modelled: a machine of the clock")
    parser.add_argument("--markdown", action="store_true", help="print tables of benchmarks/records/timing_checked.md")
    options = parser.parse_args()
    sets = {
        "seen": SEEN + HELD_OUT + HELD_OUT_2 + HELD_OUT_3 + HELD_OUT_4,
        "held-out": HELD_OUT_5,
        "others": OTHERS_SEEN + SEEN_EARLY,
    }
    cases = sets.get(options.cases, tuple(case for some in sets.values() for case in some))
    first, step = map(int, options.share.split("/"))
    cases = tuple(c for c in cases if options.only in c.name)[first::step]
    if options.launch:
        gpu_target("it measures one")
        print(json.dumps(measure_launch(ColdL2(), options.clock)))
    elif options.durations:
        gpu_target("it measures one")
        durations(cases)
    elif options.measure:
        gpu_target("--model works without one")
        measure(cases, options.output or MEASURED, options.clock)
    elif options.model:
        model(cases, options.output or MODELLED, options.clock)
    else:
        compare(options.markdown, options.against, options.measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())

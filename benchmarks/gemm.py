"""Times NVFP4 products beside their peers on this machine's GPU: ``python benchmarks/gemm.py``.

``gemm_shapes.py`` has the sets of shapes: the contest's, M from 1 to 8192 at 8192², the layers of two model families,
gated and grouped products. The peers are cuBLAS in bf16 (gated: one product of twice the columns and a fused silu ·
mul; grouped: also torch's grouped product), quack's W4A16 GEMM and Humming's where they are installed (Humming: W4A16,
and weights in MXFP4 with rows that it quantizes to FP8 in the call), and a Triton W4A16 baseline (``gemm_triton.py``).
The floor is a tiny kernel plus the larger of two times: reading all weights once at the bandwidth of a device copy, and
all products at the rate of a large bf16 product. The same run measures all three.

All contestants get the same weights: normal values in NVFP4, or these values in bf16. W4A16 takes activations in bf16;
W4A4 takes them in NVFP4, quantized in advance. Weights are repacked in advance, too. Every result is checked against a
float64 product: the output of the very CUDA graph that is timed, filled with NaN before the replay. A time is a replay
of a graph of one call between two events; replays take turns in alternating order, with L2 cold and clean (512 MiB read
before each).

The record notes what is not available (a package, a kernel for this GPU), and what is wrong or fails; only the latter
makes the exit code 1. It is written after every shape; sets that do not run keep the results of earlier runs.

Exit codes: 0 done, 1 a result is wrong or a contestant failed, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gemm_report as report
from common import Captured, capture, gpu_target, machine, results_path, take_turns, write
from gemm_contestants import OURS, PEERS, Contestant, NotAvailableError, Problem
from gemm_shapes import MEASURED, SETS, Ceilings, Shape, floor_us

from cute_nvfp4.harness.timing import ColdL2, copy_bandwidth

TUNING_ROUNDS = 7
NORM_ERROR, LARGEST_ERROR = 6e-3, 0.03
"""Tolerances of a bf16 result: its error over the norm, and over the largest element. A gated result has three
roundings."""


def ceilings(clear: ColdL2) -> Ceilings:
    """Measures the rates and times that this machine's floors consist of."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    tiny = torch.empty(1, device="cuda")
    calls = {"dense": capture(lambda: x @ x), "tiny": capture(lambda: tiny.fill_(1.0))}
    times = {name: statistics.median(us) for name, us in take_turns(calls, 20, clear).items()}
    return Ceilings(copy_bandwidth(), 2 * 8192**3 / times["dense"] * 1e6, times["tiny"])


def error_of(got: Sequence[torch.Tensor], problem: Problem, activations: str) -> dict[str, float]:
    """Errors of results, the largest of all groups; NaN if a contestant left an element unwritten."""
    norms, largest = [], []
    for result, want in zip(got, problem.reference(activations), strict=True):
        difference = result.double() - want
        norms.append((difference.norm() / want.norm()).item())
        largest.append((difference.abs().max() / want.abs().max()).item())
    # check for NaN first: Python's max() would lose it
    return {
        "norm_error": max(norms, key=lambda x: (x != x, x)),
        "largest_error": max(largest, key=lambda x: (x != x, x)),
    }


def fastest(contestant: Contestant, problem: Problem, clear: ColdL2) -> tuple[Captured, int]:
    """The fastest of a contestant's calls, and its index."""
    found = [capture(call) for call in contestant.calls(problem)]
    if len(found) == 1:
        return found[0], 0
    times = take_turns({str(i): captured for i, captured in enumerate(found)}, TUNING_ROUNDS, clear)
    best = min(range(len(found)), key=lambda i: statistics.median(times[str(i)]))
    return found[best], best


def reason_of(error: BaseException) -> str:
    """The first line of an error's message that has text, and those of the errors that caused it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    return f"{text}; from {reason_of(error.__cause__)}" if error.__cause__ else text


def entered(contestant: Contestant, problem: Problem, clear: ColdL2) -> tuple[Captured | None, dict]:
    """A contestant's captured call if its result is right, and what the record holds about the contestant before its
    timing."""
    try:
        found, variant = fastest(contestant, problem, clear)
        for result in found.result:
            result.fill_(float("nan"))
        found.graph.replay()
        errors = error_of(found.result, problem, contestant.activations)
    except NotAvailableError as reason:
        return None, {"status": "not available", "reason": str(reason)}
    except Exception as error:  # one contestant's failure must not cost the others' results; the exit code tells
        return None, {"status": "failed", "reason": reason_of(error)}
    if not (errors["norm_error"] < NORM_ERROR and errors["largest_error"] < LARGEST_ERROR):
        return None, {"status": "wrong", "reason": "not the float64 product", **errors}
    return found, {"status": "timed", "variant": variant, **errors}


def measure(shape: Shape, contestants: Sequence[Contestant], rounds: int, clear: ColdL2, limits: Ceilings) -> dict:
    """Checks and times the contestants on a shape: one row of the record."""
    problem, captured, results = Problem.random(shape), {}, {}
    for contestant in contestants:
        if contestant.runs(shape):
            start = time.monotonic()
            found, results[contestant.name] = entered(contestant, problem, clear)
            results[contestant.name]["seconds"] = round(time.monotonic() - start, 2)
            if found:
                captured[contestant.name] = found
    for name, times in take_turns(captured, rounds, clear).items():
        low, *_, high = statistics.quantiles(times, n=10)
        results[name] |= {"median_us": statistics.median(times), "p10_us": low, "p90_us": high}
    sizes = {"problem": shape.problem, "m": list(shape.m), "n": shape.n, "k": shape.k}
    return {**sizes, "text": str(shape), "name": shape.name, "floor_us": floor_us(shape, limits), "results": results}


def shapes_of(names: Sequence[str], rows: Sequence[int]) -> list[Shape]:
    """The shapes of some sets. rows: keeps only shapes with these sums of rows of x; empty keeps all."""
    return [shape for name in names for shape in SETS[name] if not rows or sum(shape.m) in rows]


def dry_run(names: Sequence[str], rows: Sequence[int], contestants: Sequence[Contestant], gpu: str) -> None:
    """Prints the shapes and contestants that would run, and floors of a GPU that was measured."""
    limits = MEASURED[gpu]
    for name in names:
        print(f"{name}: {gpu}, {report.of_ceilings(limits._asdict())}")
        for shape in shapes_of([name], rows):
            running = ", ".join(contestant.name for contestant in contestants if contestant.runs(shape))
            print(f"  {shape!s:>50}  floor {floor_us(shape, limits):7.1f} µs  {running}  {shape.name}".rstrip())


def peer_versions() -> dict[str, str]:
    """The versions of the packages that peers come from."""
    found = {}
    for package in ("triton", "quack-kernels", "humming-kernels"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


class Part(NamedTuple):
    """The share of one of ``count`` processes: shapes number ``index``, ``index + count``, … of the shapes asked
    for."""

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, text: str) -> Part:
        """Parses "I/N"."""
        index, count = map(int, text.split("/"))
        if not 0 <= index < count:
            raise argparse.ArgumentTypeError(f"got {text}, expected I/N with I from 0 to N - 1")
        return cls(index, count)


def compile_only(shapes: Sequence[Shape], contestants: Sequence[Contestant]) -> None:
    """Calls every contestant once, so that the cache holds its kernels."""
    gpu_target("--dry-run needs no GPU.")
    for shape in shapes:
        problem = Problem.random(shape)
        for contestant in contestants:
            if contestant.runs(shape):
                try:
                    contestant.calls(problem)
                except Exception as error:  # the run that measures reports failures
                    print(f"{shape}: {contestant.name}: {reason_of(error)}", file=sys.stderr)


def run(names: Sequence[str], rows: Sequence[int], contestants: Sequence[Contestant], rounds: int, path: Path) -> dict:
    """Measures sets of shapes and returns the record; sets that do not run keep what ``path`` holds of them."""
    gpu_target("--dry-run needs no GPU.")
    clear = ColdL2()
    about = machine()
    about["versions"] |= peer_versions()
    before = json.loads(path.read_text()) if path.exists() else {}
    record = {"gpu": about["gpu"], "sets": before["sets"] if before.get("gpu") == about["gpu"] else {}}
    for name in names:
        limits = ceilings(clear)
        found: list[dict] = []
        record["sets"][name] = {**about, "ceilings": limits._asdict(), "rounds": rounds, "rows": found}
        shapes = shapes_of([name], rows)
        for i, shape in enumerate(shapes):
            start = time.monotonic()
            found.append(measure(shape, contestants, rounds, clear, limits))
            torch.cuda.empty_cache()
            write(record, path)
            times = {who: round(x.get("median_us", float("nan")), 2) for who, x in found[-1]["results"].items()}
            took = time.monotonic() - start
            print(f"{name} {i + 1}/{len(shapes)}  {shape}  {took:.1f} s  {times}", file=sys.stderr, flush=True)
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["all"], choices=[*SETS, "all"])
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="*", default=names, choices=names, help="peers to time (default: all)")
    ours = [contestant.name for contestant in OURS]
    parser.add_argument("--ours", nargs="*", default=ours, choices=ours, help="our contestants to time (default: all)")
    parser.add_argument("--rows", nargs="+", type=int, default=[], metavar="M", help="only shapes with M rows of x")
    parser.add_argument("--compile", action="store_true", help="call each once, to fill the kernel cache; no times")
    parser.add_argument("--part", type=Part.of, default=Part(), metavar="I/N", help="with --compile: every Nth shape")
    parser.add_argument("--rounds", type=int, default=60, help="timed replays of each contestant")
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/gemm_<gpu>.json)")
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of a table")
    parser.add_argument("--plot", action="store_true", help="also draw the record, beside the results file (.svg)")
    parser.add_argument("--dry-run", action="store_true", help="print shapes, floors and contestants; needs no GPU")
    parser.add_argument("--gpu", default="H200", choices=MEASURED, help="whose floors --dry-run prints")
    parser.add_argument("--from", dest="source", type=Path, help="print and plot this record instead of measuring")
    options = parser.parse_args(arguments)
    sets = list(SETS) if "all" in options.shapes else options.shapes
    contestants = [
        *(peer for peer in PEERS if peer.name in options.peers),
        *(x for x in OURS if x.name in options.ours),
    ]
    if options.dry_run:
        dry_run(sets, options.rows, contestants, options.gpu)
        return 0
    if options.compile:
        compile_only(shapes_of(sets, options.rows)[options.part.index :: options.part.count], contestants)
        return 0
    if options.source:
        path, record = options.source, json.loads(options.source.read_text())
    else:
        gpu_target("--dry-run needs no GPU.")
        path = options.output or results_path("gemm")
        record = run(sets, options.rows, contestants, options.rounds, path)
    print(json.dumps(record, indent=1) if options.json else report.table(record))
    if options.plot:
        report.plot(record, path.with_suffix(".svg"))
    rows = [row for name in sets if name in record["sets"] for row in record["sets"][name]["rows"]]
    return int(any(found["status"] in ("wrong", "failed") for row in rows for found in row["results"].values()))


if __name__ == "__main__":
    sys.exit(main())

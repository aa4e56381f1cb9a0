"""Times quantization with a computed global scale, by its launches: ``python benchmarks/quantize_launches.py``.

For activations of a decoding step and larger ones, (M, K) in bf16, rule max, all in one run:

- given: one launch with a given global scale: the time if its computation cost nothing;
- two: a launch clears a word, one raises it to the largest magnitude, one quantizes;
- one: the kernel that quantizes finds the largest magnitude first, in each cluster of 1, 2, 4 and 8 CTAs on its own.

``*`` marks the way that ``quantize`` takes. If it is not the fastest, the figures in ``planning/quantize.py`` do not
fit this GPU: the last line fits them to the times.

A CUDA graph holds ten calls, so that no host time counts; times are of one call, medians over replays, with x in L2,
where a preceding kernel would leave it. All results are compared bit for bit with the reference first.

Exit codes: 0 done, 1 a result is wrong, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import gpu_target, machine, results_path, write

from cute_nvfp4.ops.quantize import QUANTIZE, plan_quantize, quantize
from cute_nvfp4.ops.quantize_request import checked_request
from cute_nvfp4.planning.quantize import QuantizeProblem, amax_work, choose
from cute_nvfp4.runtime.backend import sm_count
from cute_nvfp4.target import Target

SHAPES = (
    (1, 4096),
    (16, 4096),
    (64, 4096),
    (128, 4096),
    (64, 8192),
    (256, 4096),
    (512, 4096),
    (1024, 4096),
)
CLUSTERS = (1, 2, 4, 8)
_CALLS, _REPLAYS, _WARM = 10, 200, 20


def call_us(call: Callable[[], object]) -> float:
    """Median time of one of several calls in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile before the capture
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        kept += [call() for _ in range(_CALLS)]
    times = []
    for _ in range(_WARM + _REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return statistics.median(times[_WARM:])


def measure(rows: int, k: int, target: Target) -> dict:
    """Checks and times every way to quantize a matrix of this size."""
    x = torch.randn(rows, k, device="cuda", generator=torch.Generator("cuda").manual_seed(rows)).bfloat16()
    request = checked_request(x, "nvfp4", "max")
    want = quantize(x, backend="reference")
    problem = QuantizeProblem(request.format, request.rule, rows, k, global_scale="computed")
    processors = sm_count(target, x.device)
    planned = choose(problem, target.arch, processors)
    row = {"shape": [rows, k], "planned": "two" if planned.amax else name_of(planned.config.cluster), "us": {}}
    ways = {"given": (want.global_scale, None), "two": ("auto", 0)}
    ways |= {name_of(size): ("auto", size) for size in CLUSTERS}
    for name, (scale, cluster) in ways.items():
        given = QUANTIZE.request(**QUANTIZE.defaults | {"x": x, "global_scale": scale})
        call = functools.partial(plan_quantize(given, target, cluster), *given)
        got = call()
        for part in ("data", "scale", "global_scale"):
            if not torch.equal(getattr(got, part), getattr(want, part)):
                raise AssertionError(f"{rows} x {k}, {name}: {part} is not the reference's")
        row["us"][name] = call_us(call)
    plans = {name_of(size): choose(problem, target.arch, processors, size) for size in CLUSTERS}
    row["work"] = {name: amax_work(problem, plan)._asdict() for name, plan in plans.items()}
    print(f"{rows:5} x {k}", *(f"{_shown(name, row):>9}" for name in ways), flush=True)
    return row


def name_of(cluster: int) -> str:
    """The name of the way with one launch in clusters of this size."""
    return f"one, {cluster}"


def _shown(name: str, row: dict) -> str:
    return f"{row['us'][name]:.2f}{'*' if name == row['planned'] else ''}"


def fitted(rows: list[dict]) -> dict[str, float]:
    """Microseconds of a second launch (median), and of each part of the work that replaces it (least squares).

    Ways that take at least twice as long as a second launch are left out: no choice depends on how long they take.
    """
    second = statistics.median(row["us"]["two"] - row["us"]["given"] for row in rows)
    work, more = [], []
    for row in rows:
        for name, parts in row["work"].items():
            if row["us"][name] - row["us"]["given"] < 2 * second:
                work.append([float(part) for part in parts.values()])
                more.append(row["us"][name] - row["us"]["given"])
    found = torch.linalg.lstsq(torch.tensor(work), torch.tensor(more)[:, None], driver="gelsd").solution.flatten()
    return {"second_launch": second, **dict(zip(("round", "cluster", "megabyte"), found.tolist()))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: results/quantize_launches_<gpu>.json)")
    parser.add_argument("--json", action="store_true", help="print the record as JSON at the end")
    options = parser.parse_args()
    target = gpu_target()
    record = machine() | {"timing": f"one of {_CALLS} calls in a CUDA graph, median of {_REPLAYS} replays, L2 warm"}
    print(f"{record['gpu']}, driver {record['driver']}, {record['date']}: microseconds")
    print(f"{'M x K':>12}", *(f"{name:>9}" for name in ("given", "two", *map(name_of, CLUSTERS))))
    try:
        record["rows"] = [measure(rows, k, target) for rows, k in SHAPES]
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    record["fitted_us"] = fitted(record["rows"])
    print("fitted, in microseconds:", ", ".join(f"{name} {us:.2f}" for name, us in record["fitted_us"].items()))
    write(record, options.output or results_path("quantize_launches"))
    if options.json:
        print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures whether planning chooses the fastest plan: ``python benchmarks/gemm_choice.py``, on an H100 or H200.

It draws random products of packed weights (N and K multiples of 16, M from 1 to 4096), times every candidate of
``planning.packed`` on each, and compares the plan that planning chooses with the fastest. Times are of replays of CUDA
graphs, L2 cold and clean (512 MiB read before each). Candidates take turns; those a quarter slower than the fastest
drop out after five rounds. Every result is checked first. The record is written after every shape.

``--from FILE`` needs no GPU: it prints a record.

Exit codes: 0 done, 1 a choice is more than ``--limit`` percent slower than the fastest candidate, 2 no such GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import gpu_target, machine, results_path, write

from cute_nvfp4.errors import CuteNvfp4Error
from cute_nvfp4.harness.tuning import measure
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.ops.prepared_weight.gemm import STREAM, WGMMA
from cute_nvfp4.planning.packed import PackedProblem, candidates, choose, predict
from cute_nvfp4.planning.tuning import Timed

PACKED = ("nvfp4", "nvfp4_rows", "mxfp8", "mxfp8_e5m2")
SMALLEST, LARGEST, MOST_ROWS = 512, 16384, 4096


def problems(
    count: int, seed: int, quantized: bool = False, sizes: Sequence[str] = (), packing: str = "nvfp4"
) -> Iterator[PackedProblem]:
    """Draws problems: M, N and K each uniform on a logarithmic scale. sizes: takes these "M,N,K" instead."""
    drawn = random.Random(seed)

    def between(low: int, high: int, step: int) -> int:
        return round(math.exp(drawn.uniform(math.log(low), math.log(high))) / step) * step

    dtype: dict = {"packing": packing} | ({"dtype": "float16", "quantized": True} if quantized else {})
    for size in sizes:
        m, n, k = map(int, size.split(","))
        yield PackedProblem(m=m, n=n, k=k, **dtype)
    for _ in range(0 if sizes else count):
        step = 128 if packing == "nvfp4_rows" else 16
        m, n, k = between(1, MOST_ROWS, 1), *(between(SMALLEST, LARGEST, step) for _ in range(2))
        yield PackedProblem(m=m, n=n, k=k, **dtype)


def compile_all(configs: Sequence[object]) -> None:
    """Compiles kernels in parallel processes; this process then finds them on disk."""
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.map(compile_one, configs, chunksize=1)


def compile_one(config: object) -> None:
    """Compiles a kernel. An error is not reported here: it comes again when the plan is measured."""
    with contextlib.suppress(CuteNvfp4Error):
        (STREAM if isinstance(config, StreamConfig) else WGMMA).compile(config)


def row(problem: PackedProblem, timed: Sequence[Timed], chosen: object, sm_count: int) -> dict:
    """One row of the record: every candidate, fastest first, and how much the chosen plan loses."""
    plans = [
        {"plan": str(t.plan), **t.plan.tiling, "workers": t.plan.workers, "us": round(t.us, 3), "runs": t.runs}
        | {"model_us": round(predict(t.plan, problem, sm_count), 3), "chosen": t.plan == chosen}
        | ({"error": t.error} if t.error else {})
        for t in timed
    ]
    us = next((p["us"] for p in plans if p["chosen"] and "error" not in p), float("nan"))
    return {"m": problem.m, "n": problem.n, "k": problem.k, "loss": round(us / plans[0]["us"] - 1, 4), "plans": plans}


def run(options: argparse.Namespace, path: Path) -> dict:
    """Measures all problems, and writes the record after every shape."""
    target, about = gpu_target(), machine()
    sm_count = about["multiprocessors"]
    activations = "nvfp4" if options.quantized else "bfloat16"
    record = {**about, "seed": None if options.sizes else options.seed, "activations": activations, "rows": []}
    record["weights"] = options.packing
    drawn = list(problems(options.count, options.seed, options.quantized, options.sizes, options.packing))
    everything = [candidates(problem, target.arch, sm_count) for problem in drawn]
    compile_all(list({plan.config for plans in everything for plan in plans}))
    for i, (problem, plans) in enumerate(zip(drawn, everything)):
        chosen = choose(problem, target.arch, sm_count)
        timed = measure(problem, list(dict.fromkeys([*plans, chosen])), rounds=options.rounds)
        record["rows"].append(row(problem, timed, chosen, sm_count))
        write(record, path)
        print(f"{i + 1}/{len(drawn)} {line(record['rows'][-1])}", file=sys.stderr, flush=True)
    return record


def line(row: dict) -> str:
    """A printed line: sizes, the chosen plan and the fastest plan."""
    plans = row["plans"]
    best, chosen = plans[0], next(plan for plan in plans if plan["chosen"])
    size = f"{row['m']}, {row['n']}, {row['k']}"
    text = (
        f"{size:>18} {len(plans):3d} {chosen['us']:8.1f} {best['us']:8.1f} {100 * row['loss']:5.1f} %  {chosen['plan']}"
    )
    return text if chosen is best else f"{text}  (fastest: {best['plan']})"


def table(record: dict) -> str:
    losses = sorted(row["loss"] for row in record["rows"])
    failed = [p for row in record["rows"] for p in row["plans"] if "error" in p]
    return "\n".join(
        [
            f"{record['gpu']}, {record['date']}, seed {record['seed']}, {record['activations']} activations, "
            f"{record.get('weights', 'nvfp4')} weights",
            f"{'m, n, k':>18} {'':>3} {'chosen':>8} {'fastest':>8} {'loss':>7}",
            *map(line, record["rows"]),
            f"{sum(x <= 0.05 for x in losses)} of {len(losses)} within 5 %; "
            f"mean {100 * sum(losses) / len(losses):.1f} %, worst {100 * losses[-1]:.1f} %; {len(failed)} plans failed",
            *sorted({p["error"] for p in failed}),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30, help="shapes")
    parser.add_argument("--seed", type=int, default=1, help="of the shapes")
    parser.add_argument("--sizes", nargs="+", default=(), metavar="M,N,K", help="these products instead of random ones")
    parser.add_argument("--quantized", action="store_true", help="NVFP4 activations (default: bfloat16)")
    parser.add_argument(
        "--packing",
        default="nvfp4",
        choices=PACKED,
        help="format of the weight; nvfp4_rows: unpacked, needs --quantized",
    )
    parser.add_argument("--rounds", type=int, default=40, help="timed replays of each candidate")
    parser.add_argument("--limit", type=float, default=5.0, help="percent that a choice may lose")
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/gemm_choice_<gpu>.json)")
    parser.add_argument("--from", dest="source", type=Path, help="print this record instead of measuring")
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.source:
        record = json.loads(options.source.read_text())
    else:
        gpu_target("--from prints a record without a GPU.")
        path = options.output or results_path("gemm_choice")
        record = run(options, path)
    print(json.dumps(record, indent=1) if options.json else table(record))
    return int(not all(row["loss"] <= options.limit / 100 for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())

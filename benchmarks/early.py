"""Times layers whose products start while the preceding launch still runs: ``python benchmarks/early.py``, on one GPU.

The layers are the dense layers of ``parallel.py`` (qkv, o, gate and up, down: NVFP4 weights, bf16 rows), whole, and the
half that one of two GPUs holds. Each is timed in one CUDA graph of ``--layers`` layers, with the planner's plans and
with the ``early()`` variants of these plans. Results must agree bit for bit. Times are medians of replays in turn, L2
cold before each, in µs a layer.

Exit codes: 0 done, 1 results differ, 2 no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import capture, gpu_target, machine, results_path, take_turns, write
from parallel_layers import DENSE, Weights, w4a16, whole

from cute_nvfp4.harness.timing import ColdL2


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[x.model for x in DENSE], choices=[x.model for x in DENSE])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 2048])
    parser.add_argument("--layers", type=int, default=4, help="layers in a graph; the first one should weigh little")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/early_<gpu>.json")
    options = parser.parse_args()
    gpu_target()
    device, record = torch.device("cuda"), machine() | {"layers": options.layers, "rounds": options.rounds, "us": []}
    for shape in (x for x in DENSE if x.model in options.models):
        every = Weights.drawn(shape, device)
        for part, weights, q in (("whole", every, shape.q), ("half", every.shard(shape, 0, 2), shape.q // 2)):
            for rows in options.rows:
                record["us"].append(
                    {"model": shape.model, "part": part, "rows": rows} | times(weights, q, rows, options)
                )
                row = record["us"][-1]
                gain = row["plain"] / row["early"]
                name = f"{shape.model:>14} {part:>5} {rows:5} rows"
                print(f"{name}: {row['plain']:8.1f} µs, early {row['early']:8.1f} ({gain:.3f} ×)", flush=True)
                if row["differing"]:
                    return 1
                write(record, options.output or results_path("early"))
    return 0


def times(weights: Weights, q: int, rows: int, options: argparse.Namespace) -> dict:
    """µs a layer of both ways, and how many elements of the results differ."""
    generator = torch.Generator("cuda").manual_seed(rows)
    hidden = weights.down.rows
    x = torch.randn(rows, hidden, device="cuda", generator=generator).bfloat16()

    def layers(early: bool):
        products = w4a16(weights, q, early=early)

        def call() -> torch.Tensor:
            y = x
            for _ in range(options.layers):
                y = whole(products, y)
            return y

        call()
        torch.cuda.synchronize()
        return capture(call, "thread_local")

    calls = {"plain": layers(False), "early": layers(True)}
    found = take_turns(calls, options.rounds, ColdL2(torch.device("cuda")))
    differing = int((calls["plain"].result != calls["early"].result).sum())
    return {name: round(statistics.median(us) / options.layers, 2) for name, us in found.items()} | {
        "differing": differing
    }


if __name__ == "__main__":
    sys.exit(main())

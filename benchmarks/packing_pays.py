"""Finds the size from which a call on Hopper should pack unprepared weights: ``python benchmarks/packing_pays.py``.

It times products of block-scaled operands in two ways in one run: in their own layout, as ``gemm`` and ``gated_gemm``
normally take them; and with the weights packed by each call, as these do for operands that their kernels cannot read.
Packing is one more launch, and leaves the product fewer instructions. Times are medians of replays of CUDA graphs, L2
cold and clean, the two ways in turn; results are compared first.

Exit codes: 0 done, 1 results differ, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import capture, gpu_target, machine, results_path, take_turns, write

import cute_nvfp4 as nv
from cute_nvfp4.harness.timing import ColdL2
from cute_nvfp4.ops.gated_gemm import GATED
from cute_nvfp4.ops.gemm import GEMM
from cute_nvfp4.ops.prepared_weight.pack_then_multiply import PackThenMultiply

SIZES = (
    *("gemm 128,8192,8192", "gemm 2048,8192,8192", "gemm 8192,8192,8192", "gemm 16384,8192,8192"),
    *("gemm 8192,4096,4096", "gemm 32768,4096,4096", "gemm 65536,2048,2048", "gemm 16384,4096,14336"),
    *("gated_gemm 512,4096,7168", "gated_gemm 8192,4096,7168", "gated_gemm 16384,14336,4096"),
)


def ways(operation: str, m: int, n: int, k: int, formats: Sequence[str]) -> dict[str, Callable[[], torch.Tensor]]:
    """The two ways to multiply random operands. formats: of a, and of the weights."""
    shapes = [(m, k)] + [(n, k)] * (2 if operation == "gated_gemm" else 1)
    x = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    a, *weights = (nv.quantize(rows, formats[i > 0]) for i, rows in enumerate(x))
    out, options = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), (None, None, None, "auto")
    if operation == "gemm":
        request = GEMM.request(a, *weights, None, None, out, *options[1:])
    else:
        request = GATED.request(a, *weights, "silu", None, False, out, *options)
    product, packing = getattr(nv, operation), PackThenMultiply(request)
    return {"as they lie": lambda: product(a, *weights, out=out), "packed in the call": lambda: packing(*request)}


def measure(size: str, rounds: int, clear: ColdL2, formats: Sequence[str]) -> dict:
    """Measures one row of the record."""
    operation, sizes = size.split()
    calls = ways(operation, *map(int, sizes.split(",")), formats)
    # both ways write the same tensor
    lying, packed = [call().float() for call in calls.values()]
    difference = ((lying - packed).norm() / packed.norm()).item()
    if not difference < 2.0**-9:
        raise AssertionError(f"{size}: the two ways differ by {difference:.1e} of the norm")
    times = take_turns({name: capture(call) for name, call in calls.items()}, rounds, clear)
    return {"size": size, "formats": list(formats), "us": {name: statistics.median(us) for name, us in times.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="'OPERATION M,N,K'")
    parser.add_argument("--formats", nargs=2, default=("nvfp4", "nvfp4"), help="formats of a and of the weights")
    parser.add_argument("--rounds", type=int, default=15, help="timed replays of each way")
    parser.add_argument(
        "--output", type=Path, help="results file (default: benchmarks/results/packing_pays_<gpu>.json)"
    )
    options = parser.parse_args(arguments)
    gpu_target()
    clear, record = ColdL2(), machine() | {"rounds": options.rounds, "rows": []}
    for size in options.sizes:
        try:
            record["rows"].append(measure(size, options.rounds, clear, options.formats))
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
        torch.cuda.empty_cache()
        lying, packed = record["rows"][-1]["us"].values()
        print(f"{size:>30}  {lying:9.1f}  {packed:9.1f}  {lying / packed:5.3f}", flush=True)
    write(record, options.output or results_path("packing_pays"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

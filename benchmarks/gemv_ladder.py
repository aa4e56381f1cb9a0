"""Times every rung of the notebooks' GEMV ladder on this machine's GPU: ``python benchmarks/gemv_ladder.py``.

Each rung is checked first (all E2M1 codes, all finite E4M3 scales), then timed: one launch between two CUDA events, L2
cold and clean (512 MiB read before each). Times include the launch. The same run measures the bandwidth of a device
copy. The record goes to ``benchmarks/results/gemv_ladder_<gpu>.json``, where ``01_gemv.ipynb`` reads it.

Exit codes: 0 done, 1 a rung is wrong, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))

import ladder_tools as tools
from common import gpu_target, machine, results_path, write

from cute_nvfp4.harness.timing import ColdL2, StopRule, Timing, copy_bandwidth, time_cuda
from cute_nvfp4.target import Architecture

SHAPES = ((7168, 16384, 1), (4096, 7168, 8))
_RULE = StopRule(repeats=100, relative_error=0.002, seconds=10.0)


def measure(arch: Architecture, shape: tuple[int, int, int], copy_bytes_s: float, clear: ColdL2) -> dict:
    """Checks and times the ladder on one shape (M, K, L). Raises AssertionError if a result is wrong."""
    case = tools.make_case(*shape, seed=1111, device="cuda")
    rungs = []
    for letter, title, rung in tools.ladder(arch):
        call, out = tools.prepare(rung, case, arch)
        call()
        torch.cuda.synchronize()
        try:
            error = tools.check(case, out)
        except AssertionError as wrong:
            raise AssertionError(f"rung {letter} ({title}) on {shape}: {wrong}") from wrong
        timing = Timing.of(time_cuda(call, rule=_RULE, clear=clear))
        rate = case.useful_bytes / (timing.median * 1e-9)
        rungs.append(
            {
                "rung": letter,
                "title": title,
                "median_us": timing.median / 1e3,
                "percent_of_copy": 100 * rate / copy_bytes_s,
                "useful_bytes_s": rate,
                "error_of_sum": error,
                "timing_ns": timing.to_dict(),
            }
        )
    m, k, batch = shape
    return {"m": m, "k": k, "l": batch, "useful_bytes": case.useful_bytes, "rungs": rungs}


def _print(record: dict) -> None:
    where, copy = record["machine"], record["copy_bytes_s"] / 1e12
    print(f"{where['gpu']}, {where['date']}; a copy on the device in this run: {copy:.2f} TB/s (read + written)")
    for case in record["cases"]:
        print(f"\nm={case['m']} k={case['k']} l={case['l']}: {case['useful_bytes'] / 1e6:.1f} MB; measured, L2 cold")
        print(f"{'':2} {'rung':28} {'median µs':>10} {'GB/s':>7} {'% of copy':>10} {'runs':>5}")
        for r in case["rungs"]:
            gb_s = f"{r['useful_bytes_s'] / 1e9:7.0f}"
            percent, runs = f"{r['percent_of_copy']:10.1f}", f"{r['timing_ns']['runs']:5d}"
            print(f"{r['rung']:2} {r['title']:28} {r['median_us']:10.1f} {gb_s} {percent} {runs}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the record instead of a table")
    parser.add_argument("--out", type=Path, help="where the record goes (default: benchmarks/results)")
    options = parser.parse_args()
    arch = gpu_target("notebooks/01_gemv.ipynb simulates the ladder on any machine.").arch
    copy_bytes_s, clear = copy_bandwidth(), ColdL2()
    try:
        cases = [measure(arch, shape, copy_bytes_s, clear) for shape in SHAPES]
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    record = {
        "machine": machine(),
        "arch": arch.name,
        "copy_bytes_s": copy_bytes_s,
        "method": "median of CUDA-event times of single launches, L2 cold and clean (512 MiB read before each)",
        "cases": cases,
    }
    path = options.out or results_path("gemv_ladder")
    write(record, path)
    if options.json:
        print(json.dumps(record, indent=1))
    else:
        _print(record)
        print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

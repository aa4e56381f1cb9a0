"""Times the GEMV on this machine's GPU against a device copy and torch in bf16: ``python benchmarks/gemv.py``.

Every shape is checked against the exact reference first (all E2M1 codes, all finite E4M3 scales, poisoned output).
Times are of one call between two CUDA events, launch included, with L2 cold and clean (512 MiB read before each). The
same run times the copy, torch's bf16 ``bmm`` of the same shape and an empty kernel. ``--variants`` also times the
kernel's other warp splits and ring depths: the choice in ``planning.gemv`` rests on these times.

Exit codes: 0 done, 1 a result is wrong, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import gpu_target, machine, results_path, write

from cute_nvfp4.errors import OperandError
from cute_nvfp4.harness.timing import ColdL2, StopRule, copy_bandwidth, geometric_mean, time_cuda
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.gemv import gemv, plan_for
from cute_nvfp4.planning.gemv import GemvPlan
from cute_nvfp4.reference import gemv_reference
from cute_nvfp4.scale_layout import to_blocked

SHAPES = ((7168, 16384, 1), (4096, 7168, 8), (7168, 2048, 4))
_RULE = StopRule(repeats=100, relative_error=0.001, seconds=10.0)


def operands(
    m: int, k: int, batch: int, seed: int, device: str = "cuda"
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Random operands with every E2M1 code and every finite E4M3 scale, scales blocked."""
    options = {"dtype": torch.uint8, "device": device, "generator": torch.Generator(device).manual_seed(seed)}

    def draw(rows: int) -> BlockScaledTensor:
        data = torch.randint(0, 256, (batch, rows, k // 2), **options)
        scale = torch.randint(0, 254, (batch, rows, k // 16), **options)
        # 254 codes: all but the two NaN, 0x7F and 0xFF
        return BlockScaledTensor(data, to_blocked(scale + (scale >= 0x7F).to(torch.uint8)))

    return draw(m), draw(1)


def useful_bytes(m: int, k: int, batch: int) -> int:
    """Bytes of a, b and their scales, each read once, and of the fp16 result."""
    return batch * ((m + 1) * (k // 2 + k // 16) + 2 * m)


def median_us(call, clear: ColdL2) -> float:
    return statistics.median(time_cuda(call, rule=_RULE, clear=clear)) / 1e3


def check(a: BlockScaledTensor, b: BlockScaledTensor) -> float:
    """The largest error of an fp32 result over the largest result; NaN if the kernel left an element unwritten."""
    out = torch.full((a.batch, a.rows), float("nan"), device=a.data.device)
    gemv(a, b, out=out)
    exact = gemv_reference(a, b, out_dtype=torch.float64)
    return ((out.double() - exact).abs().max() / exact.abs().max()).item()


def host_overhead_us(a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, calls: int = 300) -> float:
    """Microseconds of host time to queue a call: the median of single calls with an idle queue."""
    samples = []
    for _ in range(calls):
        start = time.perf_counter()
        gemv(a, b, out=out)
        samples.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return statistics.median(samples) * 1e6


def measure(shape: tuple[int, int, int], copy_rate: float, clear: ColdL2) -> dict:
    """Checks and times one shape (M, K, L)."""
    m, k, batch = shape
    a, b = operands(m, k, batch, seed=1111)
    error = check(a, b)
    if not error < 1e-6:
        raise AssertionError(f"gemv is wrong on {shape}: relative error {error}, expected below 1e-6")
    out = torch.empty(batch, m, dtype=torch.float16, device="cuda")
    ours = median_us(lambda: gemv(a, b, out=out), clear)
    dense = torch.randn(batch, m, k, device="cuda").to(torch.bfloat16)
    vector = torch.randn(batch, k, 1, device="cuda").to(torch.bfloat16)
    bf16 = median_us(lambda: torch.bmm(dense, vector), clear)
    rate = useful_bytes(m, k, batch) / (ours * 1e-6)
    return {
        "shape": {"m": m, "k": k, "l": batch},
        "relative_error": error,
        "median_us": ours,
        "useful_bytes": useful_bytes(m, k, batch),
        "percent_of_copy": 100 * rate / copy_rate,
        "torch_bf16_bmm_us": bf16,
        "times_faster_than_bf16": bf16 / ours,
        "host_us_a_call": host_overhead_us(a, b, out),
    }


def variants(shape: tuple[int, int, int], clear: ColdL2) -> list[dict]:
    """Times the kernel's other configurations for one shape: splits of the warps, ring depths, K as a compile-time
    constant."""
    m, k, batch = shape
    a, b = operands(m, k, batch, seed=1111)
    out = torch.empty(batch, m, dtype=torch.float16, device="cuda")
    chosen = plan_for(a, b, out)
    warps = chosen.config.warps
    rows = []
    for warps_k, stages, constant_k in itertools.product((1, 2, 4, 8, 16), (2, 3, 4), (0, k)):
        split = {"warps_k": warps_k, "warps_m": warps // warps_k}
        config = dataclasses.replace(chosen.config, stages=stages, k=constant_k, **split)
        plan = GemvPlan(config, chosen.ctas)
        try:
            time_us = median_us(lambda plan=plan: gemv(a, b, out=out, config=plan), clear)
        except OperandError:  # fewer slices than warps, or too much shared memory
            continue
        rows.append({**split, "stages": stages, "k_compiled_in": bool(constant_k), "us": round(time_us, 2)})
    return sorted(rows, key=lambda row: row["us"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/gemv_<gpu>.json)")
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of a table")
    parser.add_argument("--variants", action="store_true", help="also time the kernel's other configurations")
    options = parser.parse_args()
    gpu_target("On a CPU, run: cute-nvfp4 eval nvfp4_gemv")
    clear = ColdL2()
    tiny = torch.empty(1, device="cuda")
    record = machine() | {
        "copy_bytes_s": copy_bandwidth(),
        "tiny_kernel_us": median_us(lambda: tiny.zero_(), clear),
        "timing": "median of CUDA event pairs around one call, launch included, L2 cold and clean",
        "shapes": [],
    }
    try:
        for shape in SHAPES:
            print(f"measuring {shape} …", file=sys.stderr)
            record["shapes"].append(measure(shape, record["copy_bytes_s"], clear))
            if options.variants:
                record["shapes"][-1]["variants"] = variants(shape, clear)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    record["geomean_us"] = geometric_mean([row["median_us"] for row in record["shapes"]])
    write(record, options.output or results_path("gemv"))
    if options.json:
        print(json.dumps(record, indent=1))
        return 0
    print(
        f"{record['gpu']}, driver {record['driver']}, {record['date']}: copy {record['copy_bytes_s'] / 1e12:.2f} TB/s,"
    )
    print(f"a tiny kernel {record['tiny_kernel_us']:.1f} us; geometric mean {record['geomean_us']:.2f} us")
    print(f"{'m, k, l':>18} {'us':>7} {'% of copy':>9} {'bf16 us':>8} {'x bf16':>6} {'host us':>7} {'error':>8}")
    for row in record["shapes"]:
        name = ", ".join(str(x) for x in row["shape"].values())
        print(
            f"{name:>18} {row['median_us']:7.2f} {row['percent_of_copy']:9.1f} {row['torch_bf16_bmm_us']:8.1f} "
            f"{row['times_faster_than_bf16']:6.2f} {row['host_us_a_call']:7.1f} {row['relative_error']:8.1e}"
        )
        for other in row.get("variants", [])[:6]:
            print(f"{'':>18} {other}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

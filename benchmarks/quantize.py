"""Times the fused quantization kernels on this machine's GPU: ``python benchmarks/quantize.py``.

For every rule it times 8192 × 8192 bf16 with a given global scale, in one pass, checked bit for bit against the
reference first (poisoned outputs). Bandwidth counts the bytes read and written once: x, data, scales; the device copy
beside it is measured in the same run. Further rows: other dtypes and formats, a computed global scale (two passes),
stochastic rounding, and the reference, eager and through ``torch.compile``.

On Hopper the speed of NVFP4 depends on whether products of elements and the reciprocal of a scale can be exact ties
between E2M1 values. They can with global scales that are powers of two, or amax / 2688 for most amax of few bits; with
other global scales they cannot. The script times both, and scales that fit neither the rule nor the data.

Times are medians of one call between two CUDA events, launch included, with L2 cold and clean.

Exit codes: 0 done, 1 a result is wrong, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import gpu_target, machine, results_path, write

from cute_nvfp4.harness.timing import ColdL2, StopRule, copy_bandwidth, time_cuda
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.planning.quantize import QuantizeProblem, can_implement
from cute_nvfp4.quantization.hadamard import Hadamard
from cute_nvfp4.quantization.rules import resolve_format, resolve_rule, rules_of

SIZE = 8192
_RULE = StopRule(repeats=100, relative_error=0.001, seconds=5.0)
_WARM_SECONDS = 0.1
# the largest magnitude that global scales are made from: one under which nothing is a tie, and one of eight bits
_PLAIN_AMAX, _TIED_AMAX = 6.1803, 93 / 16


def median_us(call: Callable[[], object], clear: ColdL2) -> float:
    """Median µs of ``call``, on a device that has not been idle."""
    end = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < end:
        call()
        torch.cuda.synchronize()
    return statistics.median(time_cuda(call, rule=_RULE, clear=clear)) / 1e3


def moved_bytes(x: torch.Tensor, format: str) -> int:
    """Bytes of x, data and scales, each counted once."""
    resolved = resolve_format(format)
    k = x.shape[-1]
    return x.numel() // k * (k * x.element_size() + resolved.data_columns(k) + resolved.scale_columns(k))


def check(x: torch.Tensor, options: dict) -> None:
    """Raises AssertionError unless the kernels give the reference's bytes."""
    got, want = (quantize(x, **options, backend=backend) for backend in ("cuda", "reference"))
    for name in ("data", "scale"):
        different = int((getattr(got, name) != getattr(want, name)).sum())
        if different:
            raise AssertionError(f"{options}: {different} bytes of {name} differ from the reference")


def measure(
    x: torch.Tensor,
    copy_rate: float,
    clear: ColdL2,
    *,
    format: str = "nvfp4",
    rule: str = "max",
    scale: object = None,
    seed: int | None = None,
    passes: int = 1,
    note: str = "",
    variant: dict | None = None,
) -> dict:
    """Checks and times one request. variant: the options hadamard, block_2d and transpose."""
    options = {"format": format, "rule": rule, "global_scale": scale, **(variant or {})}
    if seed is not None:
        options |= {"rounding": "stochastic", "generator": seed}
    check(x[:1024], options)
    ours = median_us(lambda: quantize(x, **options, backend="cuda"), clear)
    size = moved_bytes(x, format) + (passes - 1) * x.numel() * x.element_size()
    row = {
        "format": format,
        "rule": rule,
        "dtype": str(x.dtype).removeprefix("torch."),
        "note": note,
        "median_us": ours,
        "bytes": size,
        "percent_of_copy": 100 * size / (ours * 1e-6) / copy_rate,
    }
    print(f"{format:>10} {rule:>17} {row['dtype']:>9} {ours:8.1f} us {row['percent_of_copy']:6.1f} % of copy  {note}")
    return row


def baseline(x: torch.Tensor, rule: str, clear: ColdL2, compiled: bool, ours: float) -> dict:
    """Times the reference. compiled: through ``torch.compile``, checked against the reference first.

    ours: µs of the fused kernels.
    """
    scale = plain_scale(rule)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = quantize(x, "nvfp4", rule, global_scale=scale, backend="reference")
        return result.data, result.scale

    name = "torch.compile" if compiled else "torch"
    run = torch.compile(call, fullgraph=True, dynamic=False) if compiled else call
    for got, want in zip(run(x), call(x)):
        if not torch.equal(got, want):
            raise AssertionError(f"{rule}: what torch.compile made of the reference gives other bits")
    time = median_us(lambda: run(x), clear)
    print(f"{name:>28} {rule:>17} {time:8.1f} us, {time / ours:.1f} times the fused kernel's")
    return {"rule": rule, "backend": name, "median_us": time, "times_slower": time / ours}


def plain_scale(rule: str, device: str = "cuda") -> torch.Tensor:
    """A global scale for normal values, under which no product is a tie."""
    full = resolve_rule(rule, resolve_format("nvfp4")).full_scale
    return torch.tensor(_PLAIN_AMAX / full, dtype=torch.float32, device=device)


def requests(x: torch.Tensor) -> list[tuple[torch.Tensor, dict]]:
    """The requests to time: x and options."""
    rules = [r for r in rules_of("nvfp4") if not can_implement(QuantizeProblem(*_resolved("nvfp4", r), 128, 512))]
    rows = []
    for rule in rules:
        full = resolve_rule(rule, resolve_format("nvfp4")).full_scale
        for value, note in (
            (_PLAIN_AMAX / full, "given"),
            (_TIED_AMAX / full, "given, with ties"),
            (2.0**-8, "given, a power of two"),
        ):
            scale = torch.tensor(value, dtype=torch.float32, device="cuda")
            rows.append((x, {"rule": rule, "scale": scale, "note": note}))
    uniform = torch.rand(x.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1112))
    uniform = (uniform * 2 - 1).bfloat16()
    for tensor, amax, full, note in (
        (x, _PLAIN_AMAX, 2688, "given, that of rule max"),
        (x, x.abs().max().item(), 1536, "given, from the largest magnitude"),
        (uniform, _PLAIN_AMAX, 1536, "uniform numbers, given"),
        (uniform, 1.0, 2688, "uniform numbers, given, that of rule max"),
        (uniform, 1.0, 1536, "uniform numbers, given, from the largest magnitude"),
    ):
        scale = torch.tensor(amax / full, dtype=torch.float32, device="cuda")
        rows.append((tensor, {"rule": "four_six_mse", "scale": scale, "note": note}))
    scale = plain_scale("max")
    for dtype in (torch.float16, torch.float32):
        rows.append((x.to(dtype), {"scale": scale, "note": "given"}))
    rows.append((x, {"scale": "auto", "passes": 2, "note": "computed: two passes"}))
    rows.append((x, {"scale": scale, "seed": 1, "note": "given, stochastic rounding"}))
    for format in ("mxfp4", "mxfp8_e4m3"):
        rows.append((x, {"format": format, "rule": "rceil"}))
    for variant, note in (
        ({"hadamard": Hadamard.from_seed(1)}, "given, rotated"),
        ({"block_2d": True}, "given, square tiles"),
        ({"transpose": True}, "given, transposed"),
    ):
        for rule in ("max", "four_six_mse"):
            rows.append((x, {"rule": rule, "scale": plain_scale(rule), "variant": variant, "note": note}))
    return rows


def _resolved(format: str, rule: str) -> tuple:
    resolved = resolve_format(format)
    return resolved, resolve_rule(rule, resolved)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/quantize_<gpu>.json)")
    parser.add_argument("--json", action="store_true", help="print the record as JSON at the end")
    parser.add_argument("--no-compile", action="store_true", help="do not time torch.compile")
    options = parser.parse_args()
    gpu_target()
    clear = ColdL2()
    x = torch.randn(SIZE, SIZE, device="cuda", generator=torch.Generator("cuda").manual_seed(1111)).bfloat16()
    copy = copy_bandwidth()
    record = machine() | {
        "copy_bytes_s": copy,
        "size": [SIZE, SIZE],
        "timing": "median of CUDA event pairs around one call, launch included, L2 cold and clean",
        "rows": [],
        "torch": [],
    }
    print(f"{record['gpu']}, driver {record['driver']}, {record['date']}: copy {copy / 1e12:.2f} TB/s")
    try:
        for tensor, request in requests(x):
            record["rows"].append(measure(tensor, copy, clear, **request))
        for rule in ("max", "four_six_mse"):
            ours = next(row["median_us"] for row in record["rows"] if row["rule"] == rule)
            for compiled in (False,) if options.no_compile else (False, True):
                record["torch"].append(baseline(x, rule, clear, compiled, ours))
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    write(record, options.output or results_path("quantize"))
    if options.json:
        print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

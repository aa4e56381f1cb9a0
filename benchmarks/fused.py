"""Times the operations around a linear layer on this machine's GPU, fused and unfused: ``python benchmarks/fused.py``.

The rows are those of a decoding step and of a prefill, in bf16, with a given global scale, all in one run:

- ``rmsnorm_quantize`` with a residual; unfused: torch's sum and ``rms_norm``, and ``quantize``, three launches;
- ``silu_mul_quantize`` of one tensor with gate and up; unfused: torch's ``silu`` and product, and ``quantize``, three.

``compiled``: torch's part compiled by torch.compile to one launch, and ``quantize``. ``bound``: the time of a device
copy, measured in the same run, of the bytes that the fused kernel reads and writes, each counted once.

One CUDA graph holds twenty calls: a figure has no host time, but has the gaps between launches, as in a model. Times
are medians of a replay between two CUDA events, divided by twenty; L2 is warm, as it is after a product. Results are
checked first: codes and scales against ``quantize`` of the intermediate values, the new residual against torch's sum.

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
from torch.nn.functional import rms_norm, silu

from cute_nvfp4 import BlockScaledTensor, quantize, rmsnorm_quantize, silu_mul_quantize
from cute_nvfp4.harness.timing import StopRule, copy_bandwidth, time_cuda

ROWS, COLUMNS, CALLS, EPS = (1, 16, 128, 2048), (4096, 8192, 14336), 20, 1e-6
_RULE = StopRule(repeats=100, relative_error=0.002, seconds=1.0)
_WARM_SECONDS = 0.05
Call = Callable[[], object]


def captured(call: Call) -> Call:
    """Captures ``CALLS`` calls as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and allocate before the capture
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def median_us(call: Call) -> float:
    """Median µs of one ``call``, on a device that has not been idle."""
    replay = captured(call)
    end = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < end:
        replay()
        torch.cuda.synchronize()
    return statistics.median(time_cuda(replay, rule=_RULE, clear=lambda: None)) / 1e3 / CALLS


def result_bytes(rows: int, k: int) -> int:
    """Bytes of the codes and the scales of a result."""
    return rows * (k // 2 + k // 16)


def check(name: str, got: BlockScaledTensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises AssertionError unless ``got`` is what ``quantize`` gives for ``values``."""
    want = quantize(values, global_scale=scale, backend="reference")
    if not (torch.equal(got.data, want.data) and torch.equal(got.scale, want.scale)):
        raise AssertionError(f"{name} {tuple(values.shape)}: other bytes than those of quantize")


def rmsnorm_calls(rows: int, k: int, compiled: bool) -> tuple[dict[str, Call], int]:
    """The ways to normalize x + residual and quantize it, by name; and the bytes that the fused call moves."""
    generator = torch.Generator("cuda").manual_seed(1111)
    x, residual = (torch.randn(rows, k, device="cuda", generator=generator).bfloat16() for _ in range(2))
    weight = torch.rand(k, device="cuda", generator=generator).bfloat16() + 0.5
    scale = torch.tensor(6.1803 / 2688, device="cuda")
    options = {"residual": residual, "global_scale": scale, "eps": EPS, "backend": "cuda"}
    found = rmsnorm_quantize(x, weight, return_normed=True, **options)
    check("rmsnorm_quantize", found.quantized, found.normed, scale)
    if not torch.equal(found.residual, x + residual):
        raise AssertionError(f"rmsnorm_quantize {rows} x {k}: the new residual is wrong")
    out, new = found.quantized, found.residual

    def norm() -> tuple[torch.Tensor, torch.Tensor]:
        summed = x + residual
        return rms_norm(summed, (k,), weight, EPS), summed

    calls = {
        "fused": lambda: rmsnorm_quantize(x, weight, residual_out=new, out=out, **options),
        "torch, quantize": lambda: quantize(norm()[0], global_scale=scale, out=out),
    }
    if compiled:
        fast = torch.compile(norm, fullgraph=True, dynamic=False)
        calls["compiled, quantize"] = lambda: quantize(fast()[0], global_scale=scale, out=out)
    return calls, rows * k * 2 * 3 + k * 2 + result_bytes(rows, k)


def silu_calls(rows: int, k: int, compiled: bool) -> tuple[dict[str, Call], int]:
    """The ways to quantize silu(gate) · up, by name; and the bytes that the fused call moves."""
    both = torch.randn(rows, 2 * k, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
    scale = torch.tensor(6.1803 / 2688, device="cuda")
    found = silu_mul_quantize(both, global_scale=scale, return_activation=True, backend="cuda")
    check("silu_mul_quantize", found.quantized, found.activation, scale)
    out = found.quantized

    def activation() -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return silu(gate) * up

    calls = {
        "fused": lambda: silu_mul_quantize(both, global_scale=scale, out=out, backend="cuda"),
        "torch, quantize": lambda: quantize(activation(), global_scale=scale, out=out),
    }
    if compiled:
        fast = torch.compile(activation, fullgraph=True, dynamic=False)
        calls["compiled, quantize"] = lambda: quantize(fast(), global_scale=scale, out=out)
    return calls, rows * k * 2 * 2 + result_bytes(rows, k)


def measure(operation: str, rows: int, k: int, compiled: bool, copy_rate: float) -> dict:
    """Measures one row of the table."""
    # graphs that torch compiled for other sizes count against its recompile limit
    torch.compiler.reset()
    calls, size = (rmsnorm_calls if operation == "rmsnorm_quantize" else silu_calls)(rows, k, compiled)
    times = {name: median_us(call) for name, call in calls.items()}
    row = {"operation": operation, "rows": rows, "k": k, "us": times, "bytes": size, "bound_us": size / copy_rate * 1e6}
    words = "  ".join(f"{name} {us:7.2f}" for name, us in times.items())
    others = [us for name, us in times.items() if name != "fused"]
    ratio = min(others) / times["fused"]
    print(f"{operation:>17} {rows:5} x {k:5}  {words} us  bound {row['bound_us']:6.2f}  {ratio:.2f} x")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/fused_<gpu>.json)")
    parser.add_argument("--json", action="store_true", help="print the record as JSON at the end")
    parser.add_argument("--no-compile", action="store_true", help="do not time torch.compile")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--columns", type=int, nargs="+", default=COLUMNS)
    options = parser.parse_args()
    gpu_target()
    copy = copy_bandwidth()
    record = machine() | {
        "copy_bytes_s": copy,
        "timing": f"median of CUDA event pairs around a graph of {CALLS} calls, divided by {CALLS}, L2 warm",
        "rows": [],
    }
    print(f"{record['gpu']}, driver {record['driver']}, {record['date']}: copy {copy / 1e12:.2f} TB/s")
    try:
        for operation in ("rmsnorm_quantize", "silu_mul_quantize"):
            for k in options.columns:
                for rows in options.rows:
                    record["rows"].append(measure(operation, rows, k, not options.no_compile, copy))
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    write(record, options.output or results_path("fused"))
    if options.json:
        print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

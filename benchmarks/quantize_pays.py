"""Finds the size from which quantization pays on this machine's GPU: ``python benchmarks/quantize_pays.py``.

For sizes n, all in one run:

- the fused kernels quantize a matrix (n, n) in bf16 to NVFP4; beside it torch's bf16 product M = N = K = n. The share
  of that product's time that quantization takes is the least that an NVFP4 product has to save.
- a vector of n values in bf16 is quantized and multiplied with an (n, n) matrix in NVFP4 (``gemv``), as in a decoding
  step; beside it torch's bf16 product of the same sizes. Where the sum of both is shorter, quantization pays, including
  that of the activations.

CUDA graphs hold all calls, torch's too, so that no host time counts. Times are medians between two CUDA events around
one replay, with L2 cold and clean. Results are checked first: the quantized bytes against the torch backend, the
products against the exact reference.

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

from cute_nvfp4 import BlockScaledTensor, gemv
from cute_nvfp4.harness.timing import ColdL2, StopRule, copy_bandwidth, time_cuda
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.reference import gemv_reference
from cute_nvfp4.scale_layout import to_blocked

SIZES = tuple(2**i for i in range(8, 15))
# line's name → rule, and whether the global scale is given
QUANTIZE = {"max, given": ("max", True), "max, computed": ("max", False), "four_six_mse, given": ("four_six_mse", True)}
_RULE = StopRule(repeats=60, relative_error=0.002, seconds=1.0)
_WARM_SECONDS = 0.05


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Captures ``call`` as a CUDA graph and replays it once; a replay has no host time of the call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and allocate before the capture
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def median_us(call: Callable[[], object], clear: ColdL2) -> float:
    """Median µs of a replay of ``call``, on a device that has not been idle."""
    replay = captured(call)
    end = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < end:
        replay()
        torch.cuda.synchronize()
    return statistics.median(time_cuda(replay, rule=_RULE, clear=clear)) / 1e3


def weights(n: int, generator: torch.Generator) -> BlockScaledTensor:
    """An (n, n) matrix of random E2M1 codes and positive finite E4M3 scales."""
    data = torch.randint(0, 256, (n, n // 2), dtype=torch.uint8, device="cuda", generator=generator)
    scale = torch.randint(0, 0x7F, (n, n // 16), dtype=torch.uint8, device="cuda", generator=generator)
    return BlockScaledTensor(data, to_blocked(scale))


def check(x: torch.Tensor, rule: str, scale: object) -> None:
    """Raises AssertionError unless the kernels give the reference's bytes."""
    got, want = (quantize(x, rule=rule, global_scale=scale, backend=backend) for backend in ("cuda", "reference"))
    if not (torch.equal(got.data, want.data) and torch.equal(got.scale, want.scale)):
        raise AssertionError(f"{rule} on {tuple(x.shape)} differs from the reference")


def check_product(a: BlockScaledTensor, b: BlockScaledTensor) -> None:
    """Raises AssertionError unless ``gemv`` is right."""
    out = torch.full((a.rows,), float("nan"), device="cuda")
    gemv(a, b, out=out)
    exact = gemv_reference(a, b, out_dtype=torch.float64)
    error = ((out.double() - exact).abs().max() / exact.abs().max()).item()
    if not error < 1e-6:
        raise AssertionError(f"gemv is wrong for n = {a.rows}: relative error {error}, expected below 1e-6")


def measure(n: int, clear: ColdL2) -> dict:
    """Checks and times one size."""
    generator = torch.Generator("cuda").manual_seed(1111)
    x = torch.randn(n, n, device="cuda", generator=generator).bfloat16()
    vector, given = x[:1].clone(), torch.tensor(6.1803 / 2688, device="cuda")
    scales = {name: given if is_given else "auto" for name, (_, is_given) in QUANTIZE.items()}
    row: dict = {"n": n, "quantize_us": {}, "decode_us": {}}
    for name, (rule, _) in QUANTIZE.items():
        check(x[:512], rule, scales[name])
        row["quantize_us"][name] = median_us(
            lambda rule=rule, scale=scales[name]: quantize(x, rule=rule, global_scale=scale, backend="cuda"), clear
        )
    row["bf16_product_us"] = median_us(lambda: x @ x, clear)
    a = weights(n, generator)
    check_product(a, quantize(vector, global_scale=given, backend="cuda"))
    b = quantize(vector, global_scale=given, backend="cuda")
    row["decode_us"]["gemv alone"] = median_us(lambda: gemv(a, b), clear)
    for name, (rule, _) in QUANTIZE.items():
        row["decode_us"][name] = median_us(
            lambda rule=rule, scale=scales[name]: gemv(
                a, quantize(vector, rule=rule, global_scale=scale, backend="cuda")
            ),
            clear,
        )
    row["bf16_decode_us"] = median_us(lambda: x @ vector[0], clear)
    return row


def pays_from(rows: list[dict], name: str) -> int | None:
    """The smallest size from which decoding with ``name`` is faster than in bf16; None if no such size exists."""
    slower = [row["n"] for row in rows if row["decode_us"][name] >= row["bf16_decode_us"]]
    faster = [row["n"] for row in rows if row["n"] > max(slower, default=0)]
    return min(faster, default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, help="results file (default: benchmarks/results/quantize_pays_<gpu>.json)"
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON at the end")
    options = parser.parse_args()
    gpu_target()
    clear = ColdL2()
    record = machine() | {
        "copy_bytes_s": copy_bandwidth(),
        "timing": "median of CUDA event pairs around one replay of a CUDA graph, launch included, L2 cold and clean",
        "sizes": [],
    }
    print(
        f"{record['gpu']}, driver {record['driver']}, {record['date']}: copy {record['copy_bytes_s'] / 1e12:.2f} TB/s"
    )
    names = [*QUANTIZE, "bf16"]
    print(f"{'n':>6}  quantize (n, n), µs: {', '.join(names)} product | quantize + gemv, µs: alone, {', '.join(names)}")
    for n in SIZES:
        try:
            row = measure(n, clear)
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
        record["sizes"].append(row)
        products = [*row["quantize_us"].values(), row["bf16_product_us"]]
        steps = [*row["decode_us"].values(), row["bf16_decode_us"]]
        print(f"{n:>6} {' '.join(f'{v:9.1f}' for v in products)} | {' '.join(f'{v:9.1f}' for v in steps)}")
    record["pays_from"] = {name: pays_from(record["sizes"], name) for name in QUANTIZE}
    print("decoding: quantizing pays from n =", record["pays_from"])
    write(record, options.output or results_path("quantize_pays"))
    if options.json:
        print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

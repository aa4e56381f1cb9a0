"""Measures the error of a product for each width of activations: ``python benchmarks/accuracy_w4a8.py``, on any
machine.

``four_six_mse`` rounds weights (N, K) to NVFP4. x (M, K) stays in bfloat16 (W4A16), becomes E4M3 with a scale a row
(W4A8), or NVFP4 (W4A4). The error is the norm of the difference from the product of the unrounded floats, divided by
that product's norm. This package's kernels for sm_90a compute the products, on a GPU or in the simulator, whose tensor
cores keep as many bits of a sum as Hopper's. The column "sums" has what the rounding of sums alone adds: the difference
from the exact product of the same rounded operands.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cute_nvfp4 as nv

RULE = "four_six_mse"
E4M3 = torch.float8_e4m3fn


def student_t(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Values with heavy tails: Student's t with three degrees of freedom."""
    squares = torch.randn(3, *shape, generator=generator).square().sum(0)
    return torch.randn(shape, generator=generator) / (squares / 3).sqrt()


DATA: dict[str, Callable[[tuple[int, int], torch.Generator], torch.Tensor]] = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "Student t, 3": student_t,
}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def errors(m: int, n: int, k: int, data: str, format: str, device: str) -> list[tuple[str, float, float]]:
    """For each way to multiply: its name, its error, and the error of its sums alone."""
    generator = torch.Generator().manual_seed(1)
    w, x = (DATA[data](shape, generator).bfloat16().to(device) for shape in ((n, k), (m, k)))
    exact = x.double() @ w.double().t()
    weight, rows = nv.quantize(w, format, RULE if format == "nvfp4" else "max"), nv.quantize(x, "fp8_e4m3")
    operands = {
        "W4A16": (x, nv.prepare_weight(weight)),
        "W4A8": (rows, nv.prepare_weight(weight, dtype=E4M3)),
        "W4A8, promoted sums": (rows, nv.prepare_weight(weight, dtype=E4M3, promoted=True)),
        "W4A4": (nv.quantize(x, "nvfp4", RULE), nv.prepare_weight(weight, dtype=torch.float16)),
    }
    found = []
    for name, (a, b) in operands.items():
        wide = a.double() if isinstance(a, torch.Tensor) else a.dequantize(torch.float64)
        product = nv.gemm(a, b, out_dtype=torch.float32)
        own = wide @ b.dequantize(torch.float64).t()
        found.append((name, error(product, exact), error(product, own)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="32,128,4096", metavar="M,N,K")
    parser.add_argument("--formats", nargs="+", default=("nvfp4", "mxfp4"), choices=("nvfp4", "mxfp4"))
    options = parser.parse_args(arguments)
    m, n, k = map(int, options.sizes.split(","))
    on_gpu = torch.cuda.is_available()
    print(f"M, N, K = {m}, {n}, {k}; % of the exact product's norm ({'GPU' if on_gpu else 'simulated sm_90a'})")
    print("| weights | data | " + " | ".join(("W4A16", "W4A8", "W4A8, promoted sums", "W4A4")) + " | sums |")
    print("|---" * 7 + "|")
    with contextlib.nullcontext() if on_gpu else nv.simulating("sm_90a"):
        for format in options.formats:
            for data in DATA:
                found = errors(m, n, k, data, format, "cuda" if on_gpu else "cpu")
                cells = [f"{100 * total:.2f}" for _, total, _ in found]
                sums = " · ".join(f"{100 * own:.3f}" for _, _, own in found)
                print(f"| {format} | {data} | " + " | ".join(cells) + f" | {sums} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

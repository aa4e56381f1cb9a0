"""Helpers of ``05_quantization.ipynb``: they draw samples, measure errors, search scales exhaustively and model times.

Errors are computed in float64 from what ``quantize`` wrote. What these helpers recompute, they compute differently from
the library: they round elements by their distances to E2M1 values, and find scales by trying all of them.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cute_nvfp4 import BlockScaledTensor, formats
from cute_nvfp4.planning import rates
from cute_nvfp4.planning.gemm import GemmProblem, choose, predict_plan
from cute_nvfp4.target import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DRAWS = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "Laplace": lambda random, shape: random.laplace(size=shape),
    "Student t₃": lambda random, shape: random.standard_t(3, shape),
}
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = formats.decode_e4m3(torch.arange(127, dtype=torch.uint8), torch.float64).numpy()
"""All finite E4M3 values from 0 to 448, by code."""


def floats(values: Any) -> torch.Tensor:
    """A float32 tensor."""
    return torch.tensor(np.asarray(values), dtype=torch.float32)


def samples(seed: int = 0) -> dict[str, torch.Tensor]:
    """(512, 1024) floats of each distribution, the first samples of the table of docs/explanation/quantization.md."""
    random = np.random.default_rng(seed)
    return {name: floats(draw(random, (1024, 1024))[:512]) for name, draw in DRAWS.items()}


def relative_mse(x: torch.Tensor, y: torch.Tensor) -> float:
    """Σ(y − x)² / Σx², in float64."""
    x, y = x.detach().to(torch.float64), y.detach().to(torch.float64)
    return float((y - x).square().sum() / x.square().sum())


def decibels(mse: float) -> float:
    """The signal-to-noise ratio of a relative mean squared error, in dB."""
    return float(-10 * np.log10(mse))


def snr(x: torch.Tensor, q: BlockScaledTensor) -> float:
    """The signal-to-noise ratio of ``q`` as a quantization of ``x``, in dB."""
    return decibels(relative_mse(x, q.dequantize(torch.float64)))


def block_errors(x: torch.Tensor, q: BlockScaledTensor) -> np.ndarray:
    """Σ(value − x)² of every block, (rows, blocks), in float64."""
    difference = q.dequantize(torch.float64) - x.to(torch.float64)
    return difference.unflatten(-1, (-1, q.format.block)).square().sum(-1).numpy()


def scales(q: BlockScaledTensor) -> np.ndarray:
    """The scales' values of a matrix, without the global scale, (rows, blocks), in float64."""
    decode = formats.decode_ue8m0 if q.format.scale == "ue8m0" else formats.decode_e4m3
    codes = q.rowmajor_scale().view(torch.uint8)
    return decode(codes).to(torch.float64).numpy().reshape(q.rows, -1)


def nearest_e2m1(y: np.ndarray) -> np.ndarray:
    """The nearest E2M1 value, by distance (a tie's error is the same whichever way it goes)."""
    return np.sign(y) * E2M1[np.abs(np.abs(y)[..., None] - E2M1).argmin(-1)]


def errors_of_all_scales(blocks: np.ndarray, global_scale: float) -> np.ndarray:
    """Σ(value − x)² of ``blocks`` (n, 16) under each of the 127 E4M3 scales, (n, 127): the definition of the rule
    ``optimal``."""
    result = np.empty((len(blocks), len(E4M3)))
    for code, scale in enumerate(E4M3 * global_scale):
        value = nearest_e2m1(blocks / scale) * scale if scale else np.zeros_like(blocks)
        result[:, code] = ((value - blocks) ** 2).sum(-1)
    return result


def scales_worth_trying(blocks: np.ndarray, errors: np.ndarray, global_scale: float) -> np.ndarray:
    """For blocks (n, 16), which of the 127 scales could have an error below ``errors`` (n,): (n, 127).

    A scale t clips the largest magnitude a by a − 6t, and rounds all magnitudes below t/4 to zero.
    """
    magnitude = np.sort(np.abs(blocks), axis=-1)
    t = E4M3 * global_scale
    clipped = np.maximum(magnitude[:, -1:] - 6 * t, 0) ** 2
    squares = np.concatenate([np.zeros((len(blocks), 1)), (magnitude**2).cumsum(-1)], axis=-1)
    lost = np.stack([np.searchsorted(row, t / 4) for row in magnitude])
    return np.maximum(clipped, np.take_along_axis(squares, lost, -1)) <= errors[:, None]


def figures_of_docs() -> dict[str, list[float]]:
    """The table of decibels in docs/explanation/quantization.md: rule → normal, Laplace, Student t₃."""
    text = (ROOT / "docs" / "explanation" / "quantization.md").read_text(encoding="utf-8")
    table = text.split("| rule | normal | Laplace | Student t₃ |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)`(, 16 × 16 blocks)? \|(.+)\|$", table, re.MULTILINE)
    return {f"{rule}{' 2-D' if tiles else ''}": [float(x) for x in rest.split("|")] for rule, tiles, rest in rows}


def record(name: str) -> dict | None:
    """A measured record of ``benchmarks/results``, or None if the file does not exist."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def quantize_rows(record: dict) -> list[dict]:
    """bf16 to NVFP4 with a given global scale, from a record of ``benchmarks/quantize.py``; slowest first."""
    rows = [row for row in record["rows"] if (row["format"], row["dtype"]) == ("nvfp4", "bfloat16")]
    return sorted((row for row in rows if row["note"] == "given"), key=lambda row: -row["median_us"])


# The rest of this file models a B200, from the published figures in planning.rates. Times are in microseconds.

B200 = ARCHITECTURES["sm_100a"]
BF16_BYTES, NVFP4_BYTES = 2, 0.5 + 1 / 16
BF16_FLOP_S = rates.SUSTAINED_FLOP_S / 4
"""A tensor core instruction takes 32 bytes of K in the same cycles, whatever the type: 64 elements in NVFP4, 16 in bf16
(as in the data sheet, where bf16 has a quarter of the operations a second)."""


def quantize_us(rows: int, k: int, passes: int = 1) -> float:
    """A fused quantization of bf16 to NVFP4: a launch and the bytes of each pass; only the last pass writes."""
    moved = rows * k * (passes * BF16_BYTES + NVFP4_BYTES)
    return passes * rates.LAUNCH_US + moved / rates.BEST_BYTES_S * 1e6


@functools.cache
def nvfp4_gemm_us(m: int, n: int, k: int) -> float:
    """The NVFP4 GEMM that ``gemm`` would choose, by ``planning/gemm_model.py``; the result is bf16."""
    problem = GemmProblem(m, n, k, out="bfloat16")
    return predict_plan(choose(problem, B200, rates.SM_COUNT), problem, rates.SM_COUNT).us


@functools.cache
def bf16_gemm_us(m: int, n: int, k: int) -> float:
    """A bf16 GEMM by the same model: it moves the bytes and takes the cycles of an MXFP8 GEMM with twice the K.

    The bytes of that GEMM's scales are subtracted. This is an assumption, not a kernel of this library.
    """
    problem = GemmProblem(m, n, 2 * k, a_format="mxfp8", b_format="mxfp8", out="bfloat16")
    plan = choose(problem, B200, rates.SM_COUNT)
    with_scales = predict_plan(plan, problem, rates.SM_COUNT)
    bare = with_scales.dram_bytes - (m + n) * 2 * k / 32
    return predict_plan(plan, problem, rates.SM_COUNT, dram_bytes=bare).us


def columns_to_pay(passes: int = 1) -> float:
    """The N from which quantizing A (M, K) for one GEMM of many rows pays, whatever M and K are: bytes against FLOP.

    Each element of A costs its bytes in the quantization, and saves 2N operations at the difference of the rates.
    """
    cost = (passes * BF16_BYTES + NVFP4_BYTES) / rates.BEST_BYTES_S
    return cost / (2 / BF16_FLOP_S - 2 / rates.SUSTAINED_FLOP_S)


def weights_to_pay(passes: int = 1) -> float:
    """The N · K from which quantizing a few rows of A for one GEMM pays: launches against bytes of weights."""
    return passes * rates.LAUNCH_US * 1e-6 / ((BF16_BYTES - NVFP4_BYTES) / rates.DRAM_BYTES_S)

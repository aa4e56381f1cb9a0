"""Exact results of products: sums in float64 of values decoded here, scaled at the end; and the check of a result.

This file follows the formats' definitions (OCP MX 1.0; E4M3 and E5M2 of OFP8; UE8M0 is 2 ** (code − 127)) and uses
nothing of the package, so that it can also judge ``cute_nvfp4.reference``. A sum of products of NVFP4 is exact; of MX
it is within 2⁻⁵⁰ of the sum of magnitudes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

LARGEST = {torch.float16: 65504.0, torch.bfloat16: 2.0**128 - 2.0**120, torch.float32: 2.0**128 - 2.0**104}
"""The largest finite value of an output."""
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}
"""The smallest subnormal of an output."""


def _small_floats(exponent_bits: int, mantissa_bits: int, special: dict[int, float]) -> torch.Tensor:
    """The values of all codes of a float with a sign and these bits, by code."""
    bias, ones = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    found = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, ones)
        value = (mantissa if exponent == 0 else ones + mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        found.append(special.get(code, value))
    return torch.tensor([*found, *(-x for x in found)], dtype=torch.float64)


NAN = math.nan
E2M1 = _small_floats(2, 1, {})
E4M3 = _small_floats(4, 3, {0x7F: NAN})
E5M2 = _small_floats(5, 2, {0x7C: math.inf, 0x7D: NAN, 0x7E: NAN, 0x7F: NAN})
UE8M0 = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), NAN], dtype=torch.float64)
TABLES = {
    "nvfp4": (E2M1, E4M3, 16),
    "mxfp4": (E2M1, UE8M0, 32),
    "mxfp8": (E4M3, UE8M0, 32),
    "mxfp8_e5m2": (E5M2, UE8M0, 32),
}
"""For each format: values of elements, values of scales, elements that share a scale."""


def values_of(codes: torch.Tensor, scales: torch.Tensor, format: str) -> torch.Tensor:
    """The values of (…, K) codes, one a byte, and row-major scales, in float64 and without a global scale."""
    elements, scale, block = TABLES[format]
    return elements[codes.long()] * scale[scales.long()].repeat_interleave(block, dim=-1)


class Expected(NamedTuple):
    """An expected result. exact: in float64; error: tolerance of float32 arithmetic, before the output is rounded;
    free: elements that may have any value."""

    exact: torch.Tensor
    error: torch.Tensor
    free: torch.Tensor | None = None


def product(
    a: torch.Tensor, b: torch.Tensor, factor: float, bias: torch.Tensor | None = None, coarse: bool = False
) -> Expected:
    """a (…, M, K) times b (…, N, K), scaled at the end by ``factor``, plus bias (…, N); float64.

    coarse: sums round, each term by at most what tensor cores do (2⁻¹² of the largest); else they have so few bits that
    no term rounds. The factor is rounded a few times, and the sum once by each of a few products.
    """
    sums = a @ b.mT
    exact, error = sums * factor, (sums * factor).abs() * 2.0**-21
    if coarse:
        error = error + a.abs() @ b.abs().mT * abs(factor) * 2.0**-11
    beyond = exact.abs() + error > 2.0**128 * (1 - 2.0**-20)
    if bias is not None:
        bias = bias.unsqueeze(-2)
        # where alpha times the sum is infinite in float32, a bias cannot make it finite again
        exact, error = torch.where(beyond, exact, exact + bias), error + (exact.abs() + bias.abs()) * 2.0**-23
    # 0 times infinity is no error
    return Expected(exact, torch.nan_to_num(error, 0.0, math.inf))


def gated(x: Expected, y: Expected, gate: str) -> Expected:
    """gate(x) · y of two products; elements where one of them is beyond float32 may have any value."""
    gates = {
        "silu": lambda v: v * torch.sigmoid(v),
        "gelu_tanh": lambda v: v * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)),
        "gelu_erf": lambda v: v * torch.special.ndtr(v),
        "relu": lambda v: torch.where(v.isnan(), v, v.clamp(min=0)),
        "identity": lambda v: v,
    }
    open_ = gates[gate](x.exact)
    x, y = (each._replace(error=each.error + LEAST[torch.float32]) for each in (x, y))
    off = x.error
    if gate not in ("relu", "identity"):
        # a gate's slope is at most 1.2, its relative error 2⁻¹⁵, and it flushes subnormal results to 0
        off = 1.2 * x.error + open_.abs() * 2.0**-15 + 2.0**-126
    exact = open_ * y.exact
    error = off * y.exact.abs() + open_.abs() * y.error + exact.abs() * 2.0**-23
    free = (x.exact.abs() + x.error > LARGEST[torch.float32]) | (y.exact.abs() + y.error > LARGEST[torch.float32])
    return Expected(exact, torch.nan_to_num(error, 0.0, math.inf), free)


def wrong(result: torch.Tensor, expected: Expected) -> str:
    """Says what is wrong with a result; empty if nothing is.

    If the exact value is NaN, it must be NaN or infinity; near the largest value of the output's dtype, that value or
    infinity; beyond it, infinity with its sign; else a value within the error, half a unit of the output in the last
    place, and its smallest subnormal.
    """
    dtype, got, (exact, error, free) = result.dtype, result.double(), expected
    if got.shape != exact.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(exact.shape)}"
    most = LARGEST[dtype] * (1 + 2.0 ** -(DIGITS[dtype] + 1))
    room = error + exact.abs() * 2.0 ** -DIGITS[dtype] + LEAST[dtype]
    near = (got - exact).abs() <= room
    infinite = got.isinf() & (got.sign() == exact.sign())
    right = torch.where(exact.abs() - error > most, infinite, near | infinite)
    right = torch.where(exact.abs() + error < most, near, right)
    right = torch.where(exact.isnan(), ~got.isfinite(), right)
    if free is not None:
        right = right | free
    if right.all():
        return ""
    at = tuple(int(i) for i in (~right).nonzero()[0])
    return f"{int((~right).sum())} of {right.numel()}; at {at} got {float(got[at])!r}, expected {float(exact[at])!r}"

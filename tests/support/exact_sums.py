"""What a product is, exactly: sums in float64 of values decoded here, scaled at the end; and whether a result is that.

This is written from the formats' definitions (OCP MX 1.0; E4M3 and E5M2 of OFP8; UE8M0 is 2 ** (code − 127)) and from
nothing of the package, so that it may judge ``cute_nvfp4.reference`` too. A sum of products of NVFP4 is exact; of MX it
is within 2⁻⁵⁰ of the sum of magnitudes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

LARGEST = {torch.float16: 65504.0, torch.bfloat16: 2.0**128 - 2.0**120, torch.float32: 2.0**128 - 2.0**104}
"""The largest finite number of an output."""
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}
"""The least subnormal number of an output."""


def _small_floats(exponent_bits: int, mantissa_bits: int, special: dict[int, float]) -> torch.Tensor:
    """The values of all codes of a float of so many bits and a sign, by code."""
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
TABLES = {"nvfp4": (E2M1, E4M3, 16), "mxfp4": (E2M1, UE8M0, 32), "mxfp8": (E4M3, UE8M0, 32), "mxfp8_e5m2": (E5M2, UE8M0, 32)}
"""Of a format: values of elements, values of scales, elements that share a scale."""


def values_of(codes: torch.Tensor, scales: torch.Tensor, format: str) -> torch.Tensor:
    """The values of (…, K) codes, one a byte, and row-major scales, in float64 and without a global scale."""
    elements, scale, block = TABLES[format]
    return elements[codes.long()] * scale[scales.long()].repeat_interleave(block, dim=-1)


class Expected(NamedTuple):
    """exact: the result in float64; error: what sums in float32 may be off by, before the output is rounded."""

    exact: torch.Tensor
    error: torch.Tensor


def product(a: torch.Tensor, b: torch.Tensor, factor: float, bias: torch.Tensor | None = None) -> Expected:
    """a (…, M, K) times b (…, N, K), scaled at the end by ``factor``, plus bias (…, N); float64.

    An error of float32 is at most half a unit of every partial sum, of K terms, and of each of a few products with the
    factor; tensor cores cut off instead of rounding, which doubles it.
    """
    sums, magnitudes = a @ b.mT, a.abs() @ b.abs().mT
    exact, error = sums * factor, magnitudes * abs(factor) * (2 * a.shape[-1] + 8) * 2.0**-24
    if bias is not None:
        exact, error = exact + bias.unsqueeze(-2), error + (exact.abs() + bias.abs().unsqueeze(-2)) * 2.0**-23
    # where the factor is 0 or infinite, 0 times infinity is no error
    return Expected(exact, torch.where(error.isfinite(), error, 0.0))


def wrong(result: torch.Tensor, expected: Expected) -> str:
    """What is wrong with a result, in words; nothing where it is right.

    Where the exact value is NaN, NaN; where it is within the error of what the output's dtype can hold, that value or
    infinity; beyond it infinity with its sign; else the value within the error, half a unit of the output, and one of
    its least subnormal numbers.
    """
    dtype, got, (exact, error) = result.dtype, result.double(), expected
    if got.shape != exact.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(exact.shape)}"
    most = LARGEST[dtype] * (1 + 2.0 ** -(DIGITS[dtype] + 1))
    room = error + exact.abs() * 2.0 ** -DIGITS[dtype] + 2 * LEAST[dtype]
    near = (got - exact).abs() <= room
    infinite = (got.isinf()) & (got.sign() == exact.sign())
    right = torch.where(exact.abs() + error < most, near, torch.where(exact.abs() - error > most, infinite, near | infinite))
    right = torch.where(exact.isnan(), got.isnan(), right)
    if right.all():
        return ""
    at = tuple(int(i) for i in (~right).nonzero()[0])
    return f"{int((~right).sum())} of {right.numel()} wrong; at {at} got {float(got[at])!r}, expected {float(exact[at])!r}"

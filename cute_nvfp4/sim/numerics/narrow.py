"""The 8-, 6- and 4-bit floating-point formats: E4M3, E5M2, E3M2, E2M3, E2M1 and UE8M0 (PTX ISA, "Alternate
Floating-Point Data Formats").

Decoding uses tables. Encoding finds the neighbours of a value in the sorted table of magnitudes and resolves ties
exactly.
"""

from __future__ import annotations

from functools import cache

import numpy as np

#: (exponent bits, mantissa bits, exponent bias) of each format
_SHAPE = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e3m2": (3, 2, 3), "e2m3": (2, 3, 1), "e2m1": (2, 1, 1)}


@cache
def decode_table(name: str) -> np.ndarray:
    """Returns the f32 value of every code: 256 values, 64 for e3m2 and e2m3, 16 for e2m1."""
    exponent, mantissa, bias = _SHAPE[name]
    codes = np.arange(1 << (1 + exponent + mantissa))
    e, f = codes >> mantissa & ((1 << exponent) - 1), codes & ((1 << mantissa) - 1)
    value = np.where(e == 0, f * 2.0 ** (1 - bias - mantissa), (1 + f / 2**mantissa) * 2.0 ** (e - bias))
    if name == "e4m3":
        value = np.where((codes & 127) == 127, np.nan, value)
    if name == "e5m2":
        value = np.where(e == 31, np.where(f == 0, np.inf, np.nan), value)
    return np.where(codes >> (exponent + mantissa), -value, value).astype("f4")


@cache
def _magnitudes(name: str) -> np.ndarray:
    values = decode_table(name)[: len(decode_table(name)) // 2]
    return values[np.isfinite(values)].astype("f8")


def encode(x: np.ndarray, name: str, relu: bool = False) -> np.ndarray:
    """Returns the u8 codes of f32 or f64 values, rounded to nearest even and saturated to the largest finite magnitude
    (``.satfinite``). ``relu`` replaces negative values by zero.

    NaN becomes 0x7f in E4M3 and E5M2, and the largest positive value in the other formats, which have no NaN.
    """
    table = _magnitudes(name)
    if relu:
        x = np.where(np.isnan(x), x, np.maximum(x, x.dtype.type(0)))
    magnitude = np.abs(x).astype("f8")
    high = np.searchsorted(table, magnitude, side="left").clip(1, len(table) - 1)
    low = high - 1
    below, above = magnitude - table[low], table[high] - magnitude
    code = np.where((below > above) | ((below == above) & (low & 1 == 1)), high, low)
    code = np.where(magnitude >= table[-1], len(table) - 1, code).astype("u1")
    sign = np.uint8(len(decode_table(name)) // 2)
    code = np.where(np.signbit(x) & (not relu), code | sign, code)
    return np.where(np.isnan(x), np.uint8(0x7F if name in ("e4m3", "e5m2") else len(table) - 1), code).astype("u1")


def encode_ue8m0(x: np.ndarray, up: bool, finite: bool = True) -> np.ndarray:
    """Returns the UE8M0 codes of f32 magnitudes, rounded toward zero or, with ``up``, to the next power of two. NaN
    becomes 0xff. A magnitude that is too large becomes 0xfe with ``finite``, and 0xff without."""
    bits = np.ascontiguousarray(np.abs(x.astype("f4"))).view("u4")
    exponent = (bits >> np.uint32(23)).astype("i4")
    rest = bits & np.uint32(0x7FFFFF)
    # The smallest code means 2**-127, which is a subnormal of f32 with mantissa 0x400000.
    grow = np.where(exponent == 0, rest > np.uint32(0x400000), rest != 0) if up else False
    code = np.clip(exponent + grow, 0, 254 if finite else 255)
    return np.where(np.isnan(x), 255, code).astype("u1")


def decode_ue8m0(code: np.ndarray) -> np.ndarray:
    """Returns the bf16 bits of 2 ** (code - 127). Code 255 is NaN, and code 0 is the subnormal 2**-127."""
    return np.where(code == 255, 0x7FFF, np.where(code == 0, 0x0040, code.astype("u2") << np.uint16(7))).astype("u2")

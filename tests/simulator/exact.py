"""The oracle of the floating-point tests: rationals rounded once, with nothing in common with the simulator's
arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

#: precision in bits, exponent of the smallest subnormal, largest finite value
FORMATS = {
    "f16": (11, -24, Fraction(65504)),
    "bf16": (8, -133, Fraction(255, 128) * Fraction(2) ** 127),
    "f32": (24, -149, Fraction(2**24 - 1) * Fraction(2) ** 104),
    "f64": (53, -1074, Fraction(2**53 - 1) * Fraction(2) ** 971),
}


def rounded(x: Fraction, name: str, mode: str = "rn") -> float:
    """``x`` (not zero) rounded to a format; overflow as IEEE 754 says for the mode."""
    precision, lowest, largest = FORMATS[name]
    sign, x = (-1, -x) if x < 0 else (1, x)
    exponent = _exponent(x)
    unit = Fraction(2) ** max(exponent - precision + 1, lowest)
    q = x / unit
    floor = q.numerator // q.denominator
    rest = q - floor
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor & 1 == 1),
        "rz": False,
        "rm": rest > 0 and sign < 0,
        "rp": rest > 0 and sign > 0,
    }[mode]
    value = (floor + up) * unit
    if value > largest:
        cut = mode == "rz" or (mode == "rm" and sign > 0) or (mode == "rp" and sign < 0)
        return sign * (float(largest) if cut else math.inf)
    return sign * float(value)


def _exponent(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def bits(value, name: str) -> int:
    """Bits of an f16, bf16, f32 or f64 value; NaN is the canonical NaN of PTX arithmetic."""
    if math.isnan(value):
        return {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}[name]
    if name == "bf16":
        return int(np.float32(value).view("u4")) >> 16
    dtype = {"f16": "f2", "f32": "f4", "f64": "f8"}[name]
    return int(np.array(value, dtype).view(f"u{np.dtype(dtype).itemsize}"))


def values(raw: np.ndarray, name: str) -> list[float]:
    """Python floats of raw bits."""
    if name == "bf16":
        return (raw.astype("u4") << np.uint32(16)).view("f4").astype("f8").tolist()
    return raw.view({"f16": "f2", "f32": "f4", "f64": "f8"}[name]).astype("f8").tolist()


def fma(a: float, b: float, c: float, name: str, mode: str = "rn") -> float:
    """a * b + c rounded once."""
    if not all(map(math.isfinite, (a, b, c))):
        infinite = math.isinf(a) or math.isinf(b)
        if any(map(math.isnan, (a, b, c))) or (infinite and 0 in (a, b)):
            return math.nan
        if infinite:
            product = math.copysign(math.inf, math.copysign(1, a) * math.copysign(1, b))
            return math.nan if math.isinf(c) and c != product else product
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        negative = math.copysign(1, a) * math.copysign(1, b) < 0
        if Fraction(a) * Fraction(b) == 0 and c == 0 and negative == (math.copysign(1, c) < 0):
            return -0.0 if negative else 0.0
        return -0.0 if mode == "rm" else 0.0
    return rounded(exact, name, mode)


def divide(a: float, b: float, name: str, mode: str = "rn") -> float:
    """a / b rounded once."""
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    if math.isinf(a) or b == 0:
        return math.copysign(math.inf, sign)
    if math.isinf(b) or a == 0:
        return math.copysign(0.0, sign)
    return rounded(Fraction(a) / Fraction(b), name, mode)

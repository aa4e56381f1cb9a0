"""Binary32 arithmetic with one rounding.

numpy rounds to nearest even. This module adds fused multiply-add, directed rounding, rounding to odd and flushing of
subnormals. The functions ``exact_*`` return binary64 results rounded to odd, which can be rounded to 24 bits in any
mode without double rounding. ``mode`` is a rounding mode of PTX: rn, rz, rm (down) or rp (up).
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.numerics import double

_TINY32 = np.float32(2.0**-126)
#: Bounds below which a result rounded to 24 bits with unbounded exponent, to nearest or away from zero, is less than
#: 2**-126.
_TINY_NEAREST, _TINY_AWAY = 2.0**-126 * (1 - 2.0**-25), 2.0**-126 * (1 - 2.0**-24)
CANONICAL_NAN32 = np.uint32(0x7FFFFFFF)


def flush(a: np.ndarray) -> np.ndarray:
    """Replaces subnormal f32 values by zeros of the same sign (``.ftz``). Returns arrays of other types unchanged."""
    if a.dtype != np.float32:
        return a
    return np.where(np.abs(a) < _TINY32, np.copysign(np.float32(0), a), a)


def flush_tiny(out: np.ndarray, mode: str, exact) -> np.ndarray:
    """Flushes rounded f32 results (``.ftz``) whose magnitude is below 2**-126 when rounded with unbounded exponent.

    These are the subnormal results, and some that are 2**-126 only because subnormals have fewer bits (observed on an
    H200: 0x00800000 * 0x3f7fffff is 0). ``exact()`` returns the results in binary64, rounded to odd.
    """
    out = flush(out)
    edge = np.abs(out) == _TINY32
    if not edge.any():
        return out
    size = np.abs(exact())
    tiny = size < _TINY_NEAREST if mode == "rn" else size <= _TINY_AWAY
    return np.where(edge & tiny, np.copysign(np.float32(0), out), out)


def canonical(a: np.ndarray) -> np.ndarray:
    """Replaces NaN results by the canonical NaN of their type: 0x7fff, 0x7fffffff or 0x7ff8000000000000 (PTX ISA,
    "Floating-Point": NaN payloads are not kept)."""
    bad = np.isnan(a)
    if not bad.any():
        return a
    bits = {2: np.uint16(0x7FFF), 4: CANONICAL_NAN32, 8: np.uint64(0x7FF8000000000000)}[a.dtype.itemsize]
    unsigned = f"u{a.dtype.itemsize}"
    return np.where(bad, bits, a.view(unsigned)).view(a.dtype)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rounded sum and its exact error (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def round_to_odd(s: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Returns ``s`` + ``error`` rounded to odd in the type of ``s``, binary64 or binary32. An inexact result has an odd
    last bit, so a later rounding to at least two bits less rounds the exact value correctly (Boldo and Melquiond)."""
    bits = s.view(f"i{s.dtype.itemsize}")
    least = bits.dtype.type(1), bits.dtype.type(np.iinfo(bits.dtype).min + 1)
    inexact = (error != 0) & np.isfinite(s) & (bits & 1 == 0)
    # The error points away from zero or toward it; the neighbour on that side is odd.
    away = (error > 0) == (s > 0)
    moved = np.where(away, bits + 1, bits - 1)
    moved = np.where(s == 0, np.where(error > 0, *least), moved)
    return np.where(inexact, moved, bits).view(s.dtype)


def to_single(x: np.ndarray, mode: str) -> np.ndarray:
    """Rounds binary64 values to binary32. Raises ``ValueError`` for modes other than rn, rz, rm and rp."""
    nearest = x.astype("f4")
    if mode == "rn":
        return nearest
    back = nearest.astype("f8")
    down = np.nextafter(nearest, np.float32(-np.inf))
    up = np.nextafter(nearest, np.float32(np.inf))
    finite = np.isfinite(x)
    if mode == "rz":
        return np.where(finite & (np.abs(back) > np.abs(x)), np.where(x > 0, down, up), nearest)
    if mode == "rm":
        return np.where(finite & (back > x), down, nearest)
    if mode == "rp":
        return np.where(finite & (back < x), up, nearest)
    raise ValueError(f"rounding mode {mode}")


def to_tf32(a: np.ndarray, rounding: str) -> np.ndarray:
    """Returns the bits of f32 values rounded to 10 mantissa bits in mode rn, rz or rna (ties away). A NaN becomes
    0x7fffe000, except with .rna, which keeps its sign and high bits."""
    u = np.ascontiguousarray(a).view("u4")
    if rounding == "rn":
        out = u + (np.uint32(0xFFF) + (u >> np.uint32(13) & np.uint32(1)))
    else:
        out = u + np.uint32(0x1000) if rounding == "rna" else u
    out = np.where(np.isfinite(a), out, u) & ~np.uint32(0x1FFF)
    return out if rounding == "rna" else np.where(np.isnan(a), np.uint32(0x7FFFE000), out)


def exact_mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the product of binary32 values in binary64, which represents it exactly."""
    return a.astype("f8") * b.astype("f8")


def exact_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a * b + c in binary64, rounded to odd."""
    return round_to_odd(*two_sum(exact_mul(a, b), c.astype("f8")))


def exact_div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a / b in binary64, rounded to odd."""
    x, y = a.astype("f8"), b.astype("f8")
    q = x / y
    # The sign of the remainder x - q*y tells how q was rounded. The product q*y of 53 and 24 bits is split to be exact.
    head = (q.view("u8") & np.uint64(0xFFFFFFFFF8000000)).view("f8")
    remainder = (x - head * y) - (q - head) * y
    error = np.where(np.isfinite(remainder) & np.isfinite(q), np.sign(remainder) * np.sign(y), 0.0)
    return round_to_odd(q, error)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Returns a * b + c of f32 arrays, rounded once.

    The product is exact in binary64, but the sum is rounded there first. This changes the result only where the
    binary64 sum is a tie of f32 or the result is subnormal in f32. These lanes are computed again, rounded to odd.
    """
    p, wide = exact_mul(a, b), c.astype("f8")
    if mode != "rn":
        return _directed_sum(p, wide, mode)
    s = p + wide
    out = s.astype("f4")
    doubt = ((s.view("u8") & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)) | (np.abs(s) < 1.2e-38)
    if not doubt.any():
        return canonical(out)
    p, wide = np.broadcast_arrays(p, wide)
    out[doubt] = round_to_odd(*two_sum(p[doubt], wide[doubt])).astype("f4")
    return canonical(out)


def _directed_sum(p: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """Returns p + c of binary64 values, rounded to f32 in a directed mode. An exact zero is -0 when rounded down,
    unless both terms are +0 (IEEE 754-2019, 6.3)."""
    s = round_to_odd(*two_sum(p, c))
    out = canonical(to_single(s, mode))
    if mode == "rm":
        out = np.where(s == 0, np.where(np.signbit(p) | np.signbit(c), np.float32(-0.0), np.float32(0)), out)
    return out


def add32(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Returns the binary32 sum, rounded by ``mode``."""
    return canonical(a + b) if mode == "rn" else _directed_sum(a.astype("f8"), b.astype("f8"), mode)


def mul32(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Returns the binary32 product, rounded by ``mode``."""
    return canonical(a * b) if mode == "rn" else canonical(to_single(exact_mul(a, b), mode))


def div32(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Returns the binary32 quotient, rounded by ``mode``."""
    return canonical(a / b) if mode == "rn" else canonical(to_single(exact_div(a, b), mode))


def div_approx32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the result of ``div.approx``. Divisors between 2**126 and 2**128 in magnitude give zero, or NaN for an
    infinite dividend (PTX ISA, "div"). Other quotients are correctly rounded, where the ISA allows 2 ulp."""
    large = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return div32(a, b) if not large.any() else canonical(np.where(large, a * np.copysign(np.float32(0), b), a / b))


def sqrt32(a: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Returns the binary32 square root, rounded by ``mode``."""
    if mode == "rn":
        return canonical(np.sqrt(a))
    x = a.astype("f8")
    r = np.sqrt(x)
    head = (r.view("u8") & np.uint64(0xFFFFFFFFF8000000)).view("f8")
    low = r - head
    remainder = ((x - head * head) - 2 * head * low) - low * low
    return canonical(to_single(round_to_odd(r, np.where(np.isfinite(remainder), remainder, 0.0)), mode))


def minimum(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """Returns the result of ``min``, for which -0 is less than +0. If one operand is NaN, the result is the other one,
    or NaN with ``nan`` (``.NaN``). Of two f64 NaNs, the result is the second."""
    return _extremum(a, b, nan, np.less)


def maximum(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """Returns the result of ``max``, for which +0 is greater than -0; NaNs are treated as in ``minimum``."""
    return _extremum(a, b, nan, np.greater)


def _extremum(a, b, nan: bool, before) -> np.ndarray:
    zero = (a == 0) & (b == 0)
    first = np.where(zero, np.signbit(a) if before is np.less else ~np.signbit(a), before(a, b))
    out = np.where(first, a, b)
    na, nb = np.isnan(a), np.isnan(b)
    if not (na.any() or nb.any()):
        return out
    if a.dtype == np.float64 and not nan:
        return double.with_nan(np.where(na, b, np.where(nb, a, out)), b, a)
    if nan:
        return canonical(np.where(na | nb, a.dtype.type(np.nan), out))
    return canonical(np.where(na, b, np.where(nb, a, out)))

"""Binary32 and binary64 arithmetic with one rounding.

numpy rounds to nearest-even. What it lacks is here: fused multiply-add, rounding toward zero and to odd, flushing of
subnormals.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

_TINY32 = np.float32(2.0**-126)
CANONICAL_NAN32 = np.uint32(0x7FFFFFFF)


def flush(a: np.ndarray) -> np.ndarray:
    """``.ftz``: subnormal f32 values become zeros of the same sign; other types are returned as they are."""
    if a.dtype != np.float32:
        return a
    return np.where(np.abs(a) < _TINY32, np.copysign(np.float32(0), a), a)


def canonical(a: np.ndarray) -> np.ndarray:
    """Arithmetic f32 results that are NaN become 0x7fffffff (PTX ISA, "Floating-Point": NaN payloads are not kept)."""
    bad = np.isnan(a)
    if not bad.any():
        return a
    bits = {2: np.uint16(0x7FFF), 4: CANONICAL_NAN32, 8: np.uint64(0x7FF8000000000000)}[a.dtype.itemsize]
    unsigned = f"u{a.dtype.itemsize}"
    return np.where(bad, bits, a.view(unsigned)).view(a.dtype)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded sum and its exact error (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def round_to_odd(s: np.ndarray, error: np.ndarray) -> np.ndarray:
    """``s`` + ``error`` rounded to odd in binary64: an inexact result gets an odd last bit, so that a later rounding
    to at most 51 bits is the rounding of the exact value (Boldo and Melquiond)."""
    bits = s.view("i8")
    inexact = (error != 0) & np.isfinite(s) & (bits & 1 == 0)
    # The error points away from zero or toward it; the neighbour on that side is odd.
    away = (error > 0) == (s > 0)
    moved = np.where(away, bits + 1, bits - 1)
    moved = np.where(s == 0, np.where(error > 0, np.int64(1), np.int64(-(2**63) + 1)), moved)
    return np.where(inexact, moved, bits).view("f8")


def to_single(x: np.ndarray, mode: str) -> np.ndarray:
    """Binary64 to binary32 in rounding mode rn, rz, rm (down), rp (up) or rna (ties away)."""
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


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """a * b + c of f32 arrays, rounded once.

    The product is exact in binary64. The sum is rounded there first, and that can change the result only where it
    lands on a tie of f32 (or where f32 is subnormal): those lanes are redone with rounding to odd.
    """
    p, wide = a.astype("f8") * b.astype("f8"), c.astype("f8")
    s = p + wide
    if mode == "rn":
        out = s.astype("f4")
        doubt = ((s.view("u8") & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)) | (np.abs(s) < 1.2e-38)
        if not doubt.any():
            return canonical(out)
        p, wide = np.broadcast_arrays(p, wide)
        out[doubt] = round_to_odd(*two_sum(p[doubt], wide[doubt])).astype("f4")
        return canonical(out)
    return canonical(to_single(round_to_odd(*two_sum(p, wide)), mode))


def add32(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    if mode == "rn":
        return canonical(a + b)
    return canonical(to_single(round_to_odd(*two_sum(a.astype("f8"), b.astype("f8"))), mode))


def mul32(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    if mode == "rn":
        return canonical(a * b)
    return canonical(to_single(a.astype("f8") * b.astype("f8"), mode))


def div32(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    """f32 quotient; the directed modes correct the binary64 quotient by the sign of its exact remainder."""
    if mode == "rn":
        return canonical(a / b)
    x, y = a.astype("f8"), b.astype("f8")
    q = x / y
    # q carries 53 bits; x - q*y has the sign of what was cut off. The product of 53 and 24 bits is split to stay exact.
    head = (q.view("u8") & np.uint64(0xFFFFFFFFF8000000)).view("f8")
    remainder = (x - head * y) - (q - head) * y
    error = np.where(np.isfinite(remainder) & np.isfinite(q), np.sign(remainder) * np.sign(y), 0.0)
    return canonical(to_single(round_to_odd(q, error), mode))


def sqrt32(a: np.ndarray, mode: str = "rn") -> np.ndarray:
    if mode == "rn":
        return canonical(np.sqrt(a))
    x = a.astype("f8")
    r = np.sqrt(x)
    head = (r.view("u8") & np.uint64(0xFFFFFFFFF8000000)).view("f8")
    low = r - head
    remainder = ((x - head * head) - 2 * head * low) - low * low
    return canonical(to_single(round_to_odd(r, np.where(np.isfinite(remainder), remainder, 0.0)), mode))


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of f64 arrays, rounded once: through exact rationals where an error-free transformation says it
    matters."""
    naive = a * b + c
    a, b, c, naive = (np.array(x) for x in np.broadcast_arrays(a, b, c, naive))
    out = naive.ravel()
    for j, (x, y, z) in enumerate(zip(a.ravel().tolist(), b.ravel().tolist(), c.ravel().tolist())):
        if not (np.isfinite(x) and np.isfinite(y) and np.isfinite(z)):
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact == 0:
            continue
        try:
            out[j] = float(exact)
        except OverflowError:
            out[j] = np.inf if exact > 0 else -np.inf
    return canonical(out.reshape(naive.shape))


def minimum(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """``min``: -0 is less than +0; a NaN loses against a number unless ``nan`` (``.NaN``) lets it win."""
    return _extremum(a, b, nan, np.less)


def maximum(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """``max``: the mirror image of ``minimum``."""
    return _extremum(a, b, nan, np.greater)


def _extremum(a, b, nan: bool, before) -> np.ndarray:
    zero = (a == 0) & (b == 0)
    first = np.where(zero, np.signbit(a) if before is np.less else ~np.signbit(a), before(a, b))
    out = np.where(first, a, b)
    na, nb = np.isnan(a), np.isnan(b)
    if not (na.any() or nb.any()):
        return out
    if nan:
        return canonical(np.where(na | nb, a.dtype.type(np.nan), out))
    return canonical(np.where(na, b, np.where(nb, a, out)))

"""Binary16 and bfloat16, scalar and packed, with one rounding.

Values travel as f32 (``widen``), which holds every f16 and bf16 exactly, and are rounded back once (``narrow``).
bf16 values and packed pairs are raw bits outside this module; a pair has its low half first along a new last axis.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.numerics.single import round_to_odd, two_sum

_F16_TO_F32 = np.arange(65536, dtype=np.uint16).view("f2").astype("f4")
NAN16 = np.uint16(0x7FFF)


def widen(a: np.ndarray, t: str) -> np.ndarray:
    """f32 (or f64 unchanged) values of an array of type ``t``; packed types gain a last axis of 2."""
    if t in ("f32", "f64"):
        return a
    if t == "f16":
        return _F16_TO_F32.take(a.view("u2"))
    if t == "bf16":
        return (a.astype("u4") << np.uint32(16)).view("f4")
    halves = np.ascontiguousarray(a).view("u2").reshape(*a.shape, 2)
    return widen(halves.view("f2") if t == "f16x2" else halves, t[:-2])


def narrow(x: np.ndarray, t: str, mode: str = "rn") -> np.ndarray:
    """Rounds f32 or f64 values to type ``t``; packed types lose the last axis. NaNs become 0x7fff."""
    if t.endswith("x2"):
        low = narrow(x, t[:-2], mode).view("u2")
        return np.ascontiguousarray(low).view("u4")[..., 0]
    if t == "f16":
        return to_half(x, mode)
    return to_bfloat(x, mode)


def to_half(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """f32/f64 to f16 in mode rn, rz, rm or rp."""
    out = x.astype("f2")
    if mode != "rn":
        back = out.astype(x.dtype)
        toward = {"rz": np.abs(back) > np.abs(x), "rm": back > x, "rp": back < x}[mode] & np.isfinite(x)
        target = {"rz": np.float16(0), "rm": np.float16(-np.inf), "rp": np.float16(np.inf)}[mode]
        out = np.where(toward, np.nextafter(out, target), out)
    bad = np.isnan(x)
    return np.where(bad, NAN16, out.view("u2")).view("f2") if bad.any() else out


def to_bfloat(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """f32/f64 to bf16 bits. Binary64 goes to f32 by rounding to odd first, so that one rounding remains."""
    if x.dtype == np.float64:
        near = x.astype("f4")
        x = round_to_odd(near, x - near.astype("f8"))
    u = x.view("u4")
    if mode == "rn":
        out = (u + (np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    else:
        cut = (u & np.uint32(0xFFFF)) != 0
        grow = {"rz": False, "rm": np.signbit(x), "rp": ~np.signbit(x)}[mode] & cut & np.isfinite(x)
        out = (u >> np.uint32(16)) + np.asarray(grow).astype("u4")
    return np.where(np.isnan(x), np.uint32(0x7FFF), out).astype("u2")


def fma_half(a: np.ndarray, b: np.ndarray, c: np.ndarray, t: str) -> np.ndarray:
    """a * b + c on widened values, exact until it is rounded once to f16 or bf16.

    The product of two 11-bit (8-bit) significands is exact in f32, exponent range of bf16 apart; where the f32 sum is
    exact too, one rounding follows. Elsewhere the sum is made in binary64, rounded to odd, and then rounded once.
    """
    if t.startswith("f16"):
        p = a * b
        s, error = two_sum(p, c)
        if not error.any():
            return narrow(s, t)
    p, wide = a.astype("f8") * b.astype("f8"), c.astype("f8")
    s, error = two_sum(p, wide)
    return narrow(round_to_odd(s, error), t)


def add_half(a: np.ndarray, b: np.ndarray, t: str) -> np.ndarray:
    """a + b on widened values; the sum is rounded to odd in binary64 before the one rounding."""
    s, error = two_sum(a.astype("f8"), b.astype("f8"))
    return narrow(round_to_odd(s, error), t)


def flush_half(x: np.ndarray) -> np.ndarray:
    """``.ftz`` on widened f16 values: f16 subnormals become zeros of the same sign."""
    return np.where(np.abs(x) < np.float32(2.0**-14), np.copysign(np.float32(0), x), x)


def flush_tiny_half(x: np.ndarray, exact) -> np.ndarray:
    """``.ftz`` on widened f16 results, as ``single.flush_tiny``: ``exact()`` gives them in binary64, rounded to odd."""
    x = flush_half(x)
    edge = np.abs(x) == np.float32(2.0**-14)
    if not edge.any():
        return x
    return np.where(edge & (np.abs(exact()) < 2.0**-14 * (1 - 2.0**-12)), np.copysign(np.float32(0), x), x)


def canonical_half(raw: np.ndarray, t: str) -> np.ndarray:
    """Raw 16-bit values, or packed pairs, with 0x7fff for every NaN."""
    infinity = np.uint16(0x7C00 if t.startswith("f16") else 0x7F80)
    halves = np.ascontiguousarray(raw).view("u2")
    return np.where((halves & np.uint16(0x7FFF)) > infinity, NAN16, halves).view(raw.dtype)


def narrow_nan(out: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Narrowed f64 values ``out`` (f16, bf16 bits or f32) where ``x`` is a NaN: sign and the high bits of the payload
    stay, and it is quiet."""
    bad = np.isnan(x)
    if not bad.any():
        return out
    size = 8 * out.dtype.itemsize
    mantissa = {"f2": 10, "u2": 7, "f4": 23}[out.dtype.str[1:]]
    bits = x.view("u8")
    kept = (bits & np.uint64((1 << 52) - 1)) >> np.uint64(52 - mantissa)
    infinity = ((1 << size - 1 - mantissa) - 1) << mantissa
    raw = bits >> np.uint64(63) << np.uint64(size - 1) | np.uint64(infinity | 1 << mantissa - 1) | kept
    unsigned = f"u{size // 8}"
    return np.where(bad, raw.astype(unsigned), out.view(unsigned)).view(out.dtype)

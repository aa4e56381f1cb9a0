"""Arithmetic of binary16 and bfloat16, scalar and packed, with one rounding.

``widen`` converts values to f32, which represents every f16 and bf16 exactly. ``narrow`` rounds results once. Outside
this module, bf16 values and packed pairs are raw bits. A widened pair has a last axis of 2, with the low half first.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.numerics.single import round_to_odd, two_sum

_F16_TO_F32 = np.arange(65536, dtype=np.uint16).view("f2").astype("f4")
NAN16 = np.uint16(0x7FFF)


def widen(a: np.ndarray, t: str) -> np.ndarray:
    """Returns the values of an array of type ``t`` as f32; f64 is returned unchanged. Packed types gain a last axis of
    2."""
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
    """Rounds f32 or f64 values to f16 in mode rn, rz, rm or rp. NaNs become 0x7fff."""
    out = x.astype("f2")
    if mode != "rn":
        back = out.astype(x.dtype)
        toward = {"rz": np.abs(back) > np.abs(x), "rm": back > x, "rp": back < x}[mode] & np.isfinite(x)
        target = {"rz": np.float16(0), "rm": np.float16(-np.inf), "rp": np.float16(np.inf)}[mode]
        out = np.where(toward, np.nextafter(out, target), out)
    bad = np.isnan(x)
    return np.where(bad, NAN16, out.view("u2")).view("f2") if bad.any() else out


def to_bfloat(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Rounds f32 or f64 values to bf16 bits in mode rn, rz, rm or rp. NaNs become 0x7fff. Binary64 is first rounded to
    odd in f32, which avoids double rounding."""
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
    """Returns a * b + c of widened values, rounded once to f16 or bf16.

    The product of two f16 is exact in f32. If all f32 sums are exact too, one rounding follows. Otherwise the sum is
    rounded to odd in binary64 and then rounded once; so is every sum of bf16, whose products can exceed f32.
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
    """Returns a + b of widened values, rounded once to f16 or bf16; the binary64 sum is rounded to odd before."""
    s, error = two_sum(a.astype("f8"), b.astype("f8"))
    return narrow(round_to_odd(s, error), t)


def flush_half(x: np.ndarray) -> np.ndarray:
    """Replaces widened f16 values that are subnormal in f16 by zeros of the same sign (``.ftz``)."""
    return np.where(np.abs(x) < np.float32(2.0**-14), np.copysign(np.float32(0), x), x)


def flush_tiny_half(x: np.ndarray, exact) -> np.ndarray:
    """Flushes widened f16 results (``.ftz``) as ``single.flush_tiny`` flushes f32; ``exact()`` returns the results in
    binary64, rounded to odd."""
    x = flush_half(x)
    edge = np.abs(x) == np.float32(2.0**-14)
    if not edge.any():
        return x
    return np.where(edge & (np.abs(exact()) < 2.0**-14 * (1 - 2.0**-12)), np.copysign(np.float32(0), x), x)


def canonical_half(raw: np.ndarray, t: str) -> np.ndarray:
    """Returns raw 16-bit values or packed pairs, in which 0x7fff replaces every NaN."""
    infinity = np.uint16(0x7C00 if t.startswith("f16") else 0x7F80)
    halves = np.ascontiguousarray(raw).view("u2")
    return np.where((halves & np.uint16(0x7FFF)) > infinity, NAN16, halves).view(raw.dtype)


def narrow_nan(out: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the narrowed values ``out`` (f16, bf16 bits or f32) of f64 values ``x``, in which each NaN is quiet and
    keeps its sign and the high bits of its payload."""
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

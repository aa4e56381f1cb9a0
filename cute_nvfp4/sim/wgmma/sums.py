"""The sums of wgmma, as an H200 makes them.

The ISA leaves their order open. Recordings (``tests/data/h200_wgmma.npz``) agree bit for bit with this: the products of
one instruction and the old accumulator are exact, are cut off below 2^-F of the largest of their exponents (that of a
product is the sum of its factors', whether it carries or not), and are added up exactly; the sum is cut off to the bits
of an f32, or rounded to the nearest f16. F is 25; for the 8-bit floats it is 13, and an f32 of theirs keeps 13 bits of
mantissa. Integers are exact, and wrap around or saturate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_LEAST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "f32": -126}
"""Exponent of the smallest normal number, which is that of the subnormal ones too."""
_ZERO = -2000
"""The exponent of zero."""
_NARROW = ("e4m3", "e5m2")
_CALM = 50
"""Exponents within which f32 holds all products scaled."""
_ELEMENTS_AT_ONCE = 1 << 15
"""Elements of D that are worked on at a time: what stays in a core's second-level cache."""
_CUT = np.uint32(~0x3FF & 0xFFFFFFFF)


def multiply(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, types: tuple[str, str, str], saturate: bool = False
) -> np.ndarray:
    """A B^T + C for A (w, 64, K), B (w, N, K) f32 and C (w, 64, N) or None; ``types`` are those of A, B and D.

    Returns (w, 64, N) of the type of D: f32, f16 or s32.
    """
    w, rows, _ = a.shape
    at_once = max(1, _ELEMENTS_AT_ONCE // (rows * b.shape[1]))
    parts = [slice(k, k + at_once) for k in range(0, w, at_once)]
    one: Callable[..., np.ndarray] = _integers if types[2] == "s32" else _floats
    done = [one(a[p], b[p], None if c is None else c[p], types, saturate) for p in parts]
    return done[0] if len(done) == 1 else np.concatenate(done)


def _integers(a, b, c, types, saturate: bool) -> np.ndarray:
    total = np.matmul(a, b.swapaxes(1, 2)).astype("i8")
    if c is not None:
        total += c
    info = np.iinfo("i4")
    return (total.clip(info.min, info.max) if saturate else total).astype("i4")


def _floats(a, b, c, types, saturate: bool) -> np.ndarray:
    narrow = types[0] in _NARROW
    bits = 13 if narrow else 25
    ea, eb = _exponents(a, types[0]), _exponents(b, types[1])
    special = not (np.isfinite(a).all() and np.isfinite(b).all() and (c is None or np.isfinite(c).all()))
    plain = _plain(a, b, c) if special else None
    if special:
        a, b = np.nan_to_num(a, nan=0, posinf=0, neginf=0), np.nan_to_num(b, nan=0, posinf=0, neginf=0)
        c = None if c is None else np.nan_to_num(c, nan=0, posinf=0, neginf=0)
    top = _largest(ea, eb)
    if c is not None:
        c = c.astype("f4", copy=False)
        np.maximum(top, _exponents(c, types[2]), out=top)
    total = _aligned(a, b, top, bits, _calm(ea) and _calm(eb))
    top = np.maximum(top, -1000).astype("i4")
    if c is not None:
        total = total + np.trunc(np.ldexp(c.astype("f8"), bits - top))
    exact = np.ldexp(total.astype("f8", copy=False), top - bits)
    if special:
        exact = np.where(np.isfinite(plain), exact, plain)
    if types[2] == "f16":
        return exact.astype("f2")
    out = _toward_zero(exact)
    return (out.view("u4") & _CUT).view("f4") if narrow and not special else out


def _plain(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """The sums in f64: infinite or NaN where an operand is."""
    product = np.matmul(a.astype("f8"), b.astype("f8").swapaxes(1, 2))
    return product if c is None else product + c


def _exponents(x: np.ndarray, t: str) -> np.ndarray:
    """i16 exponents of f32 or f16 numbers of type ``t``."""
    x = np.ascontiguousarray(x, "f4")
    e = (x.view("u4") >> np.uint32(23) & np.uint32(255)).astype("i2") - np.int16(127)
    np.maximum(e, np.int16(_LEAST[t]), out=e)
    e[x == 0] = _ZERO
    return e


def _calm(e: np.ndarray) -> bool:
    """Whether all numbers with these exponents are zero or far from the ends of f32."""
    return bool((e <= _CALM).all() and ((e >= -_CALM) | (e == _ZERO)).all())


def _largest(ea: np.ndarray, eb: np.ndarray) -> np.ndarray:
    """(w, 64, N): the largest exponent of the products of each element of D."""
    left, right = np.ascontiguousarray(ea.transpose(2, 0, 1))[..., None], ea_last(eb)
    top = left[0] + right[0]
    one = np.empty_like(top)
    for x, y in zip(left[1:], right[1:]):
        np.add(x, y, out=one)
        np.maximum(top, one, out=top)
    return top


def ea_last(e: np.ndarray) -> np.ndarray:
    """(K, w, 1, N) of (w, N, K)."""
    return np.ascontiguousarray(e.transpose(2, 0, 1))[:, :, None]


def _aligned(a: np.ndarray, b: np.ndarray, top: np.ndarray, bits: int, calm: bool) -> np.ndarray:
    """The sum of the products in units of 2^(top - bits), each cut off towards zero."""
    t = np.dtype("f4" if calm else "f8")
    left, right = np.ascontiguousarray(a.transpose(2, 0, 1), t)[..., None], ea_last(b.astype(t, copy=False))
    if calm:
        # 2^(bits - top), from its bits; what it is where all products are zero does not matter
        scale = ((np.int32(bits + 127) - top).clip(1, 254) << 23).astype("u4").view("f4")
    else:
        scale = np.ldexp(np.ones(1), bits - np.maximum(top, -1000).astype("i4"))
    total = np.zeros(top.shape, "i4" if calm else "i8")
    one, whole = np.empty(top.shape, t), np.empty_like(total)
    for x, y in zip(left, right):
        np.multiply(x, y, out=one)
        np.multiply(one, scale, out=one)
        np.copyto(whole, one, casting="unsafe")
        np.add(total, whole, out=total)
    return total


def _toward_zero(x: np.ndarray) -> np.ndarray:
    """f64 to f32, cut off; beyond the largest number it is infinity."""
    out = x.astype("f4")
    over = np.abs(out) > np.abs(x)
    out.view("u4")[...] -= over & (np.isfinite(out) | (np.abs(x) < 2.0**128))
    return out

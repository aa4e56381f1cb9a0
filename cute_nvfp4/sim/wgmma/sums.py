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
_NARROW_RESULT = np.uint32(~0x3FF & 0xFFFFFFFF)
"""The bits of an f32 that sums of 8-bit floats have."""
_HIGH = np.uint64(~0x1FFFFFFF & (1 << 64) - 1)
"""The bits of an f64 that an f32 has too."""
_MANY = np.int16(9999)


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
    c = None if c is None else c.astype("f4", copy=False)
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (c is None or np.isfinite(c).all())):
        return _with_infinities(a, b, c, types)
    narrow = types[0] in _NARROW
    bits = 13 if narrow else 25
    ea, eb = _exponents(a, types[0]), _exponents(b, types[1])
    calm = _calm(ea) and _calm(eb)
    exact = _direct(a, b, c, ea, eb, types[2]) if calm and not narrow else _cut(a, b, c, ea, eb, types[2], bits, calm)
    if types[2] == "f16":
        return exact.astype("f2")
    out = _toward_zero(exact, calm)
    return (out.view("u4") & _NARROW_RESULT).view("f4") if narrow else out


def _with_infinities(a, b, c, types) -> np.ndarray:
    """Elements of D that have an infinite or NaN operand are what f64 makes of them; the others are not touched."""
    plain = np.matmul(a.astype("f8"), b.astype("f8").swapaxes(1, 2))
    plain = plain if c is None else plain + c
    a, b, c = (x if x is None else np.where(np.isfinite(x), x, np.float32(0)) for x in (a, b, c))
    finite = _floats(a, b, c, types, False)
    return np.where(np.isfinite(plain), finite, plain.astype(finite.dtype))


def _exponents(x: np.ndarray, t: str) -> np.ndarray:
    """i16 exponents of f32 numbers of type ``t``."""
    e = (x.view("u4") >> np.uint32(23) & np.uint32(255)).astype("i2") - np.int16(127)
    np.maximum(e, np.int16(_LEAST[t]), out=e)
    e[x == 0] = _ZERO
    return e


def _calm(e: np.ndarray) -> bool:
    """Whether all numbers with these exponents are zero or far from the ends of f32."""
    return bool((e <= _CALM).all() and ((e >= -_CALM) | (e == _ZERO)).all())


def _direct(a, b, c, ea, eb, t: str) -> np.ndarray:
    """The sums as f64 has them, where nothing is cut off; the others as ``_cut`` does.

    A product is a multiple of the last bits of its factors, and no exponent is larger than that of the largest factors
    of the row and the column. So nothing is lost where these lie 25 bits apart at most, C is not larger, and C has no
    bit below either.
    """
    top_a, top_b = ea.max(axis=2), eb.max(axis=2)
    last_a, last_b = _last(a, ea), _last(b, eb)
    near = (top_a - last_a)[:, :, None] + (top_b - last_b)[:, None] <= 25
    exact = np.matmul(a.astype("f8"), b.astype("f8").swapaxes(1, 2))
    if c is not None:
        exact += c
        near &= np.abs(c) * _power(-last_a)[:, :, None] * _power(-last_b)[:, None] < np.float32(2.0**26)
        units = c * _power(25 - top_a)[:, :, None] * _power(-top_b)[:, None]
        near &= units == np.trunc(units)
        # Numbers that small would leave no trace in ``units``.
        near &= (np.abs(c) >= np.float32(2.0**-_CALM)) | (c == 0)
    if near.all():
        return exact
    far = ~near
    if 8 * np.count_nonzero(far) > far.size:
        return _cut(a, b, c, ea, eb, t, 25, True)
    w, m, n = np.nonzero(far)
    one = None if c is None else c[far][:, None, None]
    exact[far] = _cut(a[w, m, None], b[w, n, None], one, ea[w, m, None], eb[w, n, None], t, 25, True).ravel()
    return exact


def _last(x: np.ndarray, e: np.ndarray) -> np.ndarray:
    """(w, rows) the exponent of the lowest bit that is set in any number of a row (w, rows, K); that of a row of zeros
    is that of zero."""
    mantissa = x.view("u4") & np.uint32(0x7FFFFF) | np.uint32(1 << 23)
    low = mantissa & (~mantissa + np.uint32(1))
    places = (low.astype("f4").view("u4") >> np.uint32(23)).astype("i2") - np.int16(127 + 23)
    some = (e + places).min(axis=2, initial=_MANY, where=e != _ZERO)
    return np.where(some == _MANY, _ZERO, some).astype("i2")


def _power(e: np.ndarray) -> np.ndarray:
    """2^e in f32, for e in its range; what is out of it is of rows without any number."""
    return ((e.astype("i4") + 127).clip(1, 254) << 23).view("f4")


def _wide_power(e: np.ndarray) -> np.ndarray:
    """2^e in f64."""
    return ((e.astype("i8") + 1023) << 52).view("f8")


def _cut(a, b, c, ea, eb, t: str, bits: int, calm: bool) -> np.ndarray:
    """The sums in f64, each term cut off ``bits`` bits below the largest exponent."""
    top = _largest(ea, eb)
    if c is not None:
        np.maximum(top, _exponents(c, t), out=top)
    total = _aligned(a, b, top, bits, calm)
    top = np.maximum(top, np.int16(-900))
    exact = total.astype("f8")
    if c is not None:
        exact += np.trunc(c * _wide_power(bits - top))
    exact *= _wide_power(top - bits)
    return exact


def _k_first(x: np.ndarray) -> np.ndarray:
    """(K, w, rows) of (w, rows, K)."""
    return np.ascontiguousarray(x.transpose(2, 0, 1))


def _largest(ea: np.ndarray, eb: np.ndarray) -> np.ndarray:
    """(w, 64, N): the largest exponent of the products of each element of D."""
    left, right = _k_first(ea)[..., None], _k_first(eb)[:, :, None]
    top = left[0] + right[0]
    one = np.empty_like(top)
    for x, y in zip(left[1:], right[1:]):
        np.add(x, y, out=one)
        np.maximum(top, one, out=top)
    return top


def _aligned(a: np.ndarray, b: np.ndarray, top: np.ndarray, bits: int, calm: bool) -> np.ndarray:
    """The sum of the products in units of 2^(top - bits), each cut off towards zero."""
    t = np.dtype("f4" if calm else "f8")
    left, right = _k_first(a.astype(t, copy=False))[..., None], _k_first(b.astype(t, copy=False))[:, :, None]
    scale = _power(bits - top) if calm else _wide_power(bits - np.maximum(top, np.int16(-900)))
    total = np.zeros(top.shape, "i4" if calm else "i8")
    one, whole = np.empty(top.shape, t), np.empty_like(total)
    for x, y in zip(left, right):
        np.multiply(x, y, out=one)
        np.multiply(one, scale, out=one)
        np.copyto(whole, one, casting="unsafe")
        np.add(total, whole, out=total)
    return total


def _toward_zero(x: np.ndarray, calm: bool) -> np.ndarray:
    """f64 to f32, cut off; beyond the largest number it is infinity. Calm factors make no subnormal sums."""
    if calm:
        return (x.view("u8") & _HIGH).view("f8").astype("f4")
    out = x.astype("f4")
    over = (np.abs(out) > np.abs(x)) & (np.abs(x) < 2.0**128)
    out.view("u4")[...] -= over
    return out

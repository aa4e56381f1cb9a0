"""The sums of wgmma, as an H200 computes them.

The PTX ISA leaves their order open. The following rule agrees bit for bit with recordings
(``tests/data/h200_wgmma.npz``, ``tests/simulator/test_wgmma_subnormal.py``). The products of one instruction and the
old accumulator are the exact terms of a sum. The exponent of a product is the sum of its factors' exponents, without a
carry. Each term is truncated F bits below the largest exponent of all terms, and the truncated terms are added exactly.
The sum is truncated to f32 or rounded to the nearest f16; a zero is positive. F is 25. For the 8-bit floating-point
types, F is 13 and an f32 result keeps 13 bits of mantissa. Integer results are exact, and wrap around or saturate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_LEAST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "f32": -126}
"""Exponent of the smallest normal number of each type, which subnormal numbers have too."""
_LEAST_F16 = np.float32(2.0 ** _LEAST["f16"])
_ZERO = -2000
"""The exponent that stands for zero."""
_NARROW = ("e4m3", "e5m2")
_CALM = 50
"""Greatest absolute exponent of factors whose scaled products all fit f32."""
_ELEMENTS_AT_ONCE = 1 << 15
"""Number of elements of D in one batch, which fits the second-level cache of a core."""
_NARROW_RESULT = np.uint32(~0x3FF & 0xFFFFFFFF)
"""Mask of the f32 bits that a sum of 8-bit floats keeps."""
_HIGH = np.uint64(~0x1FFFFFFF & (1 << 64) - 1)
"""Mask of the f64 bits that f32 represents too."""
_MANY = np.int16(9999)  # more than every exponent


def multiply(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, types: tuple[str, str, str], saturate: bool = False
) -> np.ndarray:
    """Returns A B^T + C (w, 64, N) in the type of D: f32, f16 or s32.

    ``a`` (w, 64, K) and ``b`` (w, N, K) are f32, and ``c`` is (w, 64, N) or None. ``types`` are those of A, B and D.
    ``saturate`` is for integers.
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
        rounded = exact.astype("f2")
        rounded.view("u2")[rounded.view("u2") == 0x8000] = 0
        return rounded
    out = _toward_zero(exact, calm)
    return (out.view("u4") & _NARROW_RESULT).view("f4") if narrow else out


def _with_infinities(a, b, c, types) -> np.ndarray:
    """Returns ``_floats`` with infinite or NaN operands; elements of D that depend on one are computed in f64."""
    plain = np.matmul(a.astype("f8"), b.astype("f8").swapaxes(1, 2))
    plain = plain if c is None else plain + c
    a, b, c = (x if x is None else np.where(np.isfinite(x), x, np.float32(0)) for x in (a, b, c))
    finite = _floats(a, b, c, types, False)
    return np.where(np.isfinite(plain), finite, plain.astype(finite.dtype))


def _exponents(x: np.ndarray, t: str) -> np.ndarray:
    """Returns the i16 exponents of f32 values of type ``t``."""
    e = (x.view("u4") >> np.uint32(23) & np.uint32(255)).astype("i2") - np.int16(127)
    np.maximum(e, np.int16(_LEAST[t]), out=e)
    e[x == 0] = _ZERO
    return e


def _calm(e: np.ndarray) -> bool:
    """Returns whether all values with these exponents are zero or far from the limits of f32."""
    return bool((e <= _CALM).all() and ((e >= -_CALM) | (e == _ZERO)).all())


def _direct(a, b, c, ea, eb, t: str) -> np.ndarray:
    """Returns the sums in f64: by one matrix product where no term is truncated, and by ``_cut`` elsewhere.

    Every product of an element of D is a multiple of 2^(last_a + last_b), and no product has an exponent above
    top_a + top_b. No term is truncated if these exponents are at most 25 apart, the magnitude of C is below
    2^(last_a + last_b + 26), and C is a multiple of 2^(top_a + top_b - 25). A subnormal C counts as the smallest normal
    number, whose exponent it has.
    """
    top_a, top_b = ea.max(axis=2), eb.max(axis=2)
    last_a, last_b = _last(a, ea), _last(b, eb)
    near = (top_a - last_a)[:, :, None] + (top_b - last_b)[:, None] <= 25
    exact = np.matmul(a.astype("f8"), b.astype("f8").swapaxes(1, 2))
    if c is not None:
        exact += c
        size = np.abs(c)
        if t == "f16":
            size[(size != 0) & (size < _LEAST_F16)] = _LEAST_F16
        near &= size * _power(-last_a)[:, :, None] * _power(-last_b)[:, None] < np.float32(2.0**26)
        units = c * _power(25 - top_a)[:, :, None] * _power(-top_b)[:, None]
        near &= units == np.trunc(units)
        # ``units`` may underflow to zero for a smaller C.
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
    """Returns the exponent (w, rows) of the lowest bit that is set in any value of a row of ``x`` (w, rows, K), or
    ``_ZERO`` for a row of zeros. ``e`` holds the exponents of the values."""
    bits = x.view("u4")
    mantissa = bits & np.uint32(0x7FFFFF) | np.uint32(1 << 23)
    low = mantissa & (~mantissa + np.uint32(1))
    # The exponents in the bits, not ``e``: those of subnormal f16 are below the least of the type.
    biased = (bits >> np.uint32(23) & np.uint32(255)) + (low.astype("f4").view("u4") >> np.uint32(23))
    some = biased.astype("i2").min(axis=2, initial=_MANY, where=e != _ZERO)
    return np.where(some == _MANY, _ZERO, some - np.int16(127 + 127 + 23)).astype("i2")


def _power(e: np.ndarray) -> np.ndarray:
    """Returns 2^e in f32. ``e`` is clipped to the range of f32, which only the exponents of rows of zeros leave."""
    return ((e.astype("i4") + 127).clip(1, 254) << 23).view("f4")


def _wide_power(e: np.ndarray) -> np.ndarray:
    """Returns 2^e in f64."""
    return ((e.astype("i8") + 1023) << 52).view("f8")


def _cut(a, b, c, ea, eb, t: str, bits: int, calm: bool) -> np.ndarray:
    """Returns the sums in f64, each term truncated ``bits`` bits below the largest exponent."""
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
    return np.ascontiguousarray(x.transpose(2, 0, 1))


def _largest(ea: np.ndarray, eb: np.ndarray) -> np.ndarray:
    """Returns the largest exponent (w, 64, N) of the products of each element of D."""
    left, right = _k_first(ea)[..., None], _k_first(eb)[:, :, None]
    top = left[0] + right[0]
    one = np.empty_like(top)
    for x, y in zip(left[1:], right[1:]):
        np.add(x, y, out=one)
        np.maximum(top, one, out=top)
    return top


def _aligned(a: np.ndarray, b: np.ndarray, top: np.ndarray, bits: int, calm: bool) -> np.ndarray:
    """Returns the sums of the products in units of 2^(top - bits); each product is truncated to a whole unit."""
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
    """Returns f64 values truncated to f32; magnitudes of 2^128 and more become infinity, and zeros positive. With
    ``calm``, no value is subnormal in f32, or -0."""
    if calm:
        return (x.view("u8") & _HIGH).view("f8").astype("f4")
    out = x.astype("f4")
    over = (np.abs(out) > np.abs(x)) & (np.abs(x) < 2.0**128)
    out.view("u4")[...] -= over
    return out + np.float32(0)

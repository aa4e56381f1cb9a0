"""Integer arithmetic with the PTX ISA's corner cases: wrap-around, high halves, truncating division, saturation."""

from __future__ import annotations

import numpy as np


def mul_hi(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the high half of the full product."""
    size, kind = a.dtype.itemsize, a.dtype.kind
    if size < 8:
        wide = np.dtype(f"{kind}{2 * size}")
        return (a.astype(wide) * b.astype(wide) >> (8 * size)).astype(a.dtype)
    ua, ub = a.view("u8"), b.view("u8")
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    al, ah, bl, bh = ua & low, ua >> half, ub & low, ub >> half
    carry = (al * bl >> half) + (ah * bl & low) + (al * bh & low)
    high = ah * bh + (ah * bl >> half) + (al * bh >> half) + (carry >> half)
    if kind == "i":
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return high.view(a.dtype)


def mul_wide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the full product, which is twice as wide as the factors."""
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(wide) * b.astype(wide)


def _magnitude(a: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return np.where(a < 0, np.negative(a), a).view(unsigned) if a.dtype.kind == "i" else a


def div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the quotient rounded toward zero. Division by zero gives all ones; the PTX ISA leaves it open."""
    ua, ub = _magnitude(a), _magnitude(b)
    q = ua // np.where(ub == 0, ub.dtype.type(1), ub)
    if a.dtype.kind == "i":
        q = np.where((a < 0) != (b < 0), np.negative(q), q)
    return np.where(b == 0, ~np.zeros_like(q), q).view(a.dtype)


def rem(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the remainder with the sign of the dividend. Division by zero gives the dividend."""
    ua, ub = _magnitude(a), _magnitude(b)
    r = ua % np.where(ub == 0, ub.dtype.type(1), ub)
    if a.dtype.kind == "i":
        r = np.where(a < 0, np.negative(r), r)
    return np.where(b == 0, a.view(r.dtype), r).view(a.dtype)


def saturated(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Clamps a wider integer to the range of ``dtype``."""
    info = np.iinfo(dtype)
    return np.clip(a, info.min, info.max).astype(dtype)


def shl(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Returns ``a`` shifted left by ``n`` bits; amounts of the width or more give zero."""
    width = a.dtype.itemsize * 8
    shifted = a << (n & np.uint32(width - 1)).astype(a.dtype)
    return shifted if n.size == 1 and n.item() < width else np.where(n < width, shifted, a.dtype.type(0))


def shr(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Returns ``a`` shifted right by ``n`` bits, arithmetically for signed ``a``. Amounts of the width or more give the
    fill: zero, or copies of the sign bit."""
    width = a.dtype.itemsize * 8
    if a.dtype.kind == "i":
        return a >> np.minimum(n, np.uint32(width - 1)).astype(a.dtype)
    shifted = a >> (n & np.uint32(width - 1)).astype(a.dtype)
    return shifted if n.size == 1 and n.item() < width else np.where(n < width, shifted, a.dtype.type(0))


def funnel(a: np.ndarray, b: np.ndarray, n: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """Returns the result of ``shf``: the high half (``left``) or the low half of the shifted 64-bit value of ``b``
    (high) and ``a`` (low). The amount ``n`` is taken modulo 32 with ``wrap``, and clamped to 32 without."""
    n = (n & np.uint32(31) if wrap else np.minimum(n, np.uint32(32))).astype("u8")
    both = b.astype("u8") << np.uint64(32) | a
    return ((both << n) >> np.uint64(32) if left else both >> n).astype("u4")


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Returns the bitwise function of three inputs whose result is bit 4a + 2b + c of ``table``."""
    out = np.zeros((1, 1), a.dtype)
    for k in range(8):
        if table >> k & 1:
            out = out | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
    return out


def popc(a: np.ndarray) -> np.ndarray:
    """Returns the number of one bits."""
    x = a.astype("u8")
    x = x - (x >> np.uint64(1) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + (x >> np.uint64(2) & np.uint64(0x3333333333333333))
    x = x + (x >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (x * np.uint64(0x0101010101010101) >> np.uint64(56)).astype("u4")


def clz(a: np.ndarray) -> np.ndarray:
    """Returns the number of leading zero bits."""
    x, width = a, a.dtype.itemsize * 8
    for s in (1, 2, 4, 8, 16, 32):
        if s < width:
            x = x | x >> a.dtype.type(s)
    return (width - popc(x)).astype("u4")


def brev(a: np.ndarray) -> np.ndarray:
    """Returns the bits in reverse order."""
    t, width = a.dtype.type, a.dtype.itemsize * 8
    masks = {1: 0x5555555555555555, 2: 0x3333333333333333, 4: 0x0F0F0F0F0F0F0F0F}
    for s, m in masks.items():
        m = t(m & ((1 << width) - 1))
        a = (a >> t(s) & m) | (a & m) << t(s)
    return a.byteswap()


def bfe(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Returns a bit field of ``a`` (PTX ISA, "bfe"); a signed field repeats its sign bit past the top of ``a``."""
    width, unsigned = a.dtype.itemsize * 8, np.dtype(f"u{a.dtype.itemsize}")
    pos, size = (start & np.uint32(255)).astype("i8"), (length & np.uint32(255)).astype("i8")
    u = a.view(unsigned)
    field = shr(u, pos.astype("u4")) & ones(size, unsigned)
    if a.dtype.kind == "u":
        return field
    top = np.minimum(pos + size - 1, width - 1)
    sign = (shr(u, np.maximum(top, 0).astype("u4")) & unsigned.type(1)).astype(bool) & (size > 0)
    got = np.clip(width - pos, 0, size)
    return (field | np.where(sign, ~ones(got, unsigned), unsigned.type(0))).view(a.dtype)


def bfi(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Returns ``b`` with the low ``length`` bits of ``a`` inserted at bit ``start``."""
    pos, size = start & np.uint32(255), (length & np.uint32(255)).astype("i8")
    mask = shl(ones(size, a.dtype), pos)
    return (b & ~mask) | (shl(a, pos) & mask)


def ones(count: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns masks of ``count`` low one bits; counts of the width or more give all ones."""
    dtype = np.dtype(dtype)
    return np.where(
        count >= dtype.itemsize * 8, ~dtype.type(0), shl(np.ones_like(count, dtype), count.astype("u4")) - dtype.type(1)
    )


def prmt(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """Returns four bytes of ``b`` (high) and ``a`` (low), chosen by the nibbles of ``c``, or by ``c`` and a named
    ``mode`` (PTX ISA, "prmt")."""
    both = b.astype("u8") << np.uint64(32) | a
    out = np.zeros(np.broadcast_shapes(both.shape, c.shape), "u4")
    for i in range(4):
        if mode:
            byte = both >> (np.uint64(8) * _PRMT[mode](i, (c & np.uint32(3)).astype("i8")).astype("u8")) & np.uint64(
                255
            )
        else:
            nibble = c >> np.uint32(4 * i)
            byte = both >> ((nibble & np.uint32(7)) << np.uint32(3)).astype("u8") & np.uint64(255)
            byte = np.where(nibble & np.uint32(8), np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)), byte)
        out |= byte.astype("u4") << np.uint32(8 * i)
    return out


_PRMT = {
    "f4e": lambda i, s: s + i,
    "b4e": lambda i, s: (s - i) % 8,
    "rc8": lambda i, s: s,
    "ecl": lambda i, s: np.maximum(s, i),
    "ecr": lambda i, s: np.minimum(s, i),
    "rc16": lambda i, s: (s & 1) * 2 + i % 2,
}


def dot_bytes(a: np.ndarray, b: np.ndarray, c: np.ndarray, a_signed: bool, b_signed: bool) -> np.ndarray:
    """Returns the result of ``dp4a``: the sum of four products of bytes plus ``c``, which wraps around in 32 bits."""
    total = c.view("u4")
    for i in range(4):
        x, y = _byte(a, i, a_signed), _byte(b, i, b_signed)
        total = total + (x * y).view("u4")
    return total


def dot_halves(a: np.ndarray, b: np.ndarray, c: np.ndarray, a_signed: bool, b_signed: bool, high: bool) -> np.ndarray:
    """Returns the result of ``dp2a``: both 16-bit halves of ``a`` times the low or ``high`` two bytes of ``b``, plus
    ``c``, which wraps around in 32 bits."""
    total = c.view("u4")
    for i in range(2):
        half = (a >> np.uint32(16 * i)).astype("u2")
        x = half.view("i2").astype("i4") if a_signed else half.astype("i4")
        y = _byte(b, i + (2 if high else 0), b_signed)
        total = total + (x * y).view("u4")
    return total


def _byte(a: np.ndarray, i: int, signed: bool) -> np.ndarray:
    byte = (a >> np.uint32(8 * i)).astype("u1")
    return byte.view("i1").astype("i4") if signed else byte.astype("i4")

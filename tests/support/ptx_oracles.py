"""Oracles of the device helpers, in numpy and Python integers; they share nothing with the simulator."""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NAN_F16 = 0x7FFF  # the NaN of PTX arithmetic
_SCALE = 48  # f16 numbers are multiples of 2⁻²⁴, their products of 2⁻⁴⁸


def nibbles(words: np.ndarray) -> np.ndarray:
    """Splits (…) words of eight codes into (…, 8) codes, the low nibble first."""
    return (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)


def halves(words: np.ndarray) -> np.ndarray:
    """Splits (…) f16x2 words into (…, 2) halves as bits, the low half first."""
    return np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], -1)


def pack_halves(bits: np.ndarray) -> np.ndarray:
    """Packs (…, 2n) bits of halves into (…, n) words."""
    bits = bits.astype(np.uint32)
    return bits[..., 0::2] | bits[..., 1::2] << np.uint32(16)


def pack_bytes(values: np.ndarray) -> np.ndarray:
    """Packs (…, 4n) bytes (signed or not) into (…, n) words, the first in the low byte."""
    return np.ascontiguousarray(values.astype(np.uint8)).view("<u4")


def e4m3_value(code: int) -> float:
    """The value of the E4M3 code ``code``, by definition: sign, four bits of exponent (bias 7), three of mantissa."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def f16_bits(values: np.ndarray) -> np.ndarray:
    """The bits of values that f16 holds exactly; NaN becomes the NaN of PTX."""
    with np.errstate(over="raise"):
        half = np.asarray(values, np.float64).astype(np.float16)
    assert np.array_equal(half.astype(np.float64), values, equal_nan=True)
    return np.where(np.isnan(half), NAN_F16, half.view(np.uint16)).astype(np.uint32)


def _integer(bits: int) -> int:
    """A finite f16 in units of 2⁻²⁴."""
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    magnitude = mantissa if exponent == 0 else (1024 + mantissa) << (exponent - 1)
    return -magnitude if bits & 0x8000 else magnitude


def _is_nan(bits: int) -> bool:
    return bits & 0x7FFF > 0x7C00


def _is_inf(bits: int) -> bool:
    return bits & 0x7FFF == 0x7C00


def _round(total: int) -> int:
    """The bits of ``total`` · 2⁻⁴⁸ (not zero) rounded to f16, to nearest, ties to even."""
    sign, magnitude = (0x8000, -total) if total < 0 else (0, total)
    # eleven bits, or the last place of the subnormals, 2⁻²⁴
    shift = max(magnitude.bit_length() - 11, _SCALE - 24)
    kept, rest = magnitude >> shift, magnitude & ((1 << shift) - 1)
    half = 1 << (shift - 1)
    kept += rest > half or (rest == half and kept & 1 == 1)
    if kept == 2048:
        kept, shift = 1024, shift + 1
    exponent = shift - (_SCALE - 24)
    if kept < 1024:
        return sign | kept  # subnormal: exponent is 0
    return sign | (0x7C00 if exponent + 1 >= 31 else (exponent + 1) << 10 | kept & 1023)


def fma_f16(a: int, b: int, c: int) -> int:
    """The bits of a · b + c, rounded once."""
    if _is_nan(a) or _is_nan(b) or _is_nan(c):
        return NAN_F16
    product_sign = (a ^ b) & 0x8000
    if _is_inf(a) or _is_inf(b):
        if a & 0x7FFF == 0 or b & 0x7FFF == 0 or (_is_inf(c) and c & 0x8000 != product_sign):
            return NAN_F16
        return product_sign | 0x7C00
    if _is_inf(c):
        return c
    product = _integer(a) * _integer(b)
    total = product + (_integer(c) << 24)
    if total == 0:
        # zeros of equal sign keep it; otherwise zero is positive
        both_zero = product == 0 and c & 0x7FFF == 0
        return 0x8000 if both_zero and product_sign and c & 0x8000 else 0
    return _round(total)


def mul_f16(a: int, b: int) -> int:
    """The bits of a · b, rounded once."""
    # adding a zero of the product's sign changes nothing
    return fma_f16(a, b, (a ^ b) & 0x8000)


def fma_f16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``fma_f16`` for both halves of f16x2 words."""
    triples = zip(*(halves(x).ravel().tolist() for x in (a, b, c)))
    return pack_halves(np.array([fma_f16(*t) for t in triples]).reshape(*a.shape, 2))[..., 0]


def mul_f16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``mul_f16`` for both halves of f16x2 words."""
    pairs = zip(*(halves(x).ravel().tolist() for x in (a, b)))
    return pack_halves(np.array([mul_f16(*t) for t in pairs]).reshape(*a.shape, 2))[..., 0]


def e2m1_pairs(words: np.ndarray) -> np.ndarray:
    """Decodes (…) words of eight E2M1 codes to (…, 4) f16x2."""
    return pack_halves(f16_bits(E2M1[nibbles(words)]))


def fused(acc: np.ndarray, codes: np.ndarray, b: np.ndarray) -> np.ndarray:
    """acc + Σ decode(codes) · b by pairs, one rounding a term: codes (n, words), b (n, 4 · words) f16x2."""
    pairs = e2m1_pairs(codes).reshape(len(acc), -1)
    for i in range(pairs.shape[1]):
        acc = fma_f16x2(pairs[:, i], b[:, i], acc)
    return acc


def mma_f16(words: np.ndarray) -> np.ndarray:
    """Maps (warps, 32, 7) registers a[2], b, c[4] to (warps, 32, 4): the fragments of m16n8k8, for exact sums."""
    warps = len(words)
    halves = np.ascontiguousarray(words[..., :3]).view(np.float16).reshape(warps, 8, 4, 3, 2).astype(np.float64)
    a = np.concatenate([halves[:, :, :, i].reshape(warps, 8, 8) for i in (0, 1)], 1)
    b = halves[:, :, :, 2].reshape(warps, 8, 8).transpose(0, 2, 1)
    c = np.ascontiguousarray(words[..., 3:]).view(np.float32).reshape(warps, 8, 4, 2, 2).astype(np.float64)
    d = a @ b + c.transpose(0, 3, 1, 2, 4).reshape(warps, 16, 8)
    out = d.reshape(warps, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(warps, 32, 4)
    return np.ascontiguousarray(out.astype(np.float32)).view(np.uint32)


def mma_s8(words: np.ndarray) -> np.ndarray:
    """Maps (warps, 32, 10) registers a[4], b[2], c[4] to (warps, 32, 4): the fragments of m16n8k32."""
    warps = len(words)
    group, quad = np.arange(32) // 4, np.arange(32) % 4
    quads = np.ascontiguousarray(words).view(np.int8).reshape(warps, 32, 10, 4).astype(np.int64)
    a, b = np.zeros((warps, 16, 32), np.int64), np.zeros((warps, 32, 8), np.int64)
    c = np.zeros((warps, 16, 8), np.int64)
    for lane in range(32):
        g, q = group[lane], 4 * quad[lane]
        for i, (row, column) in enumerate(((g, q), (g + 8, q), (g, q + 16), (g + 8, q + 16))):
            a[:, row, column : column + 4] = quads[:, lane, i]
        for i, row in enumerate((q, q + 16)):
            b[:, row : row + 4, g] = quads[:, lane, 4 + i]
        for i in range(4):
            c[:, g + 8 * (i // 2), 2 * quad[lane] + i % 2] = words[:, lane, 6 + i].astype(np.int32)
    d = (a @ b + c).astype(np.int64).astype(np.uint32)
    out = np.zeros((warps, 32, 4), np.uint32)
    for lane in range(32):
        for i in range(4):
            out[:, lane, i] = d[:, group[lane] + 8 * (i // 2), 2 * quad[lane] + i % 2]
    return out


def sum_lanes(bits: np.ndarray, width: int) -> np.ndarray:
    """The bits of the sums over groups of ``width`` lanes of (32 · n) fp32, added pairwise: neighbours first."""
    value, lane = bits.view(np.float32), np.arange(len(bits))
    distance = 1
    while distance < width:
        value = value + value[lane ^ distance]
        distance *= 2
    return value.view(np.uint32)


def prmt(a: int, b: int, c: int, mode: str) -> int:
    """``prmt.b32``: the nibbles of c, or a mode, choose bytes of {b, a}."""
    source = [(b << 32 | a) >> 8 * i & 0xFF for i in range(8)]
    n = c & 3
    if mode == "":
        chosen = [c >> 4 * i & 15 for i in range(4)]
        return sum(
            ((0xFF if source[s & 7] & 0x80 else 0) if s & 8 else source[s & 7]) << 8 * i for i, s in enumerate(chosen)
        )
    picks = {
        ".f4e": [n + i for i in range(4)],
        ".b4e": [(n - i) % 8 for i in range(4)],
        ".rc8": [n] * 4,
        ".ecl": [max(i, n) for i in range(4)],
        ".ecr": [min(i, n) for i in range(4)],
        ".rc16": [2 * (n & 1) + i % 2 for i in range(4)],
    }[mode]
    return sum(source[s] << 8 * i for i, s in enumerate(picks))


def shuffle(value: np.ndarray, by: np.ndarray, bounds: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """``shfl.sync`` of one warp: (values, whether the source was in range)."""
    lane = np.arange(32)
    clamp, segment = bounds & 31, bounds >> 8 & 31
    limit = lane & segment | clamp & ~segment
    by = by & 31
    if mode == "up":
        source = lane - by.astype(np.int64)
        inside = source >= limit
    elif mode == "down":
        source = lane + by.astype(np.int64)
        inside = source <= limit
    elif mode == "bfly":
        source = lane ^ by
        inside = source <= limit
    else:
        source = lane & segment | by & ~segment
        inside = source <= limit
    return value[np.where(inside, source, lane)], inside.astype(np.uint32)

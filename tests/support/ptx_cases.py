"""Inputs and expected outputs of every device helper, the same for the simulator and for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from support import ptx_oracles as oracle
from support.ptx_kernels import BLOCK, LANE_SUMS, PRMT_MODES, SHUFFLES

_FINITE_EDGES = [0x0000, 0x0001, 0x0002, 0x03FF, 0x0400, 0x0401, 0x3BFF, 0x3C00, 0x3C01, 0x7BFF, 0x6400, 0x1400, 0x0200]
_SPECIAL = [0x7C00, 0x7C01, 0x7E00, 0x7FFF, 0x7D55]
F16_EDGES = np.array([s | x for x in _FINITE_EDGES + _SPECIAL for s in (0, 0x8000)], np.uint32)


@dataclass(frozen=True)
class Case:
    """A case of a device helper. ``inputs()`` gives words (threads, ins) and memory or None; ``expected(words,
    memory)`` gives the right output."""

    body: str
    inputs: Callable[[], tuple[np.ndarray, np.ndarray | None]]
    expected: Callable[[np.ndarray, np.ndarray | None], np.ndarray]
    archs: tuple[str, ...] = ("sm_90a", "sm_100a")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _words(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.integers(0, 2**32, shape, dtype=np.uint32)


def _pad(words: np.ndarray) -> np.ndarray:
    """Repeats words up to a whole number of CTAs."""
    return np.resize(words, (-(-len(words) // BLOCK) * BLOCK, words.shape[1]))


def every_byte(ins: int = 1) -> np.ndarray:
    """Words (1024, ins) with every byte in every position of the first word, among random other bytes."""
    words = _words(rng(1), 1024, ins)
    position = np.repeat(np.arange(4, dtype=np.uint32), 256) * np.uint32(8)
    byte = np.tile(np.arange(256, dtype=np.uint32), 4)
    words[:, 0] = words[:, 0] & ~(np.uint32(255) << position) | byte << position
    return words


def f16_words(generator: np.random.Generator, *shape: int, finite: bool = False) -> np.ndarray:
    """f16x2 of every kind: random bits, and values of similar magnitudes."""
    bits = generator.integers(0, 2**16, (*shape, 2), dtype=np.uint32)
    near = generator.normal(0, 4, (*shape, 2)).astype(np.float16).view(np.uint16)
    tiny = generator.integers(0, 1 << 11, (*shape, 2), dtype=np.uint32)
    which = generator.integers(0, 3, (*shape, 2))
    bits = np.where(which == 0, bits, np.where(which == 1, near, tiny))
    if finite:
        bits = np.where(bits & 0x7C00 == 0x7C00, bits & 0x83FF, bits)
    return oracle.pack_halves(bits)[..., 0]


# --- decodes


def _apart_inputs() -> tuple[np.ndarray, None]:
    words = every_byte(3)
    words[:, 1:] = 0x03020100, 0x0C080604
    return words, None


def _apart(words: np.ndarray, _: object) -> np.ndarray:
    doubled = 2 * oracle.E2M1[oracle.nibbles(words[:, 0])]
    both = np.concatenate([np.maximum(doubled, 0), np.maximum(-doubled, 0)], 1)
    return np.tile(oracle.pack_bytes(both), (1, 2))


def _s8(words: np.ndarray, _: object) -> np.ndarray:
    return oracle.pack_bytes((2 * oracle.E2M1[oracle.nibbles(words[:, 0])]).astype(np.int8))


def _e4m3(words: np.ndarray, _: object) -> np.ndarray:
    table = oracle.f16_bits(np.array([oracle.e4m3_value(code) for code in range(256)]))
    codes = np.ascontiguousarray(words[:, :1]).view(np.uint8)
    return np.tile(oracle.pack_halves(table[codes]), (1, 2))


def _every_half() -> tuple[np.ndarray, None]:
    low = np.arange(1 << 16, dtype=np.uint32)
    return (low | rng(2).permutation(low) << np.uint32(16))[:, None], None


def _f32(words: np.ndarray, _: object) -> np.ndarray:
    half = oracle.halves(words[:, 0]).astype(np.uint16).view(np.float16)
    wide = half.astype(np.float32)
    return np.where(np.isnan(wide), np.uint32(0x7FFFFFFF), wide.view(np.uint32))


def _float_bits() -> tuple[np.ndarray, None]:
    edges = np.array([0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x4B400000])
    words = np.concatenate([edges, edges | 0x80000000, _words(rng(3), 1000)]).astype(np.uint32)
    return _pad(words[:, None]), None


# --- arithmetic


def _fma_inputs() -> tuple[np.ndarray, None]:
    """Every pair of edge cases with a random third operand, and random triples."""
    generator = rng(4)
    a, b = (x.ravel() for x in np.meshgrid(F16_EDGES, F16_EDGES))
    low = np.stack([a, b, generator.choice(F16_EDGES, len(a))], 1)
    pairs = low | generator.permutation(low) << np.uint32(16)
    generated = f16_words(generator, 6000, 3)
    # products that nearly cancel the addend, and sums that are ties
    generated[:2000, 2] = oracle.mul_f16x2(generated[:2000, 0], generated[:2000, 1]) ^ np.uint32(0x80008000)
    return _pad(np.concatenate([pairs, generated]).astype(np.uint32)), None


def _fma(words: np.ndarray, _: object) -> np.ndarray:
    a, b, c = words.T
    return np.stack([oracle.fma_f16x2(a, b, c), oracle.mul_f16x2(a, b)], 1)


def _fused_inputs(words: int) -> Callable:
    def inputs() -> tuple[np.ndarray, None]:
        generator = rng(5)
        codes = [every_byte()[:, 0]]
        codes += [_words(generator, 1024) for _ in range(words - 1)]
        if words == 2:  # every byte in every position of the second word, too
            codes = [np.concatenate(codes), np.concatenate(codes[::-1])]
        n = len(codes[0])
        acc = f16_words(generator, n, finite=True)
        b = f16_words(generator, n, 4 * words, finite=True)
        # half of the cases are as in the kernel: b of E2M1 values and an accumulator of zero, so that sums are exact
        acc[::2] = 0
        b[::2] = oracle.e2m1_pairs(_words(generator, len(b[::2]), words)).reshape(-1, 4 * words)
        return np.concatenate([acc[:, None], np.stack(codes, 1), b], 1), None

    return inputs


def _fused(words: int) -> Callable:
    def expected(given: np.ndarray, _: object) -> np.ndarray:
        acc, codes, b = given[:, 0], given[:, 1 : 1 + words], given[:, 1 + words :]
        out = oracle.fused(acc, codes, b)
        # check the exact half again by plain sums: even elements in the low half, odd ones in the high half
        values = oracle.E2M1[oracle.nibbles(codes[::2])].reshape(-1, 8 * words)
        other = oracle.halves(b[::2]).astype(np.uint16).view(np.float16).astype(np.float64).reshape(-1, 8 * words)
        sums = (values * other).reshape(len(values), -1, 2).sum(1)
        got = oracle.halves(out[::2]).astype(np.uint16).view(np.float16).astype(np.float64)
        assert np.array_equal(sums, got)
        return out[:, None]

    return expected


# --- memory


def _memory_inputs(num_bytes: int, predicated: bool) -> Callable:
    def inputs() -> tuple[np.ndarray, np.ndarray]:
        generator = rng(6)
        data = generator.integers(0, 256, 64 * num_bytes, dtype=np.uint8)
        offsets = np.concatenate([np.arange(64), generator.integers(0, 64, 64)]).astype(np.uint32) * num_bytes
        words = [offsets.astype(np.uint32)]
        if predicated:
            # any value but zero is true; all lanes of the second warp are off
            on = generator.choice(np.array([0, 1, 2, 0x80000000, 0xFFFFFFFF], np.uint32), BLOCK)
            on[32:64] = 0
            words.append(on)
        return np.stack(words, 1), data

    return inputs


def _at(words: np.ndarray, data: np.ndarray, num_bytes: int) -> np.ndarray:
    return data[words[:, :1] + np.arange(num_bytes)]


def _loaded(num_bytes: int, predicated: bool) -> Callable:
    def expected(words: np.ndarray, data: np.ndarray) -> np.ndarray:
        found = oracle.pack_bytes(_at(words, data, num_bytes))
        if predicated:
            found = np.where(words[:, 1:] != 0, found, np.uint32(0))
        return np.tile(found, (1, 8))

    return expected


def _byte(words: np.ndarray, data: np.ndarray) -> np.ndarray:
    return np.where(words[:, 1:] != 0, data[words[:, :1]], 0).astype(np.uint32)


def _shared(words: np.ndarray, _: object) -> np.ndarray:
    return np.tile(words, (1, 9))


def _copy_inputs(num_bytes: int) -> Callable:
    def inputs() -> tuple[np.ndarray, np.ndarray]:
        words, data = _memory_inputs(num_bytes, False)()
        valid = np.arange(BLOCK) % (num_bytes + 1)
        return np.stack([words[:, 0], valid.astype(np.uint32)], 1), data

    return inputs


def _copied(num_bytes: int) -> Callable:
    def expected(words: np.ndarray, data: np.ndarray) -> np.ndarray:
        whole = np.full((len(words), 16), 255, np.uint8)
        whole[:, :num_bytes] = _at(words, data, num_bytes)
        masked = whole.copy()
        masked[:, :num_bytes][np.arange(num_bytes) >= words[:, 1:]] = 0
        return oracle.pack_bytes(np.concatenate([whole, whole, masked, masked], 1))

    return expected


# --- warps


def _mma_inputs() -> tuple[np.ndarray, None]:
    words = _words(rng(7), 8 * BLOCK, 10)
    # extremes: every product and every sum as large as it gets
    words[:32, :6], words[:32, 6:] = 0x80808080, 0
    words[32:64, :4], words[32:64, 4:6], words[32:64, 6:] = 0x7F7F7F7F, 0x80808080, 5
    return words, None


def _mma(words: np.ndarray, _: object) -> np.ndarray:
    return oracle.mma_s8(words.reshape(-1, 32, 10)).reshape(-1, 4)


def _mma_f16_inputs() -> tuple[np.ndarray, None]:
    generator = rng(12)
    halves = (generator.integers(-60, 61, (8 * BLOCK, 6)) / 16).astype(np.float16).view(np.uint32)
    c = (generator.integers(-9999, 10000, (8 * BLOCK, 4)) / 256).astype(np.float32).view(np.uint32)
    return np.concatenate([halves, c], 1), None


def _mma_f16(words: np.ndarray, _: object) -> np.ndarray:
    return oracle.mma_f16(words.reshape(-1, 32, 7)).reshape(-1, 4)


def _sum_inputs() -> tuple[np.ndarray, None]:
    generator = rng(8)
    values = generator.standard_normal(8 * BLOCK) * 2.0 ** generator.integers(-20, 20, 8 * BLOCK)
    return values.astype(np.float32).view(np.uint32)[:, None], None


def _sums(words: np.ndarray, _: object) -> np.ndarray:
    return np.stack([oracle.sum_lanes(np.ascontiguousarray(words[:, 0]), width) for width in LANE_SUMS], 1)


def _prmt_inputs() -> tuple[np.ndarray, None]:
    words = _words(rng(9), 8 * BLOCK, 3)
    words[:256, 2] = np.arange(256) * 0x1111 & 0xFFFF
    return words, None


def _prmt(words: np.ndarray, _: object) -> np.ndarray:
    return np.array([[oracle.prmt(*w, mode) for mode in PRMT_MODES] for w in words.tolist()], np.uint32)


def _shuffle_inputs() -> tuple[np.ndarray, None]:
    generator = rng(10)
    words = _words(generator, 16 * BLOCK, 3)
    bounds = generator.integers(0, 32, (64, 2), dtype=np.uint32)
    bounds[:8] = [[31, 0], [0, 0], [31, 16], [31, 24], [0, 24], [7, 24], [3, 28], [31, 31]]
    # all lanes of a warp have the same bounds, but each has its own lane or distance
    words[:, 2] = np.repeat(bounds[:, 0] | bounds[:, 1] << np.uint32(8), 32)
    return words, None


def _shuffled(words: np.ndarray, _: object) -> np.ndarray:
    out = np.empty((len(words), 2 * len(SHUFFLES)), np.uint32)
    for warp in range(0, len(words), 32):
        rows = slice(warp, warp + 32)
        for i, mode in enumerate(SHUFFLES):
            out[rows, 2 * i], out[rows, 2 * i + 1] = oracle.shuffle(*words[rows].T, mode)
    return out


def _random(ins: int) -> Callable:
    return lambda: (_words(rng(11), BLOCK, ins), None)


CASES = (
    Case("e2m1_f16x2", lambda: (every_byte(), None), lambda w, _: oracle.e2m1_pairs(w[:, 0])),
    Case("e2m1_f16x2_table", lambda: (every_byte(), None), lambda w, _: oracle.e2m1_pairs(w[:, 0])),
    Case("e2m1_s8_apart", _apart_inputs, _apart),
    Case("e2m1_s8", lambda: (every_byte(), None), _s8),
    Case("e4m3_f16x2", lambda: (every_byte(), None), _e4m3),
    Case("f16x2_f32", _every_half, _f32),
    Case("bits_f32", _float_bits, lambda w, _: w),
    Case("fma_f16x2", _fma_inputs, _fma),
    Case("fma_e2m1x8", _fused_inputs(1), _fused(1)),
    Case("fma_e2m1x16", _fused_inputs(2), _fused(2)),
    *(Case(f"load{n}", _memory_inputs(n, False), _loaded(n, False)) for n in (4, 8, 16)),
    *(Case(f"load{n}_if", _memory_inputs(n, True), _loaded(n, True)) for n in (4, 8, 16)),
    Case("load32", _memory_inputs(32, False), _loaded(32, False), ("sm_100a",)),
    Case("load32_if", _memory_inputs(32, True), _loaded(32, True), ("sm_100a",)),
    Case("byte_if", _memory_inputs(1, True), _byte),
    Case("shared", _random(4), _shared),
    *(Case(f"copy{n}", _copy_inputs(n), _copied(n)) for n in (4, 8, 16)),
    Case("mma_s8", _mma_inputs, _mma),
    Case("mma_f16", _mma_f16_inputs, _mma_f16),
    Case("sum_lanes", _sum_inputs, _sums),
    Case("prmt", _prmt_inputs, _prmt),
    Case("shuffle", _shuffle_inputs, _shuffled),
)
BY_BODY = {case.body: case for case in CASES}

"""Converts between matrices and the register fragments of mma.sync, ldmatrix and stmatrix (PTX ISA, "Matrix Fragments
for mma.m16n8k*").

One rule serves every type. Lane 4 * group + t holds e elements in each 32-bit register. In register r of A, they are in
row group + 8 * (r & 1), from column 4e * (r >> 1) + e * t on. In register r of B, they are in column group, from row
4e * r + e * t on. In the shapes, n is the number of warps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from cute_nvfp4.sim.numerics import half, narrow


def elements(register: np.ndarray, t: str) -> np.ndarray:
    """Returns the f64 values (n, 32, e) of registers (n, 32) of type ``t``. A register holds eight packed elements of
    ``e2m1x2``; each element of ``e2m1``, ``e2m3`` and ``e3m2`` has a byte of its own."""
    if t == "tf32":
        return (register & np.uint32(0xFFFFE000)).view("f4").astype("f8")[..., None]
    if t in ("f16", "bf16"):
        return half.widen(register, t + "x2").astype("f8")
    if t == "e2m1x2":
        return _pairs().take(np.ascontiguousarray(register).view("u2"), axis=0).reshape(*register.shape, 8)
    raw = np.ascontiguousarray(register).view("i1" if t == "s8" else "u1").reshape(*register.shape, 4)
    return raw.astype("f8") if t in ("s8", "u8") else _bytes(t).take(raw)


@cache
def _pairs() -> np.ndarray:
    """Returns the four E2M1 values (65536, 4) of every two bytes, from the low nibble of the first byte on."""
    codes, values = np.arange(1 << 16), narrow.decode_table("e2m1").astype("f8")
    return np.stack([values[codes >> 4 * i & 15] for i in range(4)], axis=1)


@cache
def _bytes(t: str) -> np.ndarray:
    """Returns the f64 value of each byte. An E2M1 code is in bits 2 to 5 and a 6-bit code in bits 0 to 5; other bits
    have no effect."""
    values = narrow.decode_table(t).astype("f8")
    codes = np.arange(256) >> (2 if t == "e2m1" else 0)
    return values[codes & (len(values) - 1)]


def matrix_a(registers: list[np.ndarray], t: str) -> np.ndarray:
    """Returns A (n, 16, K) from its registers."""
    columns = []
    for r in range(0, len(registers), 2):
        parts = [elements(x, t) for x in registers[r : r + 2]]
        columns.append(np.concatenate([p.reshape(p.shape[0], 8, -1) for p in parts], axis=1))
    return np.concatenate(columns, axis=2)


def matrix_b(registers: list[np.ndarray], t: str) -> np.ndarray:
    """Returns B (n, K, 8) from its registers."""
    parts = [elements(x, t) for x in registers]
    return np.concatenate([p.reshape(p.shape[0], 8, -1) for p in parts], axis=2).transpose(0, 2, 1)


def accumulator(registers: list[np.ndarray]) -> np.ndarray:
    """Returns an accumulator (n, 16, 8) from its four registers (n, 32); register i holds row group + 8 * (i >> 1),
    column 2t + (i & 1)."""
    pairs = [np.stack(registers[h : h + 2], axis=-1).reshape(-1, 8, 8) for h in (0, 2)]
    return np.concatenate(pairs, axis=1)


def spread(d: np.ndarray) -> list[np.ndarray]:
    """Returns the four registers (n, 32) of an accumulator; the inverse of ``accumulator``."""
    halves = [d[:, 8 * h : 8 * h + 8, :].reshape(-1, 32, 2) for h in (0, 1)]
    return [np.ascontiguousarray(x[..., j]) for x in halves for j in (0, 1)]


def add(d: np.ndarray, registers: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the registers (4, n, 32) of the f64 matrix ``d`` (n, 16, 8) plus the accumulator in ``registers``; each
    sum is rounded to f32 once."""
    sums = np.empty((4, len(d), 32), "f4")
    for r, register in enumerate(registers):
        own = d[:, 8 * (r >> 1) : 8 * (r >> 1) + 8, r & 1 :: 2]
        added = np.broadcast_to(register, (register.shape[0], 32)).reshape(-1, 8, 4)
        np.add(own, added, out=sums[r].reshape(-1, 8, 4), casting="same_kind")
    return sums


def transpose_8x8(words: np.ndarray) -> np.ndarray:
    """Returns the transpose of an 8x8 matrix of 16-bit elements, which words (n, 32) hold row by row."""
    matrix = np.ascontiguousarray(words).view("u2").reshape(-1, 8, 8)
    return np.ascontiguousarray(matrix.transpose(0, 2, 1)).view("u4").reshape(-1, 32)

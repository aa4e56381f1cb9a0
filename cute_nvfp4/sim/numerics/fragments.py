"""Register fragments of mma.sync, ldmatrix and stmatrix as matrices (PTX ISA, "Matrix Fragments for mma.m16n8k*").

Lane = 4 * group + t. With e elements in a 32-bit register, register r of A holds row group + 8 * (r & 1), columns
4e * (r >> 1) + t * e .. + e; register r of B holds rows 4e * r + t * e .. + e of column group; one rule serves every
type.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from cute_nvfp4.sim.numerics import half, narrow


def elements(register: np.ndarray, t: str) -> np.ndarray:
    """(n, 32) registers of type ``t`` as (n, 32, e) numbers: f64 for floats, f64-exact integers for s8 and u8. Of
    ``e2m1x2`` eight are packed in a register; ``e2m1``, ``e2m3`` and ``e3m2`` have a byte each."""
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
    """(65536, 4): the E2M1 values of two bytes, the low nibble's of the first byte first."""
    codes, values = np.arange(1 << 16), narrow.decode_table("e2m1").astype("f8")
    return np.stack([values[codes >> 4 * i & 15] for i in range(4)], axis=1)


@cache
def _bytes(t: str) -> np.ndarray:
    """f64 value of each byte. An E2M1 code lies in bits 2 to 5, a 6-bit code in bits 0 to 5; the rest is ignored."""
    values = narrow.decode_table(t).astype("f8")
    codes = np.arange(256) >> (2 if t == "e2m1" else 0)
    return values[codes & (len(values) - 1)]


def matrix_a(registers: list[np.ndarray], t: str) -> np.ndarray:
    """(n, 16, K) from the registers of A."""
    columns = []
    for r in range(0, len(registers), 2):
        parts = [elements(x, t) for x in registers[r : r + 2]]
        columns.append(np.concatenate([p.reshape(p.shape[0], 8, -1) for p in parts], axis=1))
    return np.concatenate(columns, axis=2)


def matrix_b(registers: list[np.ndarray], t: str) -> np.ndarray:
    """(n, K, 8) from the registers of B."""
    parts = [elements(x, t) for x in registers]
    return np.concatenate([p.reshape(p.shape[0], 8, -1) for p in parts], axis=2).transpose(0, 2, 1)


def accumulator(registers: list[np.ndarray]) -> np.ndarray:
    """(n, 16, 8) from four (n, 32) arrays: register i holds row group + 8 * (i >> 1), column 2t + (i & 1)."""
    pairs = [np.stack(registers[h : h + 2], axis=-1).reshape(-1, 8, 8) for h in (0, 2)]
    return np.concatenate(pairs, axis=1)


def spread(d: np.ndarray) -> list[np.ndarray]:
    """The inverse of ``accumulator``."""
    halves = [d[:, 8 * h : 8 * h + 8, :].reshape(-1, 32, 2) for h in (0, 1)]
    return [np.ascontiguousarray(x[..., j]) for x in halves for j in (0, 1)]


def add(d: np.ndarray, registers: Sequence[np.ndarray]) -> np.ndarray:
    """(4, n, 32): ``spread`` of the f64 matrix (n, 16, 8) plus the accumulator in the registers, in f32: sums are
    rounded once."""
    sums = np.empty((4, len(d), 32), "f4")
    for r, register in enumerate(registers):
        own = d[:, 8 * (r >> 1) : 8 * (r >> 1) + 8, r & 1 :: 2]
        added = np.broadcast_to(register, (register.shape[0], 32)).reshape(-1, 8, 4)
        np.add(own, added, out=sums[r].reshape(-1, 8, 4), casting="same_kind")
    return sums


def transpose_8x8(words: np.ndarray) -> np.ndarray:
    """(n, 32) words that hold an 8x8 matrix of 16-bit elements row by row, transposed."""
    matrix = np.ascontiguousarray(words).view("u2").reshape(-1, 8, 8)
    return np.ascontiguousarray(matrix.transpose(0, 2, 1)).view("u4").reshape(-1, 32)

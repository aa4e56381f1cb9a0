"""Register fragments of wgmma as matrices (PTX ISA, "Register Fragments for wgmma.mma_async").

Warp w of a warpgroup holds rows 16 w .. 16 w + 15; in them lane 4 r + t has, of A, what ``mma.m16n8k*`` gives it, and
of D in register 4 c + 2 h + b the element of row r + 8 h and column 8 c + 2 t + b. An f16 register holds both b.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.tcgen05 import elements

WARPS = 4
"""Warps of a warpgroup."""


def stacked(registers: tuple[np.ndarray, ...], n: int) -> np.ndarray:
    """(registers, n, 32) of arrays that broadcast to (n, 32)."""
    out = np.empty((len(registers), n, 32), registers[0].dtype)
    for row, register in zip(out, registers):
        row[...] = register
    return out


def matrix_a(registers: np.ndarray, t: str) -> np.ndarray:
    """(w, 64, K) f32 from the four registers (4, 4 w, 32) of A, of type ``t``."""
    e = 4 if t in ("s8", "u8", "e4m3", "e5m2") else 1 if t == "tf32" else 2
    # register 2 q + h: columns 4 e q + e t .. of rows r + 8 h
    parts = registers.reshape(2, 2, -1, 8, 4)
    rows = np.ascontiguousarray(parts.transpose(2, 1, 3, 0, 4))
    raw = rows.view("u1").reshape(-1, WARPS * 16, 32)
    return elements.decode(raw, t).reshape(len(raw), WARPS * 16, 8 * e)


def matrix_d(registers: np.ndarray) -> np.ndarray:
    """(w, 64, N) from the registers (N / 2, 4 w, 32) of an accumulator, one element each."""
    parts = registers.reshape(-1, 2, 2, registers.shape[1], 8, 4)
    return np.ascontiguousarray(parts.transpose(3, 1, 4, 0, 5, 2)).reshape(-1, WARPS * 16, 2 * len(registers))


def registers_d(matrix: np.ndarray) -> np.ndarray:
    """The inverse of ``matrix_d``."""
    n = matrix.shape[-1]
    parts = matrix.reshape(-1, 2, 8, n // 8, 4, 2)
    return np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4)).reshape(n // 2, -1, 32)


def unpacked(registers: np.ndarray) -> np.ndarray:
    """(N / 4, n, 32) words of two f16 each as (N / 2, n, 32) f16."""
    halves = np.ascontiguousarray(registers).view("f2").reshape(*registers.shape, 2)
    return halves.transpose(0, 3, 1, 2).reshape(-1, *registers.shape[1:])


def packed(halves: np.ndarray) -> np.ndarray:
    """The inverse of ``unpacked``."""
    pairs = halves.reshape(-1, 2, *halves.shape[1:]).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pairs).view("u4")[..., 0]

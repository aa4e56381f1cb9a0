"""Converts between the register fragments of wgmma and matrices (PTX ISA, "Register Fragments for wgmma.mma_async").

Warp w of a warpgroup holds rows 16 w to 16 w + 15 of A and D. The fragment of A in these rows is that of
``mma.m16n8k*``. Register 4 c + 2 h + b of lane 4 r + t holds the element of D in row r + 8 h of the 16 and in column
8 c + 2 t + b. With an f16 D, one register holds the elements with b = 0 and b = 1.

In the shapes, w is the number of warpgroups and n = 4 w the number of warps.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.tcgen05 import elements

WARPS = 4
"""Number of warps in a warpgroup."""


def stacked(registers: tuple[np.ndarray, ...], n: int) -> np.ndarray:
    """Returns one array (registers, n, 32) of registers that broadcast to (n, 32)."""
    out = np.empty((len(registers), n, 32), registers[0].dtype)
    for row, register in zip(out, registers):
        row[...] = register
    return out


def matrix_a(registers: np.ndarray, t: str) -> np.ndarray:
    """Returns A as f32 (w, 64, K) from its four registers (4, n, 32); ``t`` is the element type."""
    e = 4 if t in ("s8", "u8", "e4m3", "e5m2") else 1 if t == "tf32" else 2
    # Register 2 q + h holds ``e`` elements of row r + 8 h, from column 4 e q + e t on.
    parts = registers.reshape(2, 2, -1, 8, 4)
    rows = np.ascontiguousarray(parts.transpose(2, 1, 3, 0, 4))
    raw = rows.view("u1").reshape(-1, WARPS * 16, 32)
    return elements.decode(raw, t).reshape(len(raw), WARPS * 16, 8 * e)


def matrix_d(registers: np.ndarray) -> np.ndarray:
    """Returns D (w, 64, N) from its registers (N / 2, n, 32), which hold one element each."""
    parts = registers.reshape(-1, 2, 2, registers.shape[1], 8, 4)
    return np.ascontiguousarray(parts.transpose(3, 1, 4, 0, 5, 2)).reshape(-1, WARPS * 16, 2 * len(registers))


def registers_d(matrix: np.ndarray) -> np.ndarray:
    """Returns the registers (N / 2, n, 32) of D; the inverse of ``matrix_d``."""
    n = matrix.shape[-1]
    parts = matrix.reshape(-1, 2, 8, n // 8, 4, 2)
    return np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4)).reshape(n // 2, -1, 32)


def unpacked(registers: np.ndarray) -> np.ndarray:
    """Returns f16 registers (N / 2, n, 32) from words (N / 4, n, 32) that hold two f16 each."""
    halves = np.ascontiguousarray(registers).view("f2").reshape(*registers.shape, 2)
    return halves.transpose(0, 3, 1, 2).reshape(-1, *registers.shape[1:])


def packed(halves: np.ndarray) -> np.ndarray:
    """Returns words that hold two f16 each; the inverse of ``unpacked``."""
    pairs = halves.reshape(-1, 2, *halves.shape[1:]).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pairs).view("u4")[..., 0]

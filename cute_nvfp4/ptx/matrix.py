"""8×8 matrices of 16-bit elements from registers to shared memory (PTX ISA, "stmatrix")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Int32, Uint32

from ._asm import asm


def store_matrices_transposed(address: Int32, matrices: Sequence[Any]) -> None:
    """Stores four matrices, each transposed. Lane 8·i + r gives the address of column r of matrix i, 16 bytes.

    Lane 4·g + c holds columns 2c and 2c + 1 of row g of each matrix, in one word. PTX 7.8, sm_90 or later.
    """
    text = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"
    asm(text, [], [Int32(address), *map(Uint32, matrices)], volatile=True)

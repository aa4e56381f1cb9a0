"""Integer arithmetic that moves more than it computes (PTX ISA, "Integer Arithmetic Instructions")."""

from __future__ import annotations

from cutlass import Uint32

from ._asm import asm


def add_product_of_half(halves: Uint32, factors: Uint32, addend: Uint32) -> Uint32:
    """addend + low half · byte 0 + high half · byte 1 of ``factors``. PTX 5.0: ``dp2a.lo.u32.u32``."""
    return asm("dp2a.lo.u32.u32 $0, $1, $2, $3;", [Uint32], [Uint32(x) for x in (halves, factors, addend)])[0]

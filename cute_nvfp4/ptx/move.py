"""Moves of bits, bytes and registers (PTX ISA, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int64, Uint32

from ._asm import asm


def f32_bits(a: Float32) -> Uint32:
    """The bits of ``a``. PTX 1.0: ``mov.b32``."""
    return asm("mov.b32 $0, $1;", [Uint32], [Float32(a)])[0]


def f32_from_bits(a: Uint32) -> Float32:
    """The value that has the bits ``a``. PTX 1.0: ``mov.b32``."""
    return asm("mov.b32 $0, $1;", [Float32], [Uint32(a)])[0]


def prmt(a: Uint32, b: Uint32, selector: Any) -> Uint32:
    """Four bytes of ``a`` (0–3) and ``b`` (4–7), selected by the nibbles of ``selector``. PTX 2.0: ``prmt.b32``."""
    return asm("prmt.b32 $0, $1, $2, $3;", [Uint32], [Uint32(a), Uint32(b), Uint32(selector)])[0]


def take_if_positive(value: Float32, second: Sequence[Uint32], first: Sequence[Uint32], one: Uint32) -> list[Uint32]:
    """``second`` if ``value`` is positive, else ``first``, by products with ``one`` on the FMA pipe (PTX 1.0).

    The compiler must not know that ``one`` is 1, as in :func:`add_by_fma`.
    """
    n = len(first)
    text = f"{{ .reg .pred p; setp.gt.f32 p, ${n}, 0f00000000; " + "".join(
        f"mov.b32 ${i}, ${n + 1 + i}; @p mad.lo.u32 ${i}, ${2 * n + 1 + i}, ${3 * n + 1}, 0; " for i in range(n)
    )
    operands = [Float32(value), *map(Uint32, first), *map(Uint32, second), Uint32(one)]
    return asm(text + "}", [Uint32] * n, operands)


def per_lane(a: Uint32) -> Uint32:
    """``a``, hidden from the compiler's uniformity analysis (PTX 1.3: ``%laneid``).

    The compiler then keeps the value in a vector register, where products with constants take it, not a uniform one.
    """
    text = "{ .reg .b32 l; mov.u32 l, %laneid; shr.u32 l, l, 5; add.u32 $0, $1, l; }"
    return asm(text, [Uint32], [Uint32(a)])[0]


def opaque(a: Int64) -> Int64:
    """``a``, kept in a register: the compiler forgets how it was computed. PTX 1.0: ``mov.b64``."""
    return asm("mov.b64 $0, $1;", [Int64], [Int64(a)], volatile=True)[0]

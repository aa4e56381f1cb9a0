"""Products with a diagonal matrix on the tensor cores: four packed binary16 numbers of a lane become fp32 and are added
to four others of the same lane by one instruction, whatever the other lanes hold, as long as it is finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from ._asm import asm
from .mma import mma_m16n8k8_f16

MINUS_ONE_F16 = 0xBC00


def diagonal(value: int, lane: Int32) -> Uint32:
    """``b`` of :func:`mma_m16n8k8_f16` for the number with the bits ``value`` on the diagonal, zero elsewhere."""
    row, column = lane >> 2, lane & 3
    word = cutlass.select_((row & 1) == 0, Uint32(value), Uint32(value << 16))
    return Uint32(cutlass.select_((row >> 1) == column, word, Uint32(0)))


def add_diagonal(halves: Sequence[Uint32], b: Uint32, c: Sequence[Float32]) -> list[Float32]:
    """c + the numbers in ``halves`` (pairs, an even number of them), times what ``b`` has on its diagonal."""
    found: list = []
    for i in range(0, len(halves), 2):
        found += mma_m16n8k8_f16(halves[i : i + 2], b, c[2 * i : 2 * i + 4])
    return found


@dsl_user_op
def min_abs_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The smaller magnitude of two f16, with the product of their signs. PTX 7.2, sm_86: ``min.xorsign.abs.f16x2``."""
    return asm("min.xorsign.abs.f16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def min_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The smaller of two f16. PTX 7.0, sm_80: ``min.f16x2``."""
    return asm("min.f16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def sub_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """a − b of f16, rounded. PTX 4.2, sm_53: ``sub.rn.f16x2``."""
    return asm("sub.rn.f16x2 $0, $1, $2;", [Uint32], [Uint32(a), Uint32(b)], loc=loc, ip=ip)[0]


@dsl_user_op
def sum_abs_f16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """|a| + b of f16, rounded. PTX 6.5, sm_53: ``abs.f16x2``, ``add.rn.f16x2``."""
    text = "{ .reg .b32 m; abs.f16x2 m, $1; add.rn.f16x2 $0, m, $2; }"
    return asm(text, [Uint32], [Uint32(a), Uint32(b)], loc=loc, ip=ip)[0]

"""Reductions over the lanes of a warp (PTX ISA, "redux.sync", "shfl.sync")."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from ._asm import asm


@dsl_user_op
def sum_lanes(value: Float32, width: int, *, loc: Any = None, ip: Any = None) -> Float32:
    """The sum over each aligned group of ``width`` (a power of two, at most 32) lanes, in every lane of the group.

    ``shfl.sync.bfly.b32`` (PTX 6.0) with distances 1, 2, …, width / 2, in the same order in every lane.
    """
    if width not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"lanes of a reduction: got {width}, expected a power of two up to 32")
    distance = 1
    while distance < width:
        value = value + cute.arch.shuffle_sync_bfly(value, offset=distance, loc=loc, ip=ip)
        distance *= 2
    return value


@dsl_user_op
def max_lanes(value: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The largest ``value`` of a warp, in every lane. PTX 7.0, sm_80 or later: ``redux.sync.max.u32``."""
    text = "redux.sync.max.u32 $0, $1, 0xFFFFFFFF;"
    return asm(text, [Uint32], [Uint32(value)], volatile=True, loc=loc, ip=ip)[0]

"""Distributed shared memory (PTX ISA, "st.async", "mapa"; sm_90 or later)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from ._asm import asm


@dsl_user_op
def remote_address(address: Int32, rank: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Where the cluster sees ``address`` of CTA ``rank``."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], [Int32(address), Int32(rank)], loc=loc, ip=ip)[0]


@dsl_user_op
def store_async(address: Int32, values: Sequence[Any], barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Stores four floats at a cluster address, 16-byte aligned; ``barrier``, of the same CTA, counts their 16 bytes."""
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];"
    operands = [Int32(address), *map(Float32, values), Int32(barrier)]
    asm(text, [], operands, volatile=True, loc=loc, ip=ip)

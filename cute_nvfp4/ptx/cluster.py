"""Distributed shared memory (PTX ISA, "st", "st.async", "mapa"; sm_90 or later)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint32

from ._asm import asm


def remote_address(address: Int32, rank: Int32) -> Int32:
    """The cluster address of ``address`` in the shared memory of CTA ``rank``."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], [Int32(address), Int32(rank)])[0]


def store_remote(address: Int32, word: Uint32) -> None:
    """Stores a word at a cluster address. A cluster barrier makes it visible to the CTA that owns the address."""
    asm("st.shared::cluster.b32 [$0], $1;", [], [Int32(address), Uint32(word)], volatile=True)


def store_async(address: Int32, values: Sequence[Any], barrier: Int32) -> None:
    """Stores four floats at a 16-byte aligned cluster address; ``barrier``, in the same CTA, counts the 16 bytes."""
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];"
    operands = [Int32(address), *map(Float32, values), Int32(barrier)]
    asm(text, [], operands, volatile=True)


def store_async_word(address: Int32, word: Uint32, barrier: Int32) -> None:
    """Stores a word at a cluster address; ``barrier``, in the same CTA, counts the 4 bytes."""
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];"
    asm(text, [], [Int32(address), Uint32(word), Int32(barrier)], volatile=True)

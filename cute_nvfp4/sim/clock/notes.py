"""The notes that a recorder takes of instructions with a variable latency, a record for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cute_nvfp4.sim.clock.flags import Key
from cute_nvfp4.sim.machine.global_memory import SECTOR


class Request(NamedTuple):
    """A warp's access to global memory."""

    kind: str  # "load", "store" or "atomic"
    sectors: int  # how many sectors of 32 bytes
    new: float  # how many of them come from DRAM or go there; a fraction where other warps ask in the same step
    lines: tuple[int, ...]  # the numbers of the 128-byte lines
    through_l1: bool  # whether L1 may answer it
    keys: Sequence[Key] = ()  # of a store of flags: the loads that wait for it; of a load of flags: its own key, if any


class Passes(NamedTuple):
    """A warp's access to shared memory in ``passes`` passes of the banks, or ``ideal`` ones without bank conflicts."""

    passes: int
    ideal: int


class Bar(NamedTuple):
    """An arrival at a named barrier, or at the barrier of the cluster."""

    key: Key


class Arrive(NamedTuple):
    """A warp's arrivals at mbarriers; ``keys`` has (CTA, slot, phase) for each."""

    keys: tuple[Key, ...]


class Await(NamedTuple):
    """A wait that has passed, for the end of phase ``key``; None if it passed before the first phase had ended."""

    key: Key | None


class Copy(NamedTuple):
    """A bulk or tensor copy, or a warp's st.async."""

    store: bool  # whether it writes global memory
    size: int  # bytes of global memory
    new: float  # how many of them come from DRAM or go there
    alike: int  # copies of the same step that begin at the same address, this one included
    keys: tuple[Key, ...]  # the phases of mbarriers that count its bytes


class Product(NamedTuple):
    """A tcgen05.mma with a tile of ``m`` rows (of both CTAs of a pair, where ``ctas`` is 2) and ``n`` columns. ``a`` is
    the memory of A: "shared" or "tensor"."""

    m: int
    n: int
    ctas: int
    a: str


class Transfer(NamedTuple):
    """A tcgen05.cp of ``size`` bytes of shared memory, or a tcgen05.shift of ``size`` bytes of tensor memory, for each
    of ``ctas`` CTAs."""

    size: int
    ctas: int


class Commit(NamedTuple):
    """A tcgen05.commit, which arrives at the phases ``keys``."""

    keys: tuple[Key, ...]


class Visit(NamedTuple):
    """An execution of block ``block`` by a warp. ``happened`` has the notes by PTX instruction (index) and kind."""

    block: int
    happened: dict[tuple[int, type], list[Any]]


def fetched(note: Any) -> float:
    """Returns the bytes that a load or a copy brings from DRAM, 0 for other notes."""
    if isinstance(note, Request):
        return SECTOR * note.new if note.kind == "load" else 0.0
    return note.new if isinstance(note, Copy) and not note.store else 0.0

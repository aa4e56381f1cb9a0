"""What a recorder notes of an instruction that takes a variable time: a record for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cute_nvfp4.sim.clock.flags import Key
from cute_nvfp4.sim.machine.global_memory import SECTOR


class Request(NamedTuple):
    """An access of a warp to global memory: ``sectors`` of 32 bytes in ``lines`` of 128, ``new`` of which come from
    DRAM or go there (a fraction where others ask in the same step). ``keys``: the loads that wait for this store, or
    the event that this load of flags waits for."""

    kind: str
    sectors: int
    new: float
    lines: tuple[int, ...]
    through_l1: bool
    keys: Sequence[Key] = ()


class Passes(NamedTuple):
    """An access to shared memory; ``passes`` of its banks, of which ``ideal`` are without conflicts."""

    passes: int
    ideal: int


class Bar(NamedTuple):
    """A named barrier of a CTA, its ``number``-th opening."""

    key: Key


class Arrive(NamedTuple):
    """Arrivals at phases of mbarriers: ``keys`` of (CTA, slot, phase), one for each arrival."""

    keys: tuple[Key, ...]


class Await(NamedTuple):
    """A wait that has passed, for the end of a phase; None if it never had to wait."""

    key: Key | None


class Copy(NamedTuple):
    """A bulk or tensor copy: ``size`` bytes of which ``new`` come from DRAM; whom it tells. ``alike`` copies of a step
    bring the same bytes to some SM, this one among them."""

    store: bool
    size: int
    new: float
    alike: int
    keys: tuple[Key, ...]


class Product(NamedTuple):
    """A tcgen05.mma: ``m`` rows (of both CTAs of a pair, where ``ctas`` is 2) and ``n`` columns; ``a`` says where A is,
    "shared" or "tensor" memory."""

    m: int
    n: int
    ctas: int
    a: str


class Transfer(NamedTuple):
    """A tcgen05.cp or .shift: ``size`` bytes of shared memory for each of ``ctas`` CTAs."""

    size: int
    ctas: int


class Commit(NamedTuple):
    """A tcgen05.commit; the phases it arrives at."""

    keys: tuple[Key, ...]


class Visit(NamedTuple):
    """A warp has run block ``block``; what ``happened`` by the index of the instruction, and kind."""

    block: int
    happened: dict[tuple[int, type], list[Any]]


def fetched(note: Any) -> float:
    """Bytes that a load or a copy brings from DRAM."""
    if isinstance(note, Request):
        return SECTOR * note.new if note.kind == "load" else 0.0
    return note.new if isinstance(note, Copy) and not note.store else 0.0

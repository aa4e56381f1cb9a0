"""Atomic read-modify-write, in the order (warp, lane), on global and shared memory (PTX ISA, "atom", "red")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_nvfp4.sim.machine.access import by_region, inside, locate, split_generic
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group

Update = Callable[..., np.ndarray]
BySpace = Callable[[str], Update]


def atomic(g: Group, a: Access, mask, addr: np.ndarray, off: int, update: BySpace, operands: tuple, returns: bool):
    """Applies ``memory = update(space)(memory, *operands)`` lane by lane; returns the old values (n, 32) if
    ``returns``.

    ``update(space)`` works on raw unsigned arrays. Lanes that share an address are served one after the other.
    """
    parts = [(a.space, mask, addr, off)] if a.space != "generic" else list(split_generic(g, a, mask, addr, off))
    old = np.zeros((g.n, 32), f"u{a.element}") if returns else None
    for space, part, at, o in parts:
        host, found, region = locate(g, a, space, part, at, o)
        if region is None:
            inside(g, a, host, found)
        g.wave.events.atomic(g, a, space, host, part)
        lanes = g.lanes(part)
        flat = np.broadcast_to(host, (g.n, 32))[lanes]
        values = [np.broadcast_to(v, (g.n, 32))[lanes] for v in operands]
        regions = [(region, np.ones(len(flat), bool))] if region is not None else _regions(g, a, host, lanes, flat)
        result = np.empty(len(flat), f"u{a.element}")
        for where, chosen in regions:
            first, rows = where.rows(a.element, a.element)
            index = (flat[chosen] - first) >> (a.element.bit_length() - 1)
            before = rows[index]
            result[chosen] = serialize(rows, index, update(space), [v[chosen] for v in values])
            g.wave.effects += bool((rows[index] != before).any())
        if returns:
            old[lanes] = result
    return old


def _regions(g: Group, a: Access, host, lanes, flat):
    """(region, lanes of ``flat`` in it) when there are several regions."""
    return list(by_region(g, a, np.broadcast_to(host, (g.n, 32)), lanes, flat))


def serialize(memory: np.ndarray, index: np.ndarray, update: Update, values: list[np.ndarray]) -> np.ndarray:
    """Updates ``memory[index]`` in order, one lane at a time for equal indices; returns what each lane read.

    Lanes are served in rounds: round r takes the r-th lane of every address, so each round has distinct addresses.
    """
    old = np.empty(len(index), memory.dtype)
    order = np.argsort(index, kind="stable")
    ranked = index[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]]) if len(ranked) else np.zeros(0, int)
    rank = np.arange(len(ranked)) - np.repeat(starts, np.diff(np.r_[starts, len(ranked)]))
    by_rank = order[np.argsort(rank, kind="stable")]
    counts = np.bincount(rank) if len(rank) else []
    at = 0
    for count in counts:
        lanes = by_rank[at : at + count]
        at += count
        where = index[lanes]
        old[lanes] = memory[where]
        memory[where] = update(memory[where], *(v[lanes] for v in values))
    return old

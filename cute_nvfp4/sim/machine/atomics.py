"""Atomic read-modify-write on global and shared memory, in the order (warp, lane) (PTX ISA, "atom", "red")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_nvfp4.sim.machine.access import by_region, located, split_generic
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group
from cute_nvfp4.sim.numerics.lanes import rounds

Update = Callable[..., np.ndarray]
BySpace = Callable[[str], Update]


def atomic(g: Group, a: Access, mask, addr: np.ndarray, off: int, update: BySpace, operands: tuple, returns: bool):
    """Applies ``memory = update(space)(memory, *operands)`` lane by lane; returns the old values (n, 32) or None.

    g, a, mask, addr, off: the same as in ``access``; ``a.count`` is 1.
    update: gives the function for a state space, which works on arrays of raw unsigned integers.
    operands: arrays that broadcast to (n, 32).
    returns: whether the old values are wanted.
    """
    parts = [(a.space, mask, addr, off)] if a.space != "generic" else list(split_generic(g, a, mask, addr, off))
    old = np.zeros((g.n, 32), f"u{a.element}") if returns else None
    for space, part, at, o in parts:
        host, _, region = located(g, a, space, part, at, o)
        g.wave.events.atomic(g, a, space, host, part)
        lanes = g.lanes(part)
        wide = np.broadcast_to(host, (g.n, 32))
        flat = wide[lanes]
        values = [np.broadcast_to(v, (g.n, 32))[lanes] for v in operands]
        result, several = np.empty(len(flat), f"u{a.element}"), region is None
        for where, chosen in by_region(g, a, wide, lanes, flat) if several else [(region, ...)]:
            first, rows = where.rows(a.element, a.element)
            index = (flat[chosen] - first) >> (a.element.bit_length() - 1)
            before = rows[index]
            result[chosen] = serialize(rows, index, update(space), [v[chosen] for v in values])
            g.wave.effects += bool((rows[index] != before).any())
        if returns:
            old[lanes] = result
    return old


def serialize(memory: np.ndarray, index: np.ndarray, update: Update, values: list[np.ndarray]) -> np.ndarray:
    """Updates ``memory[index]``, one lane after the other where indices are equal; returns what each lane read."""
    old = np.empty(len(index), memory.dtype)
    for lanes in rounds(index):
        where = index[lanes]
        old[lanes] = memory[where]
        memory[where] = update(memory[where], *(v[lanes] for v in values))
    return old

"""Natural loops of a graph of code: of PTX blocks, and of the segments of machine code."""

from __future__ import annotations

from collections.abc import Mapping

Graph = Mapping[int, set[int]]
"""Where control can go from each node."""


def loops_around(after: Graph, entry: int) -> dict[int, frozenset[int]]:
    """The first nodes of the loops around each node: a way leads back to a first one, which no way to there goes past.

    A loop that waits behind the kernel's code, and branches back into the middle of it, makes no loop of that code.
    """
    before: dict[int, set[int]] = {node: set() for node in after}
    for node, targets in after.items():
        for x in targets:
            before[x].add(node)
    around: dict[int, set[int]] = {node: set() for node in after}
    for node, dominators in _dominators(before, entry).items():
        for first in after[node]:
            if dominators >> first & 1:
                for x in _body(before, first, node):
                    around[x].add(first)
    return {node: frozenset(firsts) for node, firsts in around.items()}


def _dominators(before: Graph, entry: int) -> dict[int, int]:
    """The nodes on every way from the entry to a node, a bit each; of nodes that can be reached."""
    order, everything = sorted(before), sum(1 << node for node in before)
    found = dict.fromkeys(order, everything) | {entry: 1 << entry}
    changed = True
    while changed:
        changed = False
        for node in order:
            new = everything
            for x in before[node]:
                new &= found[x]
            new |= 1 << node
            if node != entry and new != found[node]:
                found[node], changed = new, True
    return {node: bits for node, bits in found.items() if before[node] or node == entry}


def _body(before: Graph, first: int, last: int) -> set[int]:
    """The nodes from which ``last`` can be reached without ``first``, and ``first``."""
    seen, left = {first}, [last]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += before[node]
    return seen

"""Natural loops of a control-flow graph, of PTX blocks or of SASS segments."""

from __future__ import annotations

from collections.abc import Mapping

Graph = Mapping[int, set[int]]
"""The successors of each node of a control-flow graph."""


def loops_around(after: Graph, entry: int) -> dict[int, frozenset[int]]:
    """Returns the headers of the natural loops around each node. The header of a loop dominates the node from which a
    back edge leads to it.

    A wait loop that ptxas puts behind the kernel's code branches back into the middle of that code. It makes no loop of
    the code, because the target of that branch does not dominate the wait loop.
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
    """Returns the dominators of each node that can be reached, as a set of bits."""
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
    """Returns the header ``first`` of a loop and the nodes from which ``last`` can be reached without the header."""
    seen, left = {first}, [last]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += before[node]
    return seen

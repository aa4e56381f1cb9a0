"""Finds the instructions that name registers which an asynchronous wgmma may still be using.

The analysis covers all paths through the code, taken or not. For these instructions only, ``checks/warpgroups.py``
looks at run time at what has really been waited for.
"""

from __future__ import annotations

from cute_nvfp4.sim.frontend.flow import Block, registers, successors
from cute_nvfp4.sim.frontend.model import Imm, Instruction, Vector

_MOST = 9
"""The largest count of commits that is told apart; wait_group leaves at most 7 groups pending."""


def accumulator(i: Instruction) -> tuple[str, ...]:
    """Returns the registers of D of a wgmma.mma_async."""
    return tuple(registers(i.operands[0]))


def fragment(i: Instruction) -> tuple[str, ...]:
    """Returns the registers of A of a wgmma.mma_async if A is in registers. Its operands 0 and 1 are both D."""
    return tuple(registers(i.operands[2])) if isinstance(i.operands[2], Vector) else ()


def named(i: Instruction) -> frozenset[str]:
    """Returns all registers that an instruction names, its guard included."""
    guard = () if i.guard is None else (i.guard.name,)
    return frozenset(n for o in i.operands for n in registers(o)).union(guard)


def is_wgmma(i: Instruction, what: str) -> bool:
    """Returns whether the instruction is wgmma.``what``."""
    return i.base == "wgmma" and i.mods[0] == what


def suspects(blocks: list[Block]) -> dict[int, tuple[str, ...]]:
    """Maps the ``id`` of each instruction, other than wgmma, that names registers in flight to those registers."""
    if not any(is_wgmma(i, "mma_async") for b in blocks for i, _ in b.code):
        return {}
    # register -> the fewest commits that may have followed its last use by a wgmma
    entry: list[dict[str, int] | None] = [None] * len(blocks)
    entry[0] = {}
    todo, found = [0], {}
    while todo:
        index = todo.pop()
        state = dict(entry[index])
        for i, _ in blocks[index].code:
            state = _after(i, state, found)
        for s in successors(blocks[index]):
            before = entry[s]
            joined = _joined(before, state)
            if joined != before:
                entry[s] = joined
                todo.append(s)
    return found


def _joined(a: dict[str, int] | None, b: dict[str, int]) -> dict[str, int]:
    return dict(b) if a is None else {n: min(a.get(n, _MOST), b.get(n, _MOST)) for n in a.keys() | b.keys()}


def _after(i: Instruction, state: dict[str, int], found: dict[int, tuple[str, ...]]) -> dict[str, int]:
    """Returns the state after an instruction; adds to ``found`` the registers in flight that it names."""
    if i.base != "wgmma":
        touched = state.keys() & named(i) if state else ()
        if touched:
            found[id(i)] = tuple(sorted({*found.get(id(i), ()), *touched}))
    elif is_wgmma(i, "mma_async"):
        state.update(dict.fromkeys((*accumulator(i), *fragment(i)), 0))
    elif is_wgmma(i, "commit_group"):
        return {n: min(c + 1, _MOST) for n, c in state.items()}
    elif is_wgmma(i, "wait_group"):
        assert isinstance(i.operands[0], Imm)
        return {n: c for n, c in state.items() if c <= i.operands[0].value}
    return state

"""Which registers a wgmma may still be using where an instruction names them.

The answer is about all ways through the code, taken or not; the checks ask what has really been waited for
(``checks/warpgroups.py``), and only where this says that it matters.
"""

from __future__ import annotations

from cute_nvfp4.sim.frontend.flow import Block, registers, successors
from cute_nvfp4.sim.frontend.model import Imm, Instruction, Vector

_MOST = 9
"""Commits that are told apart: wait_group leaves 7 groups at most."""


def accumulator(i: Instruction) -> tuple[str, ...]:
    """Registers of D of a wgmma.mma_async."""
    return tuple(registers(i.operands[0]))


def fragment(i: Instruction) -> tuple[str, ...]:
    """Registers of A of a wgmma.mma_async, if A is in registers. D comes twice among its operands."""
    return tuple(registers(i.operands[2])) if isinstance(i.operands[2], Vector) else ()


def named(i: Instruction) -> frozenset[str]:
    """All registers that an instruction names."""
    guard = () if i.guard is None else (i.guard.name,)
    return frozenset(n for o in i.operands for n in registers(o)).union(guard)


def is_wgmma(i: Instruction, what: str) -> bool:
    """Whether the instruction is wgmma.``what``."""
    return i.base == "wgmma" and i.mods[0] == what


def suspects(blocks: list[Block]) -> dict[int, tuple[str, ...]]:
    """Identity of every instruction but wgmma that may touch registers in flight, and those registers."""
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
    """The state behind an instruction; adds to ``found`` what it touches."""
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

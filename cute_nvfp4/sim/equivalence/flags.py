"""Finds the instructions by which more than barriers decides: polled flags, which the proof follows, and others.

A flag is a word of global memory that a loop loads, with acquire, until it is not zero.
"""

from __future__ import annotations

import re
from functools import lru_cache

from cute_nvfp4.sim.frontend.flow import Block, successors
from cute_nvfp4.sim.frontend.model import Imm
from cute_nvfp4.sim.machine.kernel import CompiledKernel

_UNDECIDED = re.compile(
    r"atom\b|red\b|multimem\b|clusterlaunchcontrol\b|cp\.reduce\b|cp\.async\.mbarrier\b|activemask\b"
    r"|(?:ld|st)\.(?:acquire|release|relaxed|volatile|mmio)\b|mbarrier\.(?:arrive_drop|expect_tx|complete_tx|inval)\b"
    r"|mbarrier\.(?:test|try)_wait(?!\S*parity)"
)
_CHANGING = re.compile(r"%(?:clock|globaltimer|smid|nsmid|warpid)")
_SCOPE = r"(?:cta|cluster|gpu|sys)"
FLAG_READ = re.compile(rf"ld\.acquire\.{_SCOPE}\.global\.[bu]32")
FLAG_WRITE = re.compile(rf"st\.release\.{_SCOPE}\.global\.[bu]32")
"""The opcodes of accesses to flags. Any scope matches: the checks find a race where a scope excludes a thread."""


@lru_cache(maxsize=8)
def undecided(kernel: CompiledKernel) -> dict[int, str]:
    """Returns the blocks with an instruction by which more than barriers decides, and that instruction in words."""
    found, polls = {}, flag_polls(kernel)
    for block in kernel.blocks:
        for i, _ in block.code:
            if not FLAG_WRITE.fullmatch(i.opcode) and id(i) not in polls:
                if _UNDECIDED.match(i.opcode) or _CHANGING.search(i.text):
                    found[block.index] = i.where()
    return found


@lru_cache(maxsize=8)
def flag_polls(kernel: CompiledKernel) -> frozenset[int]:
    """Returns the identities of loads that only poll a flag: in a loop of a load, a comparison and a branch that
    repeats while the flag is zero, or in the same three instructions before such a loop, to which they lead."""
    loops = {}
    for block in kernel.blocks:
        zero, other = _asked(block)
        if zero == block.index and len(block.code) == 3:
            loops[zero] = block.code[0][0].operands[1], other
    found = set()
    for block in kernel.blocks:
        zero, other = _asked(block)
        if zero in loops and loops[zero] == (block.code[-3][0].operands[1], other):
            if not any(kernel.blocks[k].live_in & _answer(block) for k in successors(block)):
                found.add(id(block.code[-3][0]))
    return frozenset(found)


def _asked(block: Block) -> tuple[int, int]:
    """Returns where ``block`` leads if the flag that it tests at its end is zero, and if not; (-1, -1) for no test."""
    if len(block.code) < 3 or block.control != "branch":
        return -1, -1
    load, compare, branch = (i for i, _ in block.code[-3:])
    if (
        not FLAG_READ.fullmatch(load.opcode)
        or load.guard
        or compare.guard
        or branch.guard is None
        or branch.guard.negated
    ):
        return -1, -1
    if compare.opcode not in ("setp.eq.b32", "setp.ne.b32") or compare.operands[1:] != (load.operands[0], Imm(0)):
        return -1, -1
    if compare.operands[0] != branch.guard:
        return -1, -1
    taken, falls = block.targets[0], block.next
    return (taken, falls) if compare.opcode == "setp.eq.b32" else (falls, taken)


def _answer(block: Block) -> set[str]:
    """Returns the registers that hold the answer of the test at the end of ``block``."""
    return {block.code[-3][0].operands[0].name, block.code[-2][0].operands[0].name}

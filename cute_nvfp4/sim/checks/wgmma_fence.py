"""Finds missing wgmma.fence in the code of a kernel (PTX ISA, "wgmma.fence").

The fence must come before the first wgmma.mma_async, and between an instruction that changes a register and a
wgmma.mma_async that uses the register. Wgmmas that share an accumulator need no fence between them. The ISA requires a
fence after reads too, but NVIDIA's kernels have none there. Copies and constants (``mov``) do not count, because
NVIDIA's compiler moves them behind the fence.
"""

from __future__ import annotations

from collections.abc import Iterator

from cute_nvfp4.sim.frontend.flow import registers, successors
from cute_nvfp4.sim.frontend.in_flight import accumulator, fragment, is_wgmma
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.kernel import CompiledKernel

_NEVER = "@"
"""The entry, among names of registers, that says that no fence has come yet; no register has this name."""


def unfenced(kernel: CompiledKernel) -> Iterator[tuple[str, Instruction, str]]:
    """Yields ("hazard", instruction, text) for every wgmma.mma_async that lacks a fence on some path to it."""
    code = [i for b in kernel.blocks for i, _ in b.code if is_wgmma(i, "mma_async")]
    if not code:
        return
    watched = {n for i in code for n in (*accumulator(i), *fragment(i))}
    # register -> the instruction that has changed it since the last fence
    entry: list[dict[str, Instruction] | None] = [None] * len(kernel.blocks)
    entry[0] = {_NEVER: code[0]}
    todo, told = [0], set()
    while todo:
        index = todo.pop()
        state = dict(entry[index])
        for i, op in kernel.blocks[index].code:
            if is_wgmma(i, "fence"):
                state = {}
            elif is_wgmma(i, "mma_async"):
                bad = next((n for n in (_NEVER, *fragment(i), *accumulator(i)) if n in state), None)
                if bad is not None and id(i) not in told:
                    told.add(id(i))
                    yield "hazard", i, _words(bad, state[bad])
            elif i.base not in ("wgmma", "mov"):
                written = (n for o in i.operands[: len(op.dst)] for n in registers(o))
                state.update(dict.fromkeys(watched.intersection(written), i))
        for s in successors(kernel.blocks[index]):
            before = entry[s]
            if before is None or not state.keys() <= before.keys():
                entry[s] = {**state, **(before or {})}
                todo.append(s)


def _words(name: str, i: Instruction) -> str:
    if name == _NEVER:
        return "no wgmma.fence comes before it"
    return f"uses register {name.partition('@')[0]}, which {i.where()} changes, without wgmma.fence between them"

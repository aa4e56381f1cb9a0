"""``CompiledKernel``: a kernel that is translated to one Python function for each basic block."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.codegen import BlockCompiler
from cute_nvfp4.sim.frontend.flow import EXIT, Block, build_blocks
from cute_nvfp4.sim.frontend.model import TYPE_BITS, Imm, Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import STORE
from cute_nvfp4.sim.machine.layout import lay_out
from cute_nvfp4.sim.machine.protocols import Group
from cute_nvfp4.sim.numerics.lanes import members


class CompiledKernel:
    """A kernel that is ready to run.

    ``source`` is the parsed kernel, ``layout`` the addresses of its variables. ``blocks`` are its basic blocks in
    reverse post-order, ``functions`` one Python function for each. ``slots`` numbers the registers by name, and
    ``zeros`` has their values before they are written. ``synchronises_globally`` says whether its CTAs may wait for one
    another through global memory.
    """

    def __init__(self, source: Kernel) -> None:
        self.source = source
        self.layout = lay_out(source)
        self.blocks: list[Block] = build_blocks(source)
        compiler = BlockCompiler(source, self.layout.address)
        self.slots = compiler.slots
        self.functions = compiler.compile(self.blocks)
        shared = {width: np.zeros((1, 1), dtype) for width, dtype in STORE.items()}
        # PTX leaves registers undefined until they are written, and DSL kernels do read such registers: they are zero.
        self.zeros = [shared[TYPE_BITS[kind]] for kind in source.regs.values()]
        self.uses_tensor_memory = any(i.base == "tcgen05" for i in source.code)
        self.synchronises_globally = any(_may_synchronise(i) for i in source.code)
        self._live = [sorted(self.slots[n] for n in b.live_in if n in self.slots) for b in self.blocks]

    def live_slots(self, block: int) -> list[int]:
        """Returns the slots of the registers that are live on entry to ``block``."""
        return self._live[block] if block != EXIT else []

    def member_lanes(self, group: Group, block: Block) -> np.ndarray:
        """Returns the lanes in the member mask of the block's first instruction, (n, 32)."""
        instruction, op = block.code[0]
        operand = instruction.operands[len(op.dst) + op.converge]
        constant = isinstance(operand, Imm)
        value = np.full((1, 1), operand.value & 0xFFFFFFFF, "u4") if constant else group.regs[self.slots[operand.name]]
        return np.broadcast_to(members(value), (group.n, 32))


def _may_synchronise(i: Instruction) -> bool:
    """Returns whether CTAs could wait for one another through global memory with this instruction."""
    if i.base not in ("ld", "atom") or {"shared", "shared::cta", "param", "local", "const"} & set(i.mods):
        return False
    return i.base == "atom" or bool({"acquire", "relaxed", "volatile", "mmio"} & set(i.mods))

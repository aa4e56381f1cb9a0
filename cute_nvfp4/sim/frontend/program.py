"""A PTX module made ready to run: parsed, cut into blocks, translated; everything is cached by the text."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cute_nvfp4.sim import isa
from cute_nvfp4.sim.errors import LaunchError
from cute_nvfp4.sim.frontend.codegen import BlockCompiler
from cute_nvfp4.sim.frontend.flow import EXIT, Block, build_blocks
from cute_nvfp4.sim.frontend.model import TYPE_BITS, Imm, Instruction, Kernel, Module, Reg
from cute_nvfp4.sim.frontend.parse import parse_module
from cute_nvfp4.sim.frontend.regions import GlobalMemory
from cute_nvfp4.sim.isa.table import STORE
from cute_nvfp4.sim.machine.layout import lay_out
from cute_nvfp4.sim.machine.wave import Group

if TYPE_CHECKING:
    from cute_nvfp4.sim.checks.static import Finding

assert isa.OPCODES, "the opcode table fills itself when the package is imported"


class CompiledKernel:
    """One kernel: its ``source``, ``blocks`` in execution order, one Python function a block, and the layout of its
    variables."""

    def __init__(self, source: Kernel) -> None:
        self.source = source
        self.layout = lay_out(source)
        self.blocks: list[Block] = build_blocks(source)
        compiler = BlockCompiler(source, self.layout)
        self.slots = compiler.slots
        self.functions = compiler.compile(self.blocks)
        shared = {width: np.zeros((1, 1), dtype) for width, dtype in STORE.items()}
        # PTX leaves registers undefined until they are written, and DSL kernels do read some: they are zero here.
        self.zeros = [shared[TYPE_BITS[kind]] for kind in source.regs.values()]
        self.uses_tensor_memory = any(i.base == "tcgen05" for i in source.code)
        self.synchronises_globally = any(_may_synchronise(i) for i in source.code)
        self._live = [sorted(self.slots[n] for n in b.live_in if n in self.slots) for b in self.blocks]

    @cached_property
    def findings(self) -> list[Finding]:
        """What the static rules say of the code."""
        from cute_nvfp4.sim.checks.static import findings

        return findings(self)

    def live_slots(self, block: int) -> list[int]:
        """Registers needed on entry to ``block``."""
        return self._live[block] if block != EXIT else []

    def member_lanes(self, group: Group, block: Block) -> np.ndarray:
        """(n, 32) lanes named by the member mask of the block's first instruction."""
        instruction, op = block.code[0]
        operand = instruction.operands[len(op.dst) + op.converge]
        value = (
            group.regs[self.slots[operand.name]]
            if isinstance(operand, Reg)
            else np.full((1, 1), _mask(operand), np.uint32)
        )
        return (value >> np.arange(32, dtype=np.uint32)[None, :] & np.uint32(1)).astype(bool) & np.ones(
            (group.n, 32), bool
        )


def _may_synchronise(i: Instruction) -> bool:
    """Whether CTAs could wait for one another through global memory with this instruction."""
    if i.base not in ("ld", "atom") or {"shared", "shared::cta", "param", "local", "const"} & set(i.mods):
        return False
    return i.base == "atom" or bool({"acquire", "relaxed", "volatile", "mmio"} & set(i.mods))


def _mask(operand) -> int:
    assert isinstance(operand, Imm)
    return operand.value & 0xFFFFFFFF


class Program:
    """A PTX module; kernels are translated when they are first asked for."""

    def __init__(self, module: Module, text: str = "") -> None:
        self.module, self.text = module, text
        self._kernels: dict[str, CompiledKernel] = {}
        self._storage: dict[str, np.ndarray] = {}

    @staticmethod
    @lru_cache(maxsize=64)
    def parse(ptx: str) -> Program:
        """The program of a PTX text, cached by the text. Raises ``PtxSyntaxError``."""
        return Program(parse_module(ptx), ptx)

    @property
    def kernels(self) -> dict[str, Kernel]:
        """The kernels as they were read, by name."""
        return self.module.kernels

    def kernel(self, name: str) -> CompiledKernel:
        """The translated kernel ``name``; raises ``UnsupportedInstruction`` for what it may not contain."""
        if name not in self.module.kernels:
            raise LaunchError(f"the PTX has no kernel {name!r}; it has {sorted(self.module.kernels)}")
        if name not in self._kernels:
            self._kernels[name] = CompiledKernel(self.module.kernels[name])
        return self._kernels[name]

    def variables(self, memory: GlobalMemory) -> dict[str, int]:
        """Host addresses of module-scope .global and .const variables, registered in ``memory``; their values last
        between launches."""
        out = {}
        for v in self.module.variables.values():
            if v.space not in ("global", "const"):
                continue
            if v.name not in self._storage:
                data = np.zeros(max(v.size, 1) + v.align, np.uint8)
                at = -data.ctypes.data % v.align
                data[at : at + len(v.init)] = np.frombuffer(v.init, np.uint8)
                self._storage[v.name] = data[at : at + max(v.size, 1)]
            storage = self._storage[v.name]
            out[v.name] = storage.ctypes.data
            if not any(r.base <= storage.ctypes.data < r.end for r in memory.regions):
                memory.add(storage, v.name, writable=v.space == "global")
        return out

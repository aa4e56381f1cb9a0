"""Turns each basic block into one Python function.

The function takes a group of warps, reads registers from ``g.regs``, calls the opcode table's functions on whole
arrays, and writes back the registers that later blocks need. It returns what its last instruction decides by: a branch
predicate, or a barrier's operands. Registers are immutable arrays of unsigned integers (bool for predicates). Inactive
lanes may hold any value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cute_nvfp4.sim.errors import UnsupportedInstruction
from cute_nvfp4.sim.frontend.flow import Block, successors
from cute_nvfp4.sim.frontend.in_flight import suspects
from cute_nvfp4.sim.frontend.model import (
    TYPE_BITS,
    Address,
    Imm,
    Instruction,
    Kernel,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)
from cute_nvfp4.sim.frontend.opcodes import STORE, VIEW, Op, bits
from cute_nvfp4.sim.frontend.special import BITS

_NAMES = {name: repr(str(view)) for name, view in VIEW.items()}
"""The source text of each numpy type in ``VIEW``."""
NOTHING = object()
"""The mask of an instruction that no lane executes."""


def select(p: np.ndarray, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Returns ``new`` in the lanes where ``p`` holds, and ``old`` in the others."""
    if p.size == 1:
        return new if p.item() else old
    return np.where(p, new, old)


def constant(value: int, kind: str, type_name: str) -> np.ndarray:
    """Returns an immediate operand as a (1, 1) array of the type's view."""
    view = VIEW[type_name]
    if type_name == "pred":
        return np.full((1, 1), bool(value))
    if kind == "f64" and type_name == "f32":
        with np.errstate(over="ignore"):
            return np.uint64([[value]]).view("f8").astype("f4")
    width = view.itemsize * 8
    return np.array([[value & ((1 << width) - 1)]], dtype=STORE[width]).view(view)


class BlockCompiler:
    """Compiles the blocks of one kernel.

    ``address`` maps each variable to its state space and its address there. ``slots`` maps each register to its index
    in ``g.regs``."""

    def __init__(self, kernel: Kernel, address: Mapping[str, tuple[str, int]]) -> None:
        self.kernel, self.address = kernel, address
        self.slots = {name: i for i, name in enumerate(kernel.regs)}
        self.widths = {name: TYPE_BITS[kind] for name, kind in kernel.regs.items()}
        self.names: dict[str, Any] = {"np": np, "select": select, "NOTHING": NOTHING}
        self._constants: dict[tuple, str] = {}
        self._lines: list[str] = []
        self._assigned: set[str] = set()
        self._unsure: frozenset[str] = frozenset()
        self._decides: Instruction | None = None
        self._whole: Instruction | None = None
        self._suspects: dict[int, tuple[str, ...]] = {}

    def compile(self, blocks: list[Block]) -> list[Callable[[Any], Any]]:
        """Returns one function for each block, in the order of ``blocks``."""
        lines: list[str] = []
        self._suspects = suspects(blocks)
        # A register that is live on entry to the kernel may be read before it is written.
        self._unsure = blocks[0].live_in if blocks else frozenset()
        for block in blocks:
            lines += self._block(block, blocks)
        exec(compile("\n".join(lines), f"<ptx {self.kernel.name[:60]}>", "exec"), self.names)
        return [self.names[f"block{b.index}"] for b in blocks]

    def _block(self, block: Block, blocks: list[Block]) -> list[str]:
        self._lines, self._assigned = [], set()
        reads = [n for n in block.reads if n in self.slots]
        live_out = frozenset().union(*(blocks[s].live_in for s in successors(block)))
        for instruction, op in block.code:
            try:
                self._instruction(instruction, op)
            except UnsupportedInstruction as error:
                if instruction.where() in str(error):
                    raise
                raise UnsupportedInstruction(f"{error}: {instruction.where()}") from None
        # The result of a barrier is written when the barrier completes, not here.
        writes = [n for n in self._assigned if n in live_out]
        head = [f"def block{block.index}(g):", " R = g.regs"]
        head += [f" {self._local(n)} = R[{self.slots[n]}]" for n in sorted(reads, key=self.slots.get)]
        tail = [f" R[{self.slots[n]}] = {self._local(n)}" for n in sorted(writes, key=self.slots.get)]
        result = self._lines.pop() if block.control else " return None"
        return head + self._lines + tail + [result]

    def _local(self, name: str) -> str:
        return f"r{self.slots[name]}"

    def _bind(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def _instruction(self, i: Instruction, op: Op) -> None:
        count = len(op.dst)
        self._decides = i if op.control or op.klass.startswith(("store", "atomic", "mbarrier")) else None
        guard = self._predicate(i.guard) if i.guard is not None else None
        if id(i) in self._suspects:
            touched = f"g.touched({self._bind('i', i)}, {guard}, {self._suspects[id(i)]!r})"
            self._lines.append(f" {touched}")
        if op.control in ("branch", "exit", "trap"):
            self._lines.append(f" return {guard}")
            return
        self._whole = i
        args = ", ".join(a for o, t in zip(i.operands[count:], op.src) for a in self._source(o, t, op.relaxed))
        if op.control:
            if guard is not None:
                raise UnsupportedInstruction(f"a predicated {i.base} is not modelled")
            if op.control == "wait":
                self._lines.append(f" return {self._bind('f', op.fn)}(g, g.mask{', ' + args if args else ''})")
                return
            self._lines.append(f" return ({args}{',' if args else ''})")
            return
        targets = [self._target(o, t) for o, t in zip(i.operands[:count], op.dst)]
        flat = [pair for group in targets for pair in group]
        call, indent = self._bind("f", op.fn), " "
        if op.context:
            mask = "g.mask"
            if guard is not None:
                self._lines.append(f" m = g.narrow({guard})")
                self._lines.append(" if m is not NOTHING:")
                mask, indent = "m", "  "
            text = f"{call}(g, {mask}{', ' + args if args else ''})"
        else:
            text = f"{call}({args})"
        if not flat:
            self._lines.append(f"{indent}{text}")
            return
        temps, after = [f"t{j}" for j in range(len(flat))], []
        for j, (register, type_name) in enumerate(flat):
            if register is None:
                continue
            value = self._stored(temps[j], type_name, register, op.relaxed)
            local = self._local(register)
            self._assigned.add(register)
            if guard:
                after.append(f"{indent}{local} = select({guard}, {value}, {local})")
            elif value != temps[j]:
                after.append(f"{indent}{local} = {value}")
            else:
                temps[j] = local
        self._lines.append(f"{indent}{', '.join(temps)} = {text}")
        self._lines += after

    def _predicate(self, reg: Reg) -> str:
        if self.widths.get(reg.name) != 1:
            raise UnsupportedInstruction(f"{reg.name} is used as a predicate but is not one")
        local = self._sure(reg.name, self._decides)
        return f"~{local}" if reg.negated else local

    def _sure(self, name: str, i: Instruction | None) -> str:
        """Returns code that reads a register. With ``i``, the code reports a register that was never written."""
        if i is None or name not in self._unsure:
            return self._local(name)
        return f"g.sure({self._local(name)}, {self.slots[name]}, {self._bind('i', i)})"

    def _source(self, o: Operand, t: Any, relaxed: bool) -> list[str]:
        if t == "static":
            return []
        if t == "addr":
            return self._address(o)
        if isinstance(t, tuple):
            items = o.items if isinstance(o, Vector) else (o,)
            if len(items) != len(t):
                raise UnsupportedInstruction(f"a vector of {len(t)} elements is wanted, not {len(items)}")
            inner = [self._source(item, each, relaxed)[0] for item, each in zip(items, t)]
            return ["(" + ", ".join(inner) + ",)"]
        return [self._scalar(o, t, relaxed)]

    def _scalar(self, o: Operand, t: str, relaxed: bool) -> str:
        if isinstance(o, Reg):
            return self._register(o, t, relaxed)
        if isinstance(o, Imm):
            return self._constant(o.value, o.kind, t)
        if isinstance(o, Special):
            width = BITS[o.name]
            if bits(t) > width or (bits(t) < width and width != 64):
                raise UnsupportedInstruction(f"{o.name} has {width} bits, the instruction wants {bits(t)}")
            text = f"g.special({o.name!r})"
            return text if bits(t) == width else f"{text}.astype('u{bits(t) // 8}')"
        if isinstance(o, Symbol):
            return self._symbol(o, t)
        raise UnsupportedInstruction(f"operand {o} is not modelled here")

    def _register(self, o: Reg, t: str, relaxed: bool) -> str:
        if o.name not in self.slots:
            raise UnsupportedInstruction(f"register {o.name} is not declared")
        width, local = self.widths[o.name], self._sure(o.name, self._decides)
        if o.negated and t != "pred":
            raise UnsupportedInstruction(f"!{o.name} is not a predicate")
        if width == bits(t):
            text = f"~{local}" if o.negated else local
            return text if VIEW[t] == STORE[width] else f"{text}.view({_NAMES[t]})"
        if relaxed and t[1:].isdigit() and t[0] in "bus" and 64 >= width > bits(t):
            return f"{local}.astype('u{bits(t) // 8}').view({_NAMES[t]})"
        raise UnsupportedInstruction(f"register {o.name} has {width} bits, the instruction wants {bits(t)}")

    def _symbol(self, o: Symbol, t: str) -> str:
        if o.name not in self.address:
            raise UnsupportedInstruction(f"{o.name} is not declared")
        space, address = self.address[o.name]
        if space in ("global", "const"):
            return f"g.variable({o.name!r}, {o.offset})"
        text = self._constant(address + o.offset, "int", t)
        return f"g.own_shared({text})" if space == "shared" else text

    def _constant(self, value: int, kind: str, t: str) -> str:
        key = (value, kind, t)
        if key not in self._constants:
            self._constants[key] = self._bind("c", constant(value, kind, t))
        return self._constants[key]

    def _address(self, o: Operand) -> list[str]:
        if not isinstance(o, Address) or o.extra:
            raise UnsupportedInstruction("an address [base + offset] is wanted")
        if isinstance(o.base, Symbol):
            return [self._symbol(o.base, "u64"), str(o.offset)]
        if isinstance(o.base, Imm):
            return [self._constant(o.base.value, "int", "u64"), str(o.offset)]
        if self.widths.get(o.base.name) not in (32, 64):
            raise UnsupportedInstruction(f"{o.base.name} cannot hold an address")
        return [self._sure(o.base.name, self._whole), str(o.offset)]

    def _target(self, o: Operand, t: Any) -> list[tuple[str | None, str]]:
        if isinstance(t, tuple) and t[0] == "pair":
            if not isinstance(o, Pair):
                raise UnsupportedInstruction("a destination d|p is wanted")
            return self._target(o.first, t[1]) + self._target(o.second, t[2])
        if isinstance(t, tuple):
            items = o.items if isinstance(o, Vector) else (o,)
            if len(items) != len(t):
                raise UnsupportedInstruction(f"a vector of {len(t)} elements is wanted, not {len(items)}")
            return [pair for item, each in zip(items, t) for pair in self._target(item, each)]
        if isinstance(o, Sink):
            return [(None, t)]
        if not isinstance(o, Reg) or o.negated or o.name not in self.slots:
            raise UnsupportedInstruction("the destination must be a register")
        return [(o.name, t)]

    def _stored(self, temp: str, t: str, register: str, relaxed: bool) -> str:
        width, view = self.widths[register], VIEW[t]
        if width == bits(t):
            return temp if view == STORE[width] else f"{temp}.view('u{width // 8}')"
        if relaxed and t[1:].isdigit() and t[0] in "bus" and 64 >= width > bits(t):
            if view.kind == "i":
                return f"{temp}.astype('i{width // 8}').view('u{width // 8}')"
            return f"{temp}.astype('u{width // 8}')"
        raise UnsupportedInstruction(f"register {register} has {width} bits, the result has {bits(t)}")

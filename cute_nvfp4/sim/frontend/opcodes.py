"""The opcode table: the types of each instruction's operands, and the function that computes its results.

A builder is registered for each base opcode. It consumes the modifiers one by one, so that a modifier which it does not
know is an error. It returns an ``Op`` that must have one operand type for each operand of the instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_nvfp4.sim.errors import UnsupportedInstruction
from cute_nvfp4.sim.frontend.model import TYPE_BITS, Instruction, Kernel

#: numpy type of a 128-bit register; no instruction calculates with one
WIDE = np.dtype([("lo", "u8"), ("hi", "u8")])
#: numpy type in which functions of the table see a value of a PTX type; bf16, tf32 and packed floats are raw bits
VIEW = {
    **{f"{k}{n}": np.dtype(f"u{n // 8}") for k in "bu" for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)},
    **{"bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"), "tf32": np.dtype("u4")},
    **{"f32x2": np.dtype("u8"), "e2m1x2": np.dtype("u1"), "e4m3x2": np.dtype("u2"), "e5m2x2": np.dtype("u2")},
    **{"ue8m0x2": np.dtype("u2"), "e2m3x2": np.dtype("u2"), "e3m2x2": np.dtype("u2")},
    "b128": WIDE,
}
#: numpy type in which a register of a given width is stored
STORE = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8"), 128: WIDE}


WARPGROUP = -2
"""The ``Op.converge`` of instructions that the four warps of a warpgroup execute together."""


@dataclass(frozen=True)
class Op:
    """The meaning of one instruction.

    ``fn`` gets arrays of the view types of ``src``, and returns one array, or a tuple if there are several results.
    ``dst`` and ``src`` have a type for each operand: a PTX type, a tuple of types for ``{...}``, ``("pair", d, p)`` for
    ``d|p``, ``"addr"`` for ``[...]`` (passed as base array and byte offset), or ``"static"`` (not passed, because the
    builder has read it).
    ``klass`` is the class of the instruction in counters and checks.
    ``context`` says whether ``fn`` first gets the group and the mask of active lanes, and may access memory and lanes.
    ``relaxed`` says whether registers may be wider than an integer or bit type, but not than a floating-point type (ld,
    st, cvt; PTX ISA, "Operand Size Exceeding Instruction-Type Size").
    ``converge`` names the lanes that must meet: it is the index of the source operand with the member mask, -1 for
    every live lane of the warp, or ``WARPGROUP`` for every live lane of the warpgroup.
    ``control`` says how the instruction ends its block: "", "branch", "exit", "barrier", "wait", "table" or "trap". The
    ``fn`` of a "wait" returns None when every row may go on, else an ``engine.Wait``.
    ``poll`` marks an instruction that asks whether something has happened (mbarrier.test_wait, try_wait). It begins a
    block, so that a loop which only asks can be recognised and parked.
    """

    fn: Callable[..., Any] | None
    dst: tuple = ()
    src: tuple = ()
    klass: str = "integer"
    context: bool = False
    relaxed: bool = False
    converge: int | None = None
    control: str = ""
    poll: bool = False


class Mods:
    """The modifiers of one instruction, consumed from left to right; a modifier that is left at the end is an error."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.left = list(instruction.mods)

    def take(self, *allowed: str, default: str | None = "", required: bool = False) -> str:
        """Consumes and returns the next modifier if it is one of ``allowed``. Otherwise returns ``default`` or, if
        ``required``, raises ``UnsupportedInstruction``."""
        if self.left and self.left[0] in allowed:
            return self.left.pop(0)
        if required:
            raise self.refuse(f"expected one of .{' .'.join(allowed)}")
        return default

    def words(self, *names: str) -> None:
        """Consumes the next modifiers, which must be ``names``."""
        for name in names:
            self.take(name, required=True)

    def flag(self, name: str) -> bool:
        """Consumes the next modifier if it is ``name``; returns whether it is."""
        return bool(self.take(name))

    def type(self, *allowed: str) -> str:
        """Consumes and returns the next modifier, which must be one of the types ``allowed``."""
        return self.take(*allowed, required=True)

    def refuse(self, why: str) -> UnsupportedInstruction:
        """Returns the error for a form that is not modelled."""
        return UnsupportedInstruction(f"{why}: {self.instruction.where()}")

    def done(self) -> None:
        if self.left:
            raise self.refuse(f"modifier .{self.left[0]} of `{self.instruction.base}` is not modelled here")


Builder = Callable[[Instruction, Mods, Kernel], Op]
OPCODES: dict[str, Builder] = {}
FLOAT_FORMS: dict[str, Builder] = {}
"""Builders of the floating-point forms of opcodes that integers have too."""
_FLOATS = ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2", "f32x2")


def opcode(*names: str, table: dict[str, Builder] = OPCODES) -> Callable[[Builder], Builder]:
    """Returns a decorator that registers a builder for base opcodes; raises ``ValueError`` for a registered one."""

    def register(builder: Builder) -> Builder:
        for name in names:
            if name in table:
                raise ValueError(f"opcode {name} is registered twice")
            table[name] = builder
        return builder

    return register


def float_form(*names: str) -> Callable[[Builder], Builder]:
    """Returns a decorator that registers a builder for the floating-point forms of base opcodes."""
    return opcode(*names, table=FLOAT_FORMS)


def plain(
    functions: Mapping[str, Callable], types: Sequence[str], src: tuple = ("",), dst: str = "", klass: str = "integer"
) -> None:
    """Registers opcodes whose one modifier is a type of ``types``; "" in ``src`` and ``dst`` stands for that type."""

    def build(i: Instruction, m: Mods, k: Kernel) -> Op:
        t = m.type(*types)
        return Op(functions[i.base], (dst or t,), tuple(s or t for s in src), klass)

    opcode(*functions)(build)


def lookup(instruction: Instruction, kernel: Kernel) -> Op:
    """Returns the meaning of ``instruction``; raises ``UnsupportedInstruction`` if it is not exactly modelled."""
    base = instruction.base
    builder = OPCODES.get(base)
    if base in FLOAT_FORMS and any(m in _FLOATS for m in instruction.mods):
        builder = FLOAT_FORMS[base]
    if builder is None:
        raise UnsupportedInstruction(f"the simulator does not know `{instruction.opcode}`: {instruction.where()}")
    mods = Mods(instruction)
    try:
        op = builder(instruction, mods, kernel)
    except IndexError:
        # builders index the operands by position
        raise mods.refuse(f"{len(instruction.operands)} operands are too few") from None
    mods.done()
    want = len(op.dst) + len(op.src)
    if len(instruction.operands) != want:
        raise UnsupportedInstruction(
            f"`{instruction.opcode}` takes {want} operands here, not {len(instruction.operands)}: {instruction.where()}"
        )
    return op


def bits(type_name: str) -> int:
    """Returns the width of a type in bits."""
    return TYPE_BITS[type_name]

"""The data model of a parsed PTX module: operands, instructions, parameters, kernels.

Nothing here knows what an instruction does: ``isa`` defines that, and ``flow`` cuts kernels into blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: width in bits of every type (PTX ISA, "Types")
TYPE_BITS = {
    "pred": 1,
    **{f"{k}{n}": n for k in "bus" for n in (8, 16, 32, 64)},
    **{"b128": 128, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64, "f32x2": 64},
    **{"tf32": 32, "e4m3": 8, "e5m2": 8, "e4m3x2": 16, "e5m2x2": 16, "e2m1x2": 8, "ue8m0x2": 16},
    **{"e2m3x2": 16, "e3m2x2": 16},
}


MOST_OF_NAME, MOST_OF_TEXT = 60, 150
"""The most characters that messages show of a kernel's name, and of an instruction."""


def clipped(text: str, most: int = MOST_OF_NAME) -> str:
    """Returns ``text`` cut to ``most`` characters for a message; names of compiled kernels have hundreds."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _shorter(text: str) -> str:
    """Returns an instruction for a message: clipped, and with long lists of registers cut in the middle."""
    return clipped(_LIST.sub(_ends, text), MOST_OF_TEXT)


_LIST = re.compile(r"\{([^{}]*)\}")


def _ends(found: re.Match[str]) -> str:
    items = [item.strip() for item in found.group(1).split(",")]
    return found.group(0) if len(items) <= 8 else f"{{{items[0]}, {items[1]}, …, {items[-1]}}}"


@dataclass(frozen=True)
class Reg:
    """A register, or ``!name`` if it is ``negated``. Names of inner scopes carry a suffix, so that they are unique."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    """A constant. ``kind`` is "int" (``value`` is the integer), or "f32" or "f64" (``value`` holds the bits)."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A variable, parameter or label, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """An address ``[base + offset]``; ``extra`` has the operands after a comma in the brackets (TMA coordinates)."""

    base: Reg | Symbol | Imm
    offset: int = 0
    extra: tuple = ()


@dataclass(frozen=True)
class Vector:
    """A vector operand ``{a, b, ...}``."""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """A pair ``d|p``: a destination and a predicate that is written with it."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """The operand ``_``: a destination whose value is discarded."""


Operand = Reg | Imm | Special | Symbol | Address | Vector | Pair | Sink


@dataclass
class Instruction:
    """One instruction. Its ``opcode`` consists of ``base`` and the modifiers ``mods``."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Reg | None  #: the predicate under which it executes
    text: str
    line: int  #: its line in the PTX
    loc: str = ""  #: "file:line" of its source, if a .loc names it

    def __post_init__(self) -> None:
        self.base, *mods = self.opcode.split(".")
        self.mods = tuple(mods)

    def where(self) -> str:
        """Returns the instruction and its place, as messages show them."""
        return f"`{_shorter(self.text)}` (PTX line {self.line}{', ' + self.loc if self.loc else ''})"


@dataclass(frozen=True)
class Param:
    """A kernel parameter; ``offset`` in parameter space, ``size`` and ``align`` are in bytes."""

    name: str
    type: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A variable in ``space`` (shared, local, global or const), in bytes; ``size`` 0 marks dynamic shared memory."""

    name: str
    space: str
    size: int
    align: int
    init: bytes = b""


@dataclass
class Kernel:
    """A kernel before it is cut into blocks."""

    name: str
    params: tuple[Param, ...] = ()
    regs: dict[str, str] = field(default_factory=dict)  #: the type of each register
    variables: dict[str, Variable] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  #: the index in ``code`` of each label
    branch_tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  #: the labels of each .branchtargets
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  #: performance directives and their values

    @property
    def param_bytes(self) -> int:
        """The size of parameter space in bytes."""
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class Module:
    """A PTX module. ``target`` is like ``sm_100a``; ``files`` maps the numbers of .file directives to paths."""

    version: str = ""
    target: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

"""What a PTX module is made of, once read: operands, instructions, parameters, kernels.

Nothing here knows what an instruction does; ``isa`` says that, and ``flow`` cuts kernels into blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: width in bits of every fundamental type (PTX ISA, "Types")
TYPE_BITS = {
    "pred": 1,
    **{f"{k}{n}": n for k in "bus" for n in (8, 16, 32, 64)},
    **{"b128": 128, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64, "f32x2": 64},
    **{"tf32": 32, "e4m3": 8, "e5m2": 8, "e4m3x2": 16, "e5m2x2": 16, "e2m1x2": 8, "ue8m0x2": 16},
    **{"e2m3x2": 16, "e3m2x2": 16},
}


MOST_OF_NAME, MOST_OF_TEXT = 60, 150
"""Characters of a kernel's name, and of an instruction, that messages show."""


def clipped(text: str, most: int = MOST_OF_NAME) -> str:
    """``text`` for a message: names of compiled kernels have hundreds of characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _shorter(text: str) -> str:
    """An instruction with its long lists of registers cut in the middle, and clipped."""
    return clipped(_LIST.sub(_ends, text), MOST_OF_TEXT)


_LIST = re.compile(r"\{([^{}]*)\}")


def _ends(found: re.Match[str]) -> str:
    items = [item.strip() for item in found.group(1).split(",")]
    return found.group(0) if len(items) <= 8 else f"{{{items[0]}, {items[1]}, …, {items[-1]}}}"


@dataclass(frozen=True)
class Reg:
    """A register; ``name`` is unique in the kernel (names of inner scopes carry a suffix)."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    """A constant: ``kind`` is "int" (``value`` is the integer) or "f32"/"f64" (``value`` holds the bits)."""

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
    """``[base + offset]``; ``extra`` holds what follows a comma inside the brackets (TMA coordinates)."""

    base: Reg | Symbol | Imm
    offset: int = 0
    extra: tuple = ()


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """``d|p``: a destination with a predicate beside it."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """``_``: a destination that is thrown away."""


Operand = Reg | Imm | Special | Symbol | Address | Vector | Pair | Sink


@dataclass
class Instruction:
    """One instruction: ``opcode`` as written, split into ``base`` and ``mods``; ``guard`` is its predicate."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Reg | None
    text: str
    line: int
    loc: str = ""

    def __post_init__(self) -> None:
        self.base, *mods = self.opcode.split(".")
        self.mods = tuple(mods)

    def where(self) -> str:
        """The instruction as an error should show it."""
        return f"`{_shorter(self.text)}` (PTX line {self.line}{', ' + self.loc if self.loc else ''})"


@dataclass(frozen=True)
class Param:
    """A kernel parameter: byte ``offset`` in parameter space, ``size`` and ``align`` in bytes."""

    name: str
    type: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A variable in ``space`` (shared, local, global or const); ``size`` 0 marks dynamic shared memory."""

    name: str
    space: str
    size: int
    align: int
    init: bytes = b""


@dataclass
class Kernel:
    """A kernel before it is cut into blocks; ``labels`` map to indices of ``code``."""

    name: str
    params: tuple[Param, ...] = ()
    regs: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        """Bytes of parameter space."""
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class Module:
    """A PTX module: target (``sm_100a``), version, kernels, and module-scope variables."""

    version: str = ""
    target: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

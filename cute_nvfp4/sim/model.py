"""What a PTX module is made of, once read: operands, instructions, parameters, kernels.

Nothing here knows what an instruction does; ``isa`` says that, and ``flow`` cuts kernels into blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: width in bits of every fundamental type (PTX ISA, "Types")
TYPE_BITS = {
    "pred": 1,
    **{f"{k}{n}": n for k in "bus" for n in (8, 16, 32, 64)},
    **{"b128": 128, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64, "f32x2": 64},
    **{"tf32": 32, "e4m3": 8, "e5m2": 8, "e4m3x2": 16, "e5m2x2": 16, "e2m1x2": 8, "ue8m0x2": 16},
}


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
        return f"`{self.text}` (PTX line {self.line}{', ' + self.loc if self.loc else ''})"


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

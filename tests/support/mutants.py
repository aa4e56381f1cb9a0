"""Broken kernels that tests must notice: changes at named sites of the compiled PTX, or of the traced source.

A site is a set of PTX instructions (``at``: the beginning of their opcode, and which of them); a change says what
becomes of them: ``drop``, ``become``, ``operand``, ``offset``, ``unguarded``, ``instead``, ``constant``. Registers,
labels, the notation of numbers and the order of other instructions do not matter. ``Source`` replaces a function or a
constant of a traced module. :func:`outcome` runs a mutant in the simulator and says what noticed it.

Mutants of every synchronising instruction at once, for the simulator's own tests, are in ``tests/simulator/mutation``.
"""

from __future__ import annotations

import contextlib
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cute_nvfp4 import simulating
from cute_nvfp4.errors import SimError
from cute_nvfp4.ops.operation import OPERATIONS
from cute_nvfp4.runtime import kernel as compiling
from cute_nvfp4.runtime.bounded import Bounded
from cute_nvfp4.runtime.cache import CompiledKernel
from support.scratch_flags import keeping_flags, lowered

BOTH = ("sm_100a", "sm_90a")
BLACKWELL, HOPPER = ("sm_100a",), ("sm_90a",)
WRONG = "wrong"
"""The answer of :func:`outcome` if the result is wrong and nothing was reported."""
_INSTRUCTION = re.compile(
    r"(?<![\w.%$@])(?P<guard>@!?%?\w+[ \t]+)?(?P<opcode>[a-z][a-z0-9_]*(?:(?:\.|::)\w+)*)(?P<rest>[ \t]+[^;\n]*)?;"
)


def f32(value: float) -> int:
    """The bits of a float32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def f16(value: float) -> int:
    return struct.unpack("<H", struct.pack("<e", value))[0]


def twice(half: int) -> int:
    """The same sixteen bits in both halves of a word."""
    return half << 16 | half


def bits(text: str) -> int | None:
    """The 32 bits of a number in any of PTX's notations; None for any other text."""
    if re.fullmatch(r"-?\d+", text):
        return int(text) & 0xFFFFFFFF
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return int(text, 16) & 0xFFFFFFFF
    return int(text[2:], 16) if re.fullmatch(r"0f[0-9a-fA-F]{8}", text) else None


@dataclass(frozen=True)
class Instruction:
    """One instruction. An operand in brackets or braces counts as one."""

    guard: str
    opcode: str
    operands: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        """The instruction as PTX text."""
        return f"{self.guard}{self.opcode} {', '.join(self.operands)};"


Edit = Callable[[Instruction], str | None]
"""Maps an instruction to what replaces it; None where the instruction is not a site."""


@dataclass(frozen=True)
class Ptx:
    """Applies ``edit`` to the instructions whose opcode begins with ``opcode``: to all that it changes, or to some of
    them.

    which: a slice of the sites in the order of the text. before: limits the sites to those before the first instruction
    whose opcode begins so.
    """

    opcode: str
    edit: Edit
    which: slice = field(default_factory=lambda: slice(None))
    before: str = ""

    def apply(self, ptx: str) -> tuple[str, int]:
        """The mutant's PTX, and how many sites it changes."""
        sites = []
        for found in _INSTRUCTION.finditer(ptx):
            if self.before and found["opcode"].startswith(self.before):
                break
            if found["opcode"].startswith(self.opcode):
                operands = tuple(split((found["rest"] or "").strip()))
                new = self.edit(Instruction(found["guard"] or "", found["opcode"], operands, found[0]))
                if new is not None and new != found[0]:
                    sites.append((found.span(), new))
        chosen = sites[self.which]
        for (start, end), new in reversed(chosen):
            ptx = ptx[:start] + new + ptx[end:]
        return ptx, len(chosen)


@dataclass(frozen=True)
class Text:
    """Replaces the first ``count`` (0: all) matches of ``pattern`` by ``new``: for sites of several instructions."""

    pattern: str
    new: str
    count: int = 0

    def apply(self, ptx: str) -> tuple[str, int]:
        return re.subn(self.pattern, self.new, ptx, count=self.count)


@dataclass(frozen=True)
class Source:
    """Replaces a function or a constant of ``module`` by ``value`` while kernels are traced."""

    module: Any
    name: str
    value: Any


Change = Ptx | Text | Source


@dataclass(frozen=True)
class Mutant:
    """A change that must be noticed on ``case``. noticed: ``WRONG``, the name of an error, or "" for either."""

    name: str
    change: Change | None
    case: Any = None
    archs: tuple[str, ...] = BOTH
    noticed: str = WRONG

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


def split(text: str) -> list[str]:
    """Splits operands at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


# --- sites and changes

FIRST, LAST, ALL = slice(0, 1), slice(-1, None), slice(None)


def at(opcode: str, edit: Edit, which: slice = ALL, before: str = "") -> Ptx:
    return Ptx(opcode, edit, which, before)


def where(condition: Callable[[Instruction], bool], edit: Edit) -> Edit:
    """``edit`` for the instructions that meet the condition."""
    return lambda x: edit(x) if condition(x) else None


def guarded(x: Instruction) -> bool:
    """Whether an instruction has the predicate of a load in inline PTX."""
    return x.guard == "@p "


def without(index: int) -> Edit:
    """Removes one operand."""
    return lambda x: str(replace(x, operands=(*x.operands[:index], *x.operands[index + 1 :])))


def drop() -> Edit:
    """Removes the instruction."""
    return lambda x: ""


def become(opcode: str, other: str) -> Edit:
    """Replaces ``opcode`` in the opcode's name by ``other``."""
    return lambda x: str(replace(x, opcode=x.opcode.replace(opcode, other))) if opcode in x.opcode else None


def instead(text: str) -> Edit:
    """Replaces the instruction by others: ``{0}``, ``{1}`` … are its operands, ``{this}`` is the whole instruction."""

    def edit(x: Instruction) -> str | None:
        try:
            return text.format(*x.operands, this=x.text)
        except IndexError:
            return None

    return edit


def operand(index: int, new: str) -> Edit:
    """Replaces one operand: ``{0}``, ``{1}`` … are the present operands."""

    def edit(x: Instruction) -> str | None:
        if index >= len(x.operands):
            return None
        operands = (*x.operands[:index], new.format(*x.operands), *x.operands[index + 1 :])
        return str(replace(x, operands=operands))

    return edit


def number(index: int, old: int, new: int) -> Edit:
    """Replaces the number ``old`` in operand ``index`` by ``new``."""

    def edit(x: Instruction) -> str | None:
        if index >= len(x.operands) or bits(x.operands[index]) != old & 0xFFFFFFFF:
            return None
        return str(replace(x, operands=(*x.operands[:index], str(new), *x.operands[index + 1 :])))

    return edit


def constant(old: int, new: int) -> Edit:
    """Replaces ``old`` wherever it is the 32 bits of an operand, and keeps the notation."""

    def edit(x: Instruction) -> str | None:
        if not any(bits(o) == old & 0xFFFFFFFF for o in x.operands):
            return None
        return str(replace(x, operands=tuple(_like(o, new) if bits(o) == old & 0xFFFFFFFF else o for o in x.operands)))

    return edit


def _like(old: str, new: int) -> str:
    new &= 0xFFFFFFFF
    if old.startswith("0f"):
        return f"0f{new:08X}"
    return f"{new:#x}" if old.startswith("0x") else str(new - (1 << 32) if new >> 31 else new)


def offset(by: int) -> Edit:
    """Moves the address of the last operand in brackets by ``by`` bytes."""

    def edit(x: Instruction) -> str | None:
        places = [i for i, o in enumerate(x.operands) if o.startswith("[")]
        if not places:
            return None
        found = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", x.operands[places[-1]])
        if not found:
            return None
        new = f"[{found[1]}+{int(found[2] or 0) + by}]"
        return str(replace(x, operands=(*x.operands[: places[-1]], new, *x.operands[places[-1] + 1 :])))

    return edit


def unguarded() -> Edit:
    """Removes the predicate."""
    return where(guarded, lambda x: str(replace(x, guard="")))


# --- running them


def plan_anew(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` is undone, operations plan all calls again; these plans are discarded afterwards."""
    modules = [module for name, module in sys.modules.items() if name.startswith("cute_nvfp4.")]
    for owner in (*modules, *OPERATIONS.values()):
        for name, kept in [(name, kept) for name, kept in vars(owner).items() if isinstance(kept, Bounded)]:
            patch.setattr(owner, name, type(kept)())


@contextlib.contextmanager
def mutated(change: Change | None, arch: str | None = None, kernel: str = "", **options: Any) -> Iterator[list]:
    """Within this block kernels run in the simulator with ``change``: those called ``kernel``, or all. Yields the
    launches.

    Raises:
        AssertionError: at its end, if ``change`` found no site in any PTX.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(change, Source):
            stack.enter_context(traced_with(change))
            yield stack.enter_context(simulating(arch, **options))
            return
        kept: dict[int, tuple[CompiledKernel, CompiledKernel, int]] = {}

        def replaced(found: CompiledKernel) -> CompiledKernel:
            if change is None or kernel not in ("", found.name):
                return found
            if id(found) not in kept:
                ptx, count = change.apply(found.ptx)
                kept[id(found)] = found, replace(found, ptx=ptx), count
            return kept[id(found)][1]

        runs = stack.enter_context(simulating(arch, kernel=replaced, **options))
        try:
            yield runs
        finally:
            sites = sum(count for *_, count in kept.values())
            assert change is None or sites, f"the kernel no longer has what the mutant changes: {change}"


@contextlib.contextmanager
def traced_with(change: Source) -> Iterator[None]:
    """Within this block kernels are traced with ``change``, on any backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change.module, change.name, change.value)
        # use no earlier compilation, and leave none behind
        patch.setattr(compiling, "compile_cached", lambda key, build: build())
        plan_anew(patch)
        yield


def outcome(
    change: Change | None, right: Callable[[], bool], arch: str | None = None, kernel: str = "", **options: Any
) -> str:
    """What notices ``change``: the name of the simulator's error; ``WRONG`` if ``right()`` is false or a scratch flag
    stays raised; or ""."""
    try:
        with mutated(change, arch, kernel, **options), keeping_flags() as flags:
            return "" if right() and lowered(flags) else WRONG
    except SimError as error:
        return type(error).__name__


def parameters(mutants: tuple[Mutant, ...]) -> list:
    """The cases of ``parametrize("mutant,arch", …)``: each mutant on each of its architectures."""
    return [pytest.param(m, arch, id=f"{m}-{arch}") for m in mutants for arch in m.archs]


def is_noticed(found: str, mutant: Mutant) -> bool:
    return found == mutant.noticed if mutant.noticed else bool(found)

"""Changes one thing of PTX at random. The simulator may report a hazard, name an error, or give a result; but it must
not crash or hang."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from cute_nvfp4.errors import CuteNvfp4Error
from tests.long.depends import PACKED
from tests.long.family import Family, Once
from tests.simulator.mutation import subjects

INSTRUCTIONS = 50_000
"""The limit of executed instructions: more than five times what any of the kernels executes, and at most some ten
seconds."""
CHANGES = ("drop", "twice", "exchange", "operand", "number", "modifier", "character")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%?\w+\s+)?[a-z][\w.:]*\s.*;\s*$")
_WORD = re.compile(r"%\w+")
_NUMBER = re.compile(r"(?<![\w%.$])-?(?:0x[0-9a-fA-F]+|\d+)(?![\w.])")
_MODIFIER = re.compile(r"\.[a-z_]\w*(?:::\w+)*")


@dataclass(frozen=True)
class FuzzCase:
    """One change of a kernel, which follows entirely from ``seed``."""

    kernel: str
    seed: int


def draw(generator: np.random.Generator, arch: str) -> FuzzCase:
    return FuzzCase(str(generator.choice(subjects.names(arch))), int(generator.integers(1 << 30)))


def prepare(case: FuzzCase) -> Once:
    return lambda: run(case)


def run(case: FuzzCase) -> None:
    """Runs the case; raises for an outcome that is none of our errors or a result."""
    one = subjects.subject(case.kernel)
    try:
        one.run(fuzzed(one.ptx, case.seed), checks=True, instruction_limit=INSTRUCTIONS)
    except CuteNvfp4Error:
        pass


def fuzzed(ptx: str, seed: int) -> str:
    """The text with one instruction changed."""
    generator = np.random.default_rng(seed)
    lines = ptx.split("\n")
    places = [i for i, line in enumerate(lines) if _INSTRUCTION.match(line)]
    at = places[generator.integers(len(places))]
    other = places[generator.integers(len(places))]
    line, change = lines[at], CHANGES[generator.integers(len(CHANGES))]
    if change == "drop":
        lines[at] = ""
    elif change == "twice":
        lines[at] = line + "\n" + line
    elif change == "exchange":
        lines[at], lines[other] = lines[other], line
    elif change == "character":
        where = int(generator.integers(len(line)))
        lines[at] = line[:where] + str(generator.choice(list("%.,;[]{}0x-@ "))) + line[where + 1 :]
    else:
        pattern = {"operand": _WORD, "number": _NUMBER, "modifier": _MODIFIER}[change]
        new = pattern.findall(lines[other]) or [str(int(generator.integers(-(1 << 31), 1 << 32)))]
        lines[at] = _replaced(line, pattern, str(generator.choice(new)), generator)
    return "\n".join(lines)


def _replaced(line: str, pattern: re.Pattern[str], new: str, generator: np.random.Generator) -> str:
    """Changes one of the places of ``line`` that match."""
    found = list(pattern.finditer(line))
    if not found:
        return line
    one = found[generator.integers(len(found))]
    return line[: one.start()] + new + line[one.end() :]


FAMILIES = (
    Family(
        "fuzzed-ptx", FuzzCase, prepare, draw, archs=subjects.ARCHS, weight=4, goal=700,
        ptx=lambda case: subjects.subject(case.kernel).ptx, rooms=(*PACKED, "harness/problems/data.py"),
    ),
)  # fmt: skip

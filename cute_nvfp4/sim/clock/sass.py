"""Reads the machine code (SASS) of a kernel, with the PTX instruction that each SASS instruction comes from.

Each PTX instruction gets a line number of its own before ptxas compiles it, which nvdisasm then shows. The upper bits
of a SASS instruction control the scheduler: how many cycles until the warp's next instruction may issue, which
scoreboards to wait for, which ones to release ("Control codes", Jia et al. 2018, arXiv:1804.06826, table 2.1; unchanged
since Volta).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cute_nvfp4.sim.clock.loops import loops_around
from cute_nvfp4.sim.errors import ClockError
from cute_nvfp4.sim.frontend.model import Kernel

NO_SCOREBOARD = 7
_ENDS = {"BRA", "BRX", "JMP", "EXIT", "RET", "BREAK", "CALL"}


class Slot(NamedTuple):
    """One SASS instruction. Where it releases no scoreboard, ``releases`` and ``reads`` are ``NO_SCOREBOARD``."""

    base: str  # the opcode without modifiers
    opcode: str
    operands: str
    source: int  # index of its PTX instruction, -1 for none
    stall: int  # cycles until the warp's next instruction may issue
    releases: int  # the scoreboard that is released when the result is there
    reads: int  # the scoreboard that is released when the operands have been read
    waits: tuple[int, ...]  # the scoreboards that it waits for
    predicate: str = ""
    address: int = 0  # byte offset in the kernel's code

    @property
    def text(self) -> str:
        """The instruction as nvdisasm writes it."""
        return " ".join(filter(None, (self.predicate, self.opcode, self.operands)))


class Placed(NamedTuple):
    """A slot, and where it lies in a kernel's code."""

    slot: Slot
    segment: int  # the number of its run of instructions without a label or a branch inside
    slow: bool = False  # whether it is on a path that is never replayed, such as a division's for subnormal numbers
    loops: int = 0  # how many loops of the code it lies in


_HEAD = re.compile(r"^(?:[{}\s]|[\w$%]+:(?!:))*")
_PLACE = re.compile(r"\s*\.(?:loc|file)\b")  # and not .local
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def numbered(ptx: str, kernel: Kernel) -> str:
    """Returns ``ptx`` with a ``.loc`` for each instruction of ``kernel``, whose line is the instruction's index plus 1.
    Raises ``ClockError`` if the text and ``kernel`` differ."""
    text = _COMMENT.sub("", ptx)
    text = "\n".join(line for line in text.split("\n") if not _PLACE.match(line))
    text, _, _ = text.partition(".section")
    start = re.search(r"\.entry\s+" + re.escape(kernel.name) + r"\b", text)
    if start is None:
        raise ClockError.of("the PTX", got="no entry", expected=kernel.name)
    begin = text.index("{", start.end())
    end = _closing(text, begin)
    out, number = [], 0
    for statement in text[begin + 1 : end].split(";"):
        head = _HEAD.match(statement).group()
        body = statement[len(head) :].strip()
        if body and not body.startswith("."):
            if number >= len(kernel.code) or not _same(body, kernel.code[number].opcode):
                raise ClockError.of("the PTX", got=body[:80], expected=f"instruction {number} of {kernel.name}")
            number += 1
            out.append(f"{head}\n.loc 1 {number} 1\n{body};\n")
        else:
            out.append(f"{statement}{';' if body else ''}\n")
    head = re.sub(r"(\.address_size\s+64)", r'\1\n.file 1 "kernel.ptx"', text[: begin + 1], count=1)
    return head + "".join(out) + text[end:]


def _same(statement: str, opcode: str) -> bool:
    words = statement.split()
    return (words[1] if words[0].startswith("@") else words[0]) == opcode


def _closing(text: str, begin: int) -> int:
    depth = 0
    for found in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return begin + found.start()
    raise ClockError.of("the PTX", got="an open brace", expected="its end")


_LINE = re.compile(r'\s*//## File "kernel\.ptx", line (\d+)')
_SLOT = re.compile(r"\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);\s+/\* 0x[0-9a-f]{16} \*/")
_TARGET = re.compile(r"`\(([\w.$]+)\)")
_SECOND = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/\s*$")


def read(text: str, name: str) -> list[Placed]:
    """Returns the instructions of kernel ``name`` in the text of nvdisasm, in the order of the code."""
    out: list[Placed] = []
    labels: dict[str, int] = {}
    source, segment, here, slow, pending = -1, 0, False, False, None
    for line in text.split("\n"):
        if line.lstrip().startswith(".section\t"):
            here = f".text.{name}," in line
        if not here:
            continue
        if found := _LINE.match(line):
            source = int(found[1]) - 1
        elif found := re.match(r"((\.L_|\$)[\w$]+):", line):
            segment += 1
            labels[found[1]] = segment
            slow |= found[2] == "$" and "slowpath" in line
        elif found := _SLOT.match(line):
            pending = found
        elif pending is not None and (found := _SECOND.match(line)):
            slot = _slot(pending, source, int(found[1], 16))
            out.append(Placed(slot, segment, slow))
            segment += slot.base in _ENDS
            slow &= slot.base != "RET"
            pending = None
    while out and out[-1].slot.base in ("NOP", "BRA"):  # padding behind the end
        out.pop()
    calls = {p.segment for p in out if p.slot.base == "CALL" and "slowpath" in p.slot.operands}
    around = loops_around(_after(out, labels), out[0].segment) if out else {}
    return [p._replace(slow=p.slow or p.segment in calls, loops=len(around[p.segment])) for p in out]


def _after(placed: Sequence[Placed], labels: Mapping[str, int]) -> dict[int, set[int]]:
    """Returns the segments to which control can go from each segment."""
    last = {p.segment: p.slot for p in placed}
    order, after = sorted(last), dict[int, set[int]]()
    for here, following in zip(order, [*order[1:], -1]):
        slot = last[here]
        target = _TARGET.search(slot.operands) if slot.base == "BRA" else None
        ends = slot.base in _ENDS - {"CALL"} and not slot.predicate and "UP" not in slot.operands
        # a label without an instruction is one of the next segment
        to = next((x for x in order if target and x >= labels.get(target[1], order[-1] + 1)), -1)
        after[here] = {to, -1 if ends else following} - {-1}
    return after


def _slot(found: re.Match[str], source: int, high: int) -> Slot:
    control = high >> 41
    waits = tuple(k for k in range(6) if control >> (11 + k) & 1)
    opcode = found[3]
    return Slot(
        opcode.split(".")[0],
        opcode,
        found[4].strip(),
        source,
        max(1, control & 15),
        control >> 5 & 7,
        control >> 8 & 7,
        waits,
        (found[2] or "").strip(),
        int(found[1], 16),
    )

"""The machine code of a kernel, instruction by instruction, laid beside its PTX.

Each PTX instruction gets a line number of its own before ptxas sees it, so that nvdisasm tells which one a SASS
instruction comes from. The last bits of a SASS instruction are for the scheduler: how many cycles until the next one of
the warp may issue, which scoreboards to wait for, which one to release ("Control codes", Jia et al. 2018,
arXiv:1804.06826, table 2.1; unchanged since Volta).
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
    """One SASS instruction. ``base`` is its name without modifiers, ``source`` the index of its PTX instruction."""

    base: str
    opcode: str
    operands: str
    source: int
    stall: int
    releases: int
    reads: int
    waits: tuple[int, ...]
    predicate: str = ""
    address: int = 0

    @property
    def text(self) -> str:
        """The instruction as nvdisasm writes it."""
        return " ".join(filter(None, (self.predicate, self.opcode, self.operands)))


class Placed(NamedTuple):
    """A slot in a kernel's code. ``segment`` numbers runs without a label or a branch. ``slow``: it belongs to a slow
    path of a division or a root, for what is not a normal number. ``loops``: how many loops of the code it lies in."""

    slot: Slot
    segment: int
    slow: bool = False
    loops: int = 0


_HEAD = re.compile(r"^(?:[{}\s]|[\w$%]+:(?!:))*")
_PLACE = re.compile(r"\s*\.(?:loc|file)\b")  # and not .local
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def numbered(ptx: str, kernel: Kernel) -> str:
    """``ptx`` with a ``.loc`` for each instruction of ``kernel``: the line is its index, from 1."""
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
    """The instructions of one kernel in the text of nvdisasm."""
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
    """Where control can go from each segment."""
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

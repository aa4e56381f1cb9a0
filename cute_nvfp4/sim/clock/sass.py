"""The machine code of a kernel, instruction by instruction, laid beside its PTX.

Each PTX instruction gets a line number of its own before ptxas sees it, so that nvdisasm tells which one a SASS
instruction comes from. The last bits of a SASS instruction are for the scheduler: how many cycles until the next one of
the warp may issue, which scoreboards to wait for, which one to release ("Control codes", Jia et al. 2018,
arXiv:1804.06826, table 2.1; unchanged since Volta).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from cute_nvfp4.sim.clock import tools
from cute_nvfp4.sim.errors import ClockError
from cute_nvfp4.sim.frontend.flow import Block, successors
from cute_nvfp4.sim.frontend.model import Kernel

NO_SCOREBOARD = 7
_ENDS = {"BRA", "BRX", "JMP", "EXIT", "RET", "BREAK", "CALL"}
ANCHORS = {
    *("LDG", "LD", "STG", "ST", "LDGSTS", "ATOM", "ATOMG", "RED", "LDS", "STS", "LDSM", "STSM", "ATOMS", "UTMALDG"),
    *("UTMASTG", "UBLKCP", "SYNCS", "BAR", "HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "SHFL", "UTCHMMA"),
}
"""Instructions of which a PTX instruction makes one, so that two of them are two passes."""


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


@dataclass(frozen=True)
class MachineCode:
    """``leads`` gives each PTX block the first one of its chain; ``blocks`` has at a first one the slots of the whole
    chain, ``passes`` how many passes of it they are. ``registers`` of a thread. ``opcodes`` is the whole kernel in
    order."""

    leads: tuple[int, ...]
    blocks: tuple[tuple[Slot, ...], ...]
    passes: tuple[int, ...]
    registers: int
    opcodes: tuple[str, ...]


class _Placed(NamedTuple):
    slot: Slot
    segment: int
    address: int


def machine_code(ptx: str, target: str, kernel: Kernel, blocks: Sequence[Block]) -> MachineCode:
    """Compiles and reads the kernel ``kernel`` of a PTX text whose blocks are ``blocks``."""
    cubin, registers = tools.assemble(numbered(ptx, kernel), target)
    placed = read(tools.disassemble(cubin), kernel.name)
    leads = chains(blocks)
    order = {id(i): n for n, i in enumerate(kernel.code)}
    parts: list[list[int]] = [[] for _ in blocks]
    for b in blocks:
        parts[leads[b.index]] += [order[id(i)] for i, _ in b.code]
    lists, passes = match(placed, parts)
    return MachineCode(tuple(leads), tuple(map(tuple, lists)), tuple(passes), registers, _opcodes(placed))


def _opcodes(placed: Sequence[_Placed]) -> tuple[str, ...]:
    return tuple(p.slot.opcode for p in placed)


def differing(code: MachineCode, cubin: bytes, name: str) -> int:
    """How many opcodes of the kernel ``name`` of a cubin are not those of ``code``, place by place."""
    other = _opcodes(read(tools.disassemble(cubin), name))
    return sum(a != b for a, b in zip_longest(code.opcodes, other))


def chains(blocks: Sequence[Block]) -> list[int]:
    """The first block of the chain of each: blocks that always run one after the other."""
    before: Counter[int] = Counter(s for b in blocks for s in set(successors(b)))
    leads = list(range(len(blocks)))
    for b in blocks:
        after = set(successors(b))
        if len(after) == 1 and before[min(after)] == 1 and min(after) > b.index:
            leads[min(after)] = leads[b.index]
    return leads


_HEAD = re.compile(r"^(?:[{}\s]|[\w$%]+:(?!:))*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def numbered(ptx: str, kernel: Kernel) -> str:
    """``ptx`` with a ``.loc`` for each instruction of ``kernel``: the line is its index, from 1."""
    text = _COMMENT.sub("", ptx)
    text = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith((".loc", ".file")))
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
_SECOND = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/\s*$")


def read(text: str, name: str) -> list[_Placed]:
    """The instructions of one kernel in the text of nvdisasm; ``segment`` numbers runs without a label or a branch."""
    out: list[_Placed] = []
    source, segment, here, pending = -1, 0, False, None
    for line in text.split("\n"):
        if line.lstrip().startswith(".section\t"):
            here = f".text.{name}," in line
        if not here:
            continue
        if found := _LINE.match(line):
            source = int(found[1]) - 1
        elif re.match(r"\.L_\w+:", line):
            segment += 1
        elif found := _SLOT.match(line):
            pending = found
        elif pending is not None and (found := _SECOND.match(line)):
            slot = _slot(pending, source, int(found[1], 16))
            out.append(_Placed(slot, segment, int(pending[1], 16)))
            segment += slot.base in _ENDS
            pending = None
    while out and out[-1].slot.base in ("NOP", "BRA"):  # padding behind the end
        out.pop()
    return out


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
    )


def match(placed: Sequence[_Placed], blocks: Sequence[Sequence[int]]) -> tuple[list[list[Slot]], list[int]]:
    """(slots, passes) of each block of PTX instructions, as ``docs/timing.md`` says."""
    block_of = {index: b for b, indices in enumerate(blocks) for index in indices}
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for p in placed:
        if p.slot.source in block_of:
            counts[block_of[p.slot.source]][p.segment] += 1
    home = {b: max(sorted(c), key=c.__getitem__) for b, c in counts.items()}
    lives = defaultdict(list)
    for b, segment in home.items():
        lives[segment].append(b)
    at_home = {(p.slot.source, p.slot.base, p.segment) for p in placed}
    out: list[list[Slot]] = [[] for _ in blocks]
    last = 0
    for p in placed:
        b = block_of.get(p.slot.source, last)
        if b in home and p.segment != home[b]:
            if (p.slot.source, p.slot.base, home[b]) in at_home:
                continue  # a copy
            if lives[p.segment]:
                b = last if last in lives[p.segment] else lives[p.segment][0]  # moved
        out[b].append(p.slot)
        last = b
    return out, [_passes(slots) for slots in out]


def _passes(slots: Sequence[Slot]) -> int:
    found = Counter((s.source, s.base) for s in slots if s.base in ANCHORS)
    return min(found.values(), default=1)

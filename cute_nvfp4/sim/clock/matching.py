"""Which SASS instructions are issued when a block of PTX is executed, and what becomes of all the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from cute_nvfp4.sim.clock import tools
from cute_nvfp4.sim.clock.loops import loops_around
from cute_nvfp4.sim.clock.sass import Placed, Slot, numbered, read
from cute_nvfp4.sim.errors import ClockError
from cute_nvfp4.sim.frontend.flow import Block, successors
from cute_nvfp4.sim.frontend.model import Kernel

ANCHORS = {
    *("LDG", "LD", "STG", "ST", "LDGSTS", "ATOM", "ATOMG", "RED", "LDS", "STS", "LDSM", "STSM", "ATOMS", "UTMALDG"),
    *("UTMASTG", "UBLKCP", "SYNCS", "BAR", "HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "SHFL"),
    *("UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA", "UTCCP", "UTCBAR", "LDTM", "STTM"),
}
"""Instructions of which a PTX instruction makes one, so that two of them are two passes."""
FIXED = 1000
_BARRIERS = {"SYNCS", "BAR", "UCGABAR_ARV", "UCGABAR_WAIT"}
"""Barriers stay with their block. It lives where they are: each counts as many others."""


class Coverage(NamedTuple):
    """What became of a kernel's SASS instructions: they lie in the block of their PTX instruction, were moved to
    another one by ptxas, stand for no PTX instruction and go with the one before them; or are not issued: ``copies`` of
    a body that is issued already (peeled, unrolled, duplicated code), ``slow`` paths inside of a division or a root."""

    own: int
    moved: int
    unnamed: int
    copies: int
    slow: int

    @property
    def issued(self) -> float:
        """The share that the replay can issue."""
        return 1 - (self.copies + self.slow) / max(1, sum(self))


@dataclass(frozen=True)
class MachineCode:
    """``leads`` gives each PTX block the first one of its chain; ``holders`` at a first one the block in whose straight
    code ptxas has put it (itself, or another where it made predicated code of a branch, or unrolled all of a loop), and
    ``blocks`` there the slots of the whole chain, ``passes`` how many passes of it they are. ``registers`` of a thread.
    ``listing`` is the whole kernel in order, ``coverage`` what became of each of them."""

    leads: tuple[int, ...]
    holders: tuple[int, ...]
    blocks: tuple[tuple[Slot, ...], ...]
    passes: tuple[int, ...]
    registers: int
    listing: tuple[Slot, ...]
    coverage: Coverage

    @property
    def opcodes(self) -> tuple[str, ...]:
        return tuple(slot.opcode for slot in self.listing)


def machine_code(ptx: str, target: str, kernel: Kernel, blocks: Sequence[Block]) -> MachineCode:
    """Compiles and reads the kernel ``kernel`` of a PTX text whose blocks are ``blocks``."""
    cubin, registers = tools.assemble(numbered(ptx, kernel), target)
    placed = first_tries(read(tools.disassemble(cubin), kernel.name), kernel)
    leads = chains(blocks)
    order = {id(i): n for n, i in enumerate(kernel.code)}
    parts: list[list[int]] = [[] for _ in blocks]
    for b in blocks:
        parts[leads[b.index]] += [order[id(i)] for i, _ in b.code]
    around = loops_around({b.index: {s for s in successors(b) if s < len(blocks)} for b in blocks}, 0)
    depths = [len(around[b.index]) for b in blocks]
    lists, holders, coverage = match(placed, parts, _loops(blocks, leads), depths)
    if sum(map(len, lists)) + coverage.copies + coverage.slow != len(placed):
        raise ClockError.of(f"the machine code of {kernel.name}", got=f"{coverage}", expected=f"{len(placed)} in all")
    passes = tuple(map(_passes, lists))
    listing = tuple(p.slot for p in placed)
    return MachineCode(tuple(leads), holders, tuple(map(tuple, lists)), passes, registers, listing, coverage)


def first_tries(placed: Sequence[Placed], kernel: Kernel) -> list[Placed]:
    """``placed`` with the loops that wait for an mbarrier as a warp runs them. ptxas puts the first try in front of the
    loop, under the number of the PTX instruction before it, and the loop itself behind the kernel's code: only a warp
    whose first try has failed goes there. The first try is the wait's then, and the loop a ``slow`` path."""
    waits = {n for n, i in enumerate(kernel.code) if i.base == "mbarrier" and "try_wait" in i.mods}
    tries = {p.slot.source: p.segment for p in placed if _tries(p.slot)}
    out = list(placed)
    for k, p in enumerate(placed):
        wait = p.slot.source + 1
        if _tries(p.slot) and wait - 1 not in waits and wait in waits and tries.get(wait, -1) > p.segment:
            for n, other in enumerate(placed):
                if other.segment >= tries[wait] and wait <= other.slot.source <= wait + 2:
                    out[n] = other._replace(slow=True)
            out[k] = p._replace(slot=p.slot._replace(source=wait))
    return out


def _tries(slot: Slot) -> bool:
    return slot.base == "SYNCS" and "PHASECHK" in slot.opcode


def _loops(blocks: Sequence[Block], leads: Sequence[int]) -> Callable[[int, int], bool]:
    """Whether a chain can run again without another one running in between."""
    after: dict[int, set[int]] = defaultdict(set)
    for b in blocks:
        after[leads[b.index]] |= {leads[s] for s in successors(b) if s < len(leads)} - {leads[b.index]}
        after[leads[b.index]] |= {leads[s] for s in successors(b) if s == leads[b.index]}

    def loops(chain: int, without: int) -> bool:
        seen, left = {without}, [chain]
        while left:
            for s in after[left.pop()] - seen:
                if s == chain:
                    return True
                seen.add(s)
                left.append(s)
        return False

    return loops


def differing(code: MachineCode, cubin: bytes, name: str) -> int:
    """How many opcodes of the kernel ``name`` of a cubin are not those of ``code``, place by place."""
    other = (p.slot.opcode for p in read(tools.disassemble(cubin), name))
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


def match(
    placed: Sequence[Placed],
    blocks: Sequence[Sequence[int]],
    loops: Callable[[int, int], bool],
    depths: Sequence[int] | None = None,
) -> tuple[list[list[Slot]], tuple[int, ...], Coverage]:
    """The slots of each block of PTX instructions (docs/explanation/clock.md), its holder, and what became of all.

    ``loops`` says what ``_loops`` does; ``depths`` in how many loops each block lies.
    """
    block_of = {index: b for b, indices in enumerate(blocks) for index in indices}
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for p in placed:
        if p.slot.source in block_of and not p.slow:
            counts[block_of[p.slot.source]][p.segment] += FIXED if p.slot.base in _BARRIERS else 1
    inside = {p.segment: p.loops for p in placed}

    def rank(b: int, segment: int) -> tuple[int, int]:
        """ptxas may put most of a block in front of its loop, or make some of it again inside of others: it lives where
        it loops."""
        depth = inside[segment]
        return -1 if depths is not None and depth > depths[b] else depth, counts[b][segment]

    home = {b: max(sorted(c), key=lambda segment, b=b: rank(b, segment)) for b, c in counts.items()}
    lives = defaultdict(list)
    for b, segment in sorted(home.items()):
        lives[segment].append(b)
    at_home = {(p.slot.source, p.slot.base, p.segment) for p in placed}
    out: list[list[Slot]] = [[] for _ in blocks]
    last, fates = 0, Counter[str]()
    for p in placed:
        b, fate = block_of.get(p.slot.source, last), "own"
        if p.slow:
            fate = "slow"
        elif p.slot.source not in block_of or b not in home:
            fate = "unnamed"
        elif p.segment != home[b]:
            if (p.slot.source, p.slot.base, home[b]) in at_home:
                fate = "copies"
            elif lives[p.segment] and p.slot.base not in _BARRIERS:
                b, fate = last if last in lives[p.segment] else lives[p.segment][0], "moved"
            elif p.loops < inside[home[b]] and inside[home.get(last, p.segment)] < inside[home[b]]:
                b, fate = last, "moved"  # in front of its loop
        fates[fate] += 1
        if fate not in ("copies", "slow"):
            out[b].append(p.slot)
            last = b
    holders = _hold(out, lives, loops)
    return out, holders, Coverage(*(fates[name] for name in Coverage._fields))


def _hold(
    slots: list[list[Slot]], lives: Mapping[int, Sequence[int]], loops: Callable[[int, int], bool]
) -> tuple[int, ...]:
    """Straight code is issued as a whole: all that lives in it goes to the first of its blocks."""
    holders = list(range(len(slots)))
    for first, *others in filter(None, lives.values()):
        for b in others:
            if not loops(b, first) or _passes(slots[b]) > 1:
                holders[b] = first
                slots[first] += slots[b]
                slots[b] = []
        slots[first].sort(key=lambda s: s.address)
    return tuple(holders)


def _passes(slots: Sequence[Slot]) -> int:
    found = Counter((s.source, s.base) for s in slots if s.base in ANCHORS)
    return min(found.values(), default=1)

"""Finds the SASS instructions that are issued when a basic block of PTX is executed, and accounts for all others."""

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
    *("UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA", "UTCCP", "UTCSHIFT", "UTCBAR", "LDTM", "STTM"),
}
"""SASS instructions of which a PTX instruction makes one. Two of them for one PTX instruction are two passes."""
FIXED = 1000
_BARRIERS = {"SYNCS", "BAR", "UCGABAR_ARV", "UCGABAR_WAIT"}
"""Barriers stay with their block. Its home is the segment that holds them: each counts as ``FIXED`` others."""


class Coverage(NamedTuple):
    """How many SASS instructions of a kernel are issued, and with which block, and how many are not issued."""

    own: int  # issued with the block of their PTX instruction
    moved: int  # issued with another block, into which ptxas has moved them
    unnamed: int  # issued with the instruction before them, as they stand for no PTX instruction
    copies: int  # not issued: copies of a body that is issued already (peeled, unrolled, duplicated code)
    slow: int  # not issued: slow paths of a division or a root, and of a wait whose first try has failed

    @property
    def issued(self) -> float:
        """The share of the instructions that the replay can issue."""
        return 1 - (self.copies + self.slow) / max(1, sum(self))


@dataclass(frozen=True)
class MachineCode:
    """The SASS of a kernel, by PTX block. The first block of a chain (``chains``) stands for the whole chain. Its
    holder is the first block in whose straight code ptxas has put the chain: another one than itself where ptxas has
    made predicated code of a branch, or has unrolled a whole loop."""

    leads: tuple[int, ...]  # of each block: the first block of its chain
    holders: tuple[int, ...]  # of each first block: its holder
    blocks: tuple[tuple[Slot, ...], ...]  # of each holder: the slots of all chains in its code
    passes: tuple[int, ...]  # of each holder: how many passes of the chain the slots are
    registers: int  # registers of a thread
    listing: tuple[Slot, ...]  # the whole kernel, in the order of the code
    coverage: Coverage

    @property
    def opcodes(self) -> tuple[str, ...]:
        return tuple(slot.opcode for slot in self.listing)


def machine_code(ptx: str, target: str, kernel: Kernel, blocks: Sequence[Block]) -> MachineCode:
    """Compiles the PTX text for ``target``, and returns the machine code of ``kernel``, whose blocks are ``blocks``.
    Raises ``ClockError`` if ptxas or nvdisasm cannot do their part."""
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
    """Returns ``placed`` with the loops that wait for an mbarrier as a warp runs them.

    ptxas puts the first try in front of the loop, under the number of the PTX instruction before it, and the loop
    itself behind the kernel's code. Only a warp whose first try has failed goes there. Here the first try gets the
    number of the wait, and the loop becomes a ``slow`` path."""
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
    """Returns a function of two chains, which says if the first one can run again without the second in between."""
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
    """Returns how many opcodes of the kernel ``name`` in a cubin differ from those at the same place of ``code``."""
    other = (p.slot.opcode for p in read(tools.disassemble(cubin), name))
    return sum(a != b for a, b in zip_longest(code.opcodes, other))


def chains(blocks: Sequence[Block]) -> list[int]:
    """Returns the first block of each block's chain. The blocks of a chain always run one after the other."""
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
    """Returns the slots of each block, the holder of each block, and the coverage (docs/explanation/clock.md).

    placed: the kernel's SASS.
    blocks: the indices of the PTX instructions of each block.
    loops: a function as of ``_loops``.
    depths: in how many loops each block lies.
    """
    block_of = {index: b for b, indices in enumerate(blocks) for index in indices}
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for p in placed:
        if p.slot.source in block_of and not p.slow:
            counts[block_of[p.slot.source]][p.segment] += FIXED if p.slot.base in _BARRIERS else 1
    inside = {p.segment: p.loops for p in placed}

    def rank(b: int, segment: int) -> tuple[int, int]:
        """A block's home lies deepest in loops, but no deeper than the block: ptxas may put most of a block in front of
        its loop, or repeat some of it inside of other loops."""
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
    """Gives the slots of all blocks with the same home to the first of them, as straight code is issued as a whole. A
    block that can loop without the first one keeps its slots, unless ptxas has unrolled it. Returns the holders."""
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

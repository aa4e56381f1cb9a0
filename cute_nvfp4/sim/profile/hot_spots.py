"""The lines of Python and of PTX that cost most."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import PurePath

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.profile.facts import Facts
from cute_nvfp4.sim.profile.records import HotSpot

MOST = 20
"""How many lines of each kind a profile keeps."""


def place(i: Instruction) -> str:
    """Returns where an instruction comes from: "file.py:12", or "PTX:34" if the compiler left no source."""
    return PurePath(i.loc).name if i.loc else f"PTX:{i.line}"


def python_text(loc: str) -> str:
    """Returns the line of source that ``loc`` ("/folder/file.py:12") names, "" if the file is not there."""
    path, _, line = loc.rpartition(":")
    linecache.checkcache(path)
    return linecache.getline(path, int(line)).strip() if path else ""


def by_ptx(facts: Facts, most: int | None = MOST) -> tuple[HotSpot, ...]:
    """Returns the PTX instructions that cost most, in that order; all that cost anything if ``most`` is None."""
    return _most(summed(facts, lambda n: n, lambda i: (f"PTX:{i.line}", i.text)), most)


def by_python(facts: Facts, most: int | None = MOST) -> tuple[HotSpot, ...]:
    """Returns the lines of Python that cost most, in that order; all that cost anything if ``most`` is None."""
    key = lambda n: facts.code[n].loc or facts.code[n].line  # noqa: E731
    return _most(summed(facts, key, lambda i: (place(i), python_text(i.loc) if i.loc else i.text)), most)


def _most(spots: dict[Hashable, HotSpot], most: int | None) -> tuple[HotSpot, ...]:
    """Returns the spots that cost anything, at most ``most`` of them, the costliest first."""
    found = (spot for spot in spots.values() if spot.share or spot.executed)
    return tuple(sorted(found, key=lambda spot: -spot.share)[:most])


def bytes_of(facts: Facts) -> dict[int, int]:
    """Returns the bytes of memory that each PTX instruction asked for, by its index."""
    asked: dict[tuple[int, str], int] = defaultdict(int)
    for m in facts.result.memory:
        asked[m.line, m.instruction] += m.bytes
    for e in facts.result.engines:
        if e.engine != "copy":  # cp.async is counted as loads and stores
            moved = max(e.global_read, e.global_written)
            asked[e.line, e.instruction] += moved or max(e.shared_read, e.shared_written, e.tensor_read)
    out, seen = {}, set()
    for n, i in enumerate(facts.code):
        key = i.line, i.text
        if key in asked and key not in seen:  # two alike in one line: the first stands for both
            seen.add(key)
            out[n] = asked[key]
    return out


def summed(
    facts: Facts, key: Callable[[int], Hashable], told: Callable[[Instruction], tuple[str, str]]
) -> dict[Hashable, HotSpot]:
    """Returns the costs of instructions, summed by ``key`` of their index, in the order of the code. ``told`` gives the
    place and the text of a sum from its first instruction."""
    first: dict[Hashable, Instruction] = {}
    executed: dict[Hashable, int] = defaultdict(int)
    issued: dict[Hashable, float] = defaultdict(float)
    asked: dict[Hashable, int] = defaultdict(int)
    reasons: dict[Hashable, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for n, i in enumerate(facts.code):
        first.setdefault(key(n), i)
        executed[key(n)] += facts.result.executed.get(n, 0)
    for n, count in bytes_of(facts).items():
        asked[key(n)] += count
    for cost in facts.timing.code if facts.timing else ():
        if not 0 <= cost.source < len(facts.code) or not cost.cycles:
            continue
        at = key(cost.source)
        issued[at] += cost.issued
        for reason, cycles in ({"stalls": cost.stalls} | cost.lost).items():
            reasons[at][reason] += cycles / facts.warp_cycles
    timed, total = facts.timing is not None, max(1, facts.result.instructions)
    out = {}
    for at, i in first.items():
        share = sum(reasons[at].values()) if timed else executed[at] / total
        parts = dict(sorted(reasons[at].items(), key=lambda item: -item[1]))
        out[at] = HotSpot(*told(i), share, timed, executed[at], issued[at], asked[at], parts)
    return out

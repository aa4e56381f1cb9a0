"""The counters of ``cute-nvfp4 sim --counters`` as text of 80 columns, one block for all identical launches."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..sim.observe.result import EngineCounter, MemoryCounter, Result, WaitCounter
    from ..sim.session import LaunchRecord, Session

TITLE = "counted, not measured (M = 1,000,000; all of it is in --json)"
MOST = 8
"""Most lines of code that are shown in each table."""
MIN_WIDTH = 60
_SOURCE = 22
_NOISE = re.compile(
    r"\.(mbarrier::\w+|complete_tx::bytes|\w+::bytes|L2::cache_hint|bulk_group|sync|aligned|tile|collector\S*|cta_group::1)(?:::\w+)?(?=\.|$)"
)
_COPY = re.compile(r"\.(shared|global)(?:::\w+)?\.(shared|global)(?:::\w+)?")


class Row(NamedTuple):
    """A line of a table: the source line of the instruction, its name, and its counts."""

    source: str
    name: str
    counts: tuple[str, ...]


def counter_lines(session: Session, width: int) -> Iterator[str]:
    """The text, line by line, no line wider than ``width`` (at least 60) columns."""
    width = max(width, MIN_WIDTH)
    groups = _alike(session.launches)
    yield TITLE if groups else "nothing was counted: no launch ran to its end"
    for records in groups:
        yield ""
        yield from _block(records, width)


def number(value: float) -> str:
    """A value in seven characters in most cases: 131,072 or 4.56G."""
    if isinstance(value, float) and value < 1000:
        return f"{value:.1f}"
    if value < 1_000_000:
        return f"{value:,.0f}"
    for prefix in "MGT":
        value /= 1_000_000 if prefix == "M" else 1000
        if value < 999.5:
            return f"{value:.3g}{prefix}"
    return f"{value:,.0f}T"


def short_opcode(text: str) -> str:
    """The opcode of an instruction without the modifiers that do not tell it from others."""
    name = _NOISE.sub("", text.split()[0].rstrip(";"))
    if "async.bulk" in name and (found := _COPY.search(name)):
        # PTX names the destination first
        name = f"{name[: found.start()]}{name[found.end() :]} {found[2]}→{found[1]}"
    name = name.replace("cta_group::2", "2cta").replace("kind::", "")
    return name.replace("cp.async.bulk", "bulk").replace("cp.reduce.async.bulk", "reduce.bulk")


def source_line(loc: str, line: int) -> str:
    """``file.py:12``, or the line of the PTX if the compiler left no source line."""
    return PurePath(loc).name if loc else f"PTX:{line}"


def _alike(launches: Iterable[LaunchRecord]) -> list[list[LaunchRecord]]:
    """Groups of launches with the same kernel, shape and counts, in order; launches without counts are left out."""
    groups: list[list[LaunchRecord]] = []
    for record in launches:
        if record.result is None:
            continue
        for group in groups:
            a, b = group[0].launch, record.launch
            same = (a.kernel, a.grid, a.block, a.cluster) == (b.kernel, b.grid, b.block, b.cluster)
            if same and group[0].result == record.result:
                group.append(record)
                break
        else:
            groups.append([record])
    return groups


def _block(records: list[LaunchRecord], width: int) -> Iterator[str]:
    launch, result = records[0].launch, records[0].result
    assert result is not None
    numbers = ", ".join(str(r.number) for r in records[:6]) + (f" … {records[-1].number}" if len(records) > 6 else "")
    same = f" ({len(records)} alike)" if len(records) > 1 else ""
    shape = f"grid {launch.grid} block {launch.block}" + (
        "" if launch.cluster == (1, 1, 1) else f" cluster {launch.cluster}"
    )
    yield _cut(f"launch {numbers}{same}: {launch.kernel}", width)
    yield f"  {shape}"
    each = f"{result.instructions_per_warp:,.0f} each"
    yield f"  {result.warps:,} warps, {result.instructions:,} warp instructions ({each})"
    classes = sorted(result.classes.items(), key=lambda item: -item[1])
    yield from _wrapped("classes", [f"{name} {number(count)}" for name, count in classes], width)
    kinds = [
        f"{m.kind}: {number(m.operations)} operations, {number(m.multiply_adds)} multiply-adds" for m in result.mma
    ]
    yield from _wrapped("matrix", kinds, width)
    yield from _dram(result, width)
    for title, heads, rows in _tables(result):
        if rows:
            yield from _table(title, heads, rows, width)
    lost = result.bank_conflicts
    if not lost and any(m.passes for m in result.memory):
        yield "  no bank conflicts in shared memory"


def _dram(result: Result, width: int) -> Iterator[str]:
    kinds = [f"{kind}s {number(count)}" for kind, count in sorted(result.distinct_bytes.items())]
    yield from _wrapped("bytes of distinct global sectors", kinds, width)
    if (l2 := result.l2) is not None:
        parts = [
            f"{number(l2.read_bytes)} bytes read from DRAM",
            f"{number(l2.refetched_bytes)} of them again",
            f"{number(l2.written_bytes)} written back",
            f"{number(l2.dirty_bytes)} dirty at the end",
        ]
        yield from _wrapped(f"L2 model ({l2.capacity_bytes / 2**20:.0f} MiB, empty at first)", parts, width)


def _tables(result: Result) -> Iterator[tuple[str, tuple[str, ...], list[Row]]]:
    copies = [e for e in result.engines if e.engine != "tensor"]
    threads: dict[int, int] = {}
    for m in result.memory:
        threads[m.line] = max(threads.get(m.line, 0), m.bytes)
    yield "copies (bytes of global memory, else shared)", ("ops", "bytes", "per op"), _copies(copies, threads)
    tensor = [
        e for e in result.engines if e.engine == "tensor" and (e.shared_read or e.tensor_read or e.tensor_written)
    ]
    heads = ("ops", "smem rd", "tmem rd", "tmem wr")
    fields = ("operations", "shared_read", "tensor_read", "tensor_written")
    yield "tensor core (bytes; tmem = tensor memory)", heads, _merged(
        tensor, lambda es: [sum(getattr(e, name) for e in es) for name in fields], lambda operations, *_: operations
    )  # fmt: skip
    memory = [m for m in result.memory if m.space == "global" and m.sectors]
    # bytes for each sector: 32 is all of it, more means that lanes share it
    yield "global memory, most wasted bytes first", ("requests", "sectors", "sect/rq", "B/sect"), _merged(
        memory, _sectors, lambda requests, sectors, _, each: (32 * sectors - each * sectors, sectors)
    )  # fmt: skip
    conflicts = [m for m in result.memory if m.conflicts > 0]
    yield "bank conflicts in shared memory, most lost first", ("requests", "passes", "ideal", "lost"), _merged(
        conflicts,
        lambda ms: [sum(getattr(m, a) for m in ms) for a in ("requests", "passes", "ideal_passes", "conflicts")],
        lambda requests, passes, ideal, lost: lost,
    )  # fmt: skip
    yield "waits (steps order events, they are not time)", ("parked", "steps", "each"), _merged(
        result.waits, _waits, lambda parked, steps, each: steps
    )  # fmt: skip


def _copies(engines: list[EngineCounter], threads: dict[int, int]) -> list[Row]:
    """Rows of copies. ``cp.async`` is counted by thread, and its bytes with the memory instructions of its line."""

    def sums(es: Sequence[EngineCounter]) -> list[float]:
        operations = sum(e.operations for e in es)
        moved = sum(_moved(e) or threads.get(e.line, 0) for e in es)
        return [operations, moved, moved / operations if operations else 0.0]

    return _merged(
        [e for e in engines if _moved(e) or threads.get(e.line)], sums, lambda operations, moved, each: moved
    )


def _moved(e: EngineCounter) -> int:
    return max(e.global_read, e.global_written) or max(e.shared_read, e.shared_written)


def _sectors(counters: Sequence[MemoryCounter]) -> list[float]:
    requests, sectors = sum(m.requests for m in counters), sum(m.sectors for m in counters)
    return [requests, sectors, sectors / requests, sum(m.bytes for m in counters) / sectors]


def _waits(counters: Sequence[WaitCounter]) -> list[float]:
    parked, steps = sum(w.parked for w in counters), sum(w.steps for w in counters)
    return [parked, steps, steps / parked if parked else 0.0]


def _merged(items: Sequence[Any], sums: Callable[[Sequence[Any]], list], weight: Callable[..., Any]) -> list[Row]:
    """Rows of instructions with the same opcode and source line (an unrolled loop), the largest weight first."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        groups.setdefault((source_line(item.loc, item.line), short_opcode(item.instruction)), []).append(item)
    rows = []
    for (source, name), alike in groups.items():
        counts = sums(alike)
        times = f" ×{len(alike)}" if len(alike) > 1 else ""
        rows.append((weight(*counts), Row(source, name + times, tuple(number(c) for c in counts))))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0], reverse=True)]


def _table(title: str, heads: tuple[str, ...], rows: list[Row], width: int) -> Iterator[str]:
    shown = rows[:MOST]
    widths = [max(len(h), *(len(r.counts[j]) for r in shown)) + 2 for j, h in enumerate(heads)]
    source = min(max(len(r.source) for r in shown), _SOURCE)
    name = width - 5 - source - sum(widths)
    name = min(max(name, 8), max(len(r.name) for r in shown))
    yield f"  {title}"
    yield " " * (5 + source + name) + "".join(h.rjust(w) for h, w in zip(heads, widths))
    for at, what, counts in shown:
        left = f"    {_cut_front(at, source):{source}} {_cut_name(what, name):{name}}"
        yield left + "".join(c.rjust(w) for c, w in zip(counts, widths))
    if len(rows) > MOST:
        yield f"    … and {len(rows) - MOST} more"


def _wrapped(title: str, parts: list[str], width: int) -> Iterator[str]:
    if parts:
        text = f"  {title}: " + ", ".join(p.replace(" ", "\0") for p in parts)
        # the text is not broken within a part
        lines = textwrap.wrap(text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        yield from (line.replace("\0", " ") for line in lines)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _cut_name(text: str, width: int) -> str:
    """``text`` cut to ``width``, with the number of instructions at its end kept."""
    name, times, count = text.partition(" ×")
    return _cut(name, width - len(times + count)) + times + count


def _cut_front(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]

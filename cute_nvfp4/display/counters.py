"""Tables of what a simulated launch did: instructions, memory with sectors and bank conflicts, engines, waits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from . import hazards, times
from .names import short
from .svg import Page, stacked, table

if TYPE_CHECKING:
    from ..sim.observe.result import Counted, EngineCounter, Result

MOST_ROWS = 12


def result(r: Result, name: str = "") -> Page:
    """Returns a page of a launch: counters, findings, memory instructions, engines, waits, and the modelled time."""
    rows = [
        ["kernel", name or short(r.kernel)],
        ["warps", f"{r.warps}"],
        ["warp instructions", f"{r.instructions} ({r.instructions_per_warp:.1f} a warp)"],
    ]
    rows += [["of them", ", ".join(f"{k} {v}" for k, v in sorted(r.classes.items(), key=lambda kv: -kv[1])[:6])]]
    if r.memory:
        rows.append(["bank conflicts", f"{r.bank_conflicts} passes lost"])
    for kind, count in r.distinct_bytes.items():
        rows.append([f"global bytes, {kind}", f"{count} distinct"])
    rows += [[m.kind, f"{m.operations} operations, {m.multiply_adds} multiply-adds"] for m in r.mma]
    shown = [table(["counted", ""], rows)]
    shown += [hazards.finding(f) for f in r.findings]
    if r.memory:
        shown.append(memory(r))
    if r.engines:
        shown.append(engines(r))
    waits = sorted((w for w in r.waits if w.steps), key=lambda w: -w.steps)[:MOST_ROWS]
    if waits:
        rows = [[place(w), w.parked, w.steps] for w in waits]
        shown.append(table(["waits (steps, not time)", "parked", "steps"], rows))
    if r.timing is not None:
        shown.append(times.timing(r.timing))
    return stacked(*shown)


def memory(r: Result) -> Page:
    """Returns a table of the memory instructions with the most sectors and passes: their requests, bytes and cost."""
    most = sorted(r.memory, key=lambda m: -(m.sectors + m.passes))[:MOST_ROWS]
    rows = []
    for m in most:
        apart = m.space == "global"
        used = m.bytes / (32 * m.sectors) if m.sectors else 0.0
        cost = f"{m.sectors_per_request:.1f} sectors a request, {used:.0%} used" if apart else f"{m.passes} passes"
        cost += f", {m.conflicts} lost to conflicts" if m.conflicts else ""
        rows.append([place(m), m.space, m.requests, m.bytes, cost])
    return table(["memory", "space", "requests", "bytes", "took"], rows)


def engines(r: Result) -> Page:
    """Returns a table of asynchronous operations; instructions of one opcode and engine share a row."""
    found: dict[tuple[str, str], list[EngineCounter]] = {}
    for e in r.engines:
        found.setdefault((opcode(e), e.engine), []).append(e)
    rows = [
        [
            name,
            engine,
            len(alike),
            sum(e.operations for e in alike),
            sum(e.global_read + e.global_written for e in alike),
            sum(e.shared_read + e.shared_written for e in alike),
        ]
        for (name, engine), alike in found.items()
    ]
    return table(["asynchronous", "engine", "instructions", "operations", "global bytes", "shared bytes"], rows)


def opcode(c: Counted) -> str:
    """Returns the opcode with its first four qualifiers."""
    word = re.sub(r"^@!?\S+\s+", "", c.instruction).partition(" ")[0].rstrip(";")
    return ".".join(word.split(".")[:5])


def place(c: Counted) -> str:
    """Returns a short name of an instruction: its opcode, and its place in the source or its line in the PTX."""
    source = re.sub(r"^.*/", "", c.loc) if c.loc else f"PTX line {c.line}"
    return f"{opcode(c)} ({source})"

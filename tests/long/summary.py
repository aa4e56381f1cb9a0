"""What a ledger holds, as benchmarks/records/long_run.md shows it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.long.families import FAMILIES
from tests.long.ledger import ROOT, Ledger, Record, simulator, sources
from tests.long.worker import DETERMINED, Task, perform

PAGE = ROOT / "benchmarks" / "records" / "long_run.md"
BEGIN, END = "<!-- long run: begin -->", "<!-- long run: end -->"
_OUTCOMES = ("passed", "failed", "crashed", "hung")
_LAST = ("harmless", "known to pass", "not noticed")

Total = Callable[[str, str], int | None]
"""How many cases a family has on an architecture, or wants; None where that is not known."""


def total(family: str, arch: str) -> int | None:
    """Of lists that need no kernel, their length; of random cases the goal."""
    found = FAMILIES.get(family)
    if found is None or arch not in found.archs or (found.every is not None and found.ptx is not None):
        return None
    if found.every is None:
        return found.goal
    return sum(len(perform(Task(family, "", arch, 1, part=part)).cases) for part in found.parts(arch))


State = tuple[str, str]
"""Fingerprints of the simulator's sources and of the rest of the package: what a case ran on."""


def present() -> State:
    return simulator(), sources()


def summary(ledger: Ledger, total: Total = total, state: State | None = None) -> str:
    """The records of the present sources, or of ``state``, by family and architecture, and mutants by kernel; those of
    earlier sources apart, after a row for each of their states."""
    state = state or present()
    every = [r for r in ledger.records.values() if r.outcome != "gone"]
    if not every:
        return "Nothing was run."
    now = [r for r in every if (r.simulator, r.sources) == state]
    before = [r for r in every if (r.simulator, r.sources) != state]
    lines = [f"**{len(now):,} of {len(every):,} cases ran on the sources as they are here**: {_named(state)}."]
    if now:
        lines += ["", _span(now), "", *_families(now, total), *_mutants(now)]
    if before:
        lines += [
            *("", f"**{len(before):,} cases ran on earlier sources**, and count for those alone:", ""),
            *("| simulator | rest of the package | cases | passed | failed | crashed | hung | last on |",
              "|---|---|---:|---:|---:|---:|---:|---|"),
            *(_state_row(*item) for item in _states(before)),
            *("", *_families(before, None), *_mutants(before)),
        ]  # fmt: skip
    return "\n".join(lines)


def _named(state: State) -> str:
    return f"simulator `{state[0]}`, rest of the package `{state[1]}`"


def _span(records: Sequence[Record]) -> str:
    days, hours = sorted({r.day for r in records}), sum(r.seconds for r in records) / 3600
    return f"They ran from {days[0]} to {days[-1]}, in {hours:.2f} hours of one process."


def _states(records: Iterable[Record]) -> list[tuple[State, list[Record]]]:
    """The records of each state, those that ran last first."""
    found: dict[State, list[Record]] = {}
    for r in records:
        found.setdefault((r.simulator, r.sources), []).append(r)
    return sorted(found.items(), key=lambda item: (max(r.day for r in item[1]), len(item[1])), reverse=True)


def _state_row(state: State, records: Sequence[Record]) -> str:
    ended = Counter(r.outcome for r in records)
    cells = [f"{len(records):,}", *(f"{ended[name]:,}" for name in _OUTCOMES), max(r.day for r in records)]
    return " | ".join([f"| `{state[0]}`", f"`{state[1]}`", *cells]) + " |"


def _families(records: Sequence[Record], total: Total | None) -> list[str]:
    """A row for each family and architecture; ``total`` says how many cases there are, of the present sources only."""
    lines = [
        "| cases of | on | run | of | schedules each | or all, proved | kernels | passed | failed | crashed | hung |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for family, arch in sorted({(r.family, r.arch) for r in records}):
        mine = [r for r in records if (r.family, r.arch) == (family, arch)]
        ended, kernels = Counter(r.outcome for r in mine), {kernel for r in mine for kernel in r.kernels}
        there = total(family, arch) if total else None
        counts = [
            f"{_different(family, mine):,}",
            "" if there is None else f"{there:,}",
            f"{max(r.runs for r in mine)}",
        ]
        proved = family in FAMILIES and FAMILIES[family].schedules > 1
        counts += [f"{sum(r.note == DETERMINED for r in mine):,}" if proved else ""]
        counts += [f"{len(kernels):,}", *(f"{ended[name]:,}" for name in _OUTCOMES)]
        lines.append(f"| {family} | {arch} | " + " | ".join(counts) + " |")
    return lines


def _different(family: str, records: list[Record]) -> int:
    """How many cases they are, those that stand for the same counted once."""
    if family not in FAMILIES:
        return len(records)
    return len({FAMILIES[family].stands_for(r.case) for r in records})


def _mutants(records: Iterable[Record]) -> list[str]:
    """A row for each kernel: what noticed its mutants."""
    found: dict[str, Counter[str]] = {}
    for r in (r for r in records if r.family == "mutant"):
        kernel = json.loads(r.case)["kernel"]
        found.setdefault(kernel, Counter())[r.note if r.outcome == "passed" else "not noticed"] += 1
    if not found:
        return []
    said = sum(found.values(), Counter())
    columns = [what for what, _ in said.most_common() if what not in _LAST] + [w for w in _LAST if said[w]]
    head = ["mutants of", "run", *(f"`{what}`" if what[0].isupper() else what for what in columns)]
    lines = ["", "| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(columns) + 1)]
    for kernel, counts in sorted(found.items()):
        cells = [str(counts.total()), *(str(counts[what]) for what in columns)]
        lines.append(f"| {kernel} | " + " | ".join(cells) + " |")
    return lines


def write(ledger: Ledger, page: Path = PAGE, total: Total = total, state: State | None = None) -> None:
    """Replaces the summary in the page."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{summary(ledger, total, state)}\n{END}{rest.partition(END)[2]}")

"""What a ledger holds, as docs/checks.md shows it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.long.families import FAMILIES
from tests.long.ledger import ROOT, Ledger, Record
from tests.long.worker import DETERMINED, Task, perform

PAGE = ROOT / "docs" / "checks.md"
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


def summary(ledger: Ledger, total: Total = total) -> str:
    """All records by family and architecture, and mutants by kernel."""
    every = [r for r in ledger.records.values() if r.outcome != "gone"]
    if not every:
        return "Nothing was run."
    days, commits = sorted({r.day for r in every}), {r.commit for r in every}
    lines = [
        f"{len(every):,} cases from {days[0]} to {days[-1]}, on {len(commits)} commit(s) and "
        f"{len({r.simulator for r in every})} version(s) of the simulator, "
        f"in {sum(r.seconds for r in every) / 3600:.2f} hours of one process.",
        "",
        "| cases of | on | run | of | schedules each | or all, proved | kernels | passed | failed | crashed | hung |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for family, arch in sorted({(r.family, r.arch) for r in every}):
        mine = [r for r in every if (r.family, r.arch) == (family, arch)]
        ended, kernels = Counter(r.outcome for r in mine), {kernel for r in mine for kernel in r.kernels}
        there = total(family, arch)
        counts = [
            f"{_different(family, mine):,}",
            "" if there is None else f"{there:,}",
            f"{max(r.runs for r in mine)}",
        ]
        counts += [f"{sum(r.note == DETERMINED for r in mine):,}"] if FAMILIES[family].schedules > 1 else [""]
        counts += [f"{len(kernels):,}", *(f"{ended[name]:,}" for name in _OUTCOMES)]
        lines.append(f"| {family} | {arch} | " + " | ".join(counts) + " |")
    return "\n".join([*lines, *_mutants(r for r in every if r.family == "mutant")])


def _different(family: str, records: list[Record]) -> int:
    """How many cases they are, those that stand for the same counted once."""
    if family not in FAMILIES:
        return len(records)
    return len({FAMILIES[family].stands_for(r.case) for r in records})


def _mutants(records: Iterable[Record]) -> list[str]:
    """A row for each kernel: what noticed its mutants."""
    found: dict[str, Counter[str]] = {}
    for r in records:
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


def write(ledger: Ledger, page: Path = PAGE, total: Total = total) -> None:
    """Replaces the summary in the page."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{summary(ledger, total)}\n{END}{rest.partition(END)[2]}")

"""Summarizes a ledger for benchmarks/records/long_run.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.long.families import FAMILIES
from tests.long.ledger import ROOT, Ledger, Record
from tests.long.worker import DETERMINED, Task, perform

PAGE = ROOT / "benchmarks" / "records" / "long_run.md"
BEGIN, END = "<!-- long run: begin -->", "<!-- long run: end -->"
_OUTCOMES = ("passed", "failed", "crashed", "hung")
_LAST = ("harmless", "known to pass", "not noticed")

Total = Callable[[str, str], int | None]
"""How many cases a family has or wants on an architecture; None if unknown."""


def total(family: str, arch: str) -> int | None:
    """The length of a list that needs no kernel, or the goal for random cases."""
    found = FAMILIES.get(family)
    if found is None or arch not in found.archs or (found.every is not None and found.ptx is not None):
        return None
    if found.every is None:
        return found.goal
    return sum(len(perform(Task(family, "", arch, 1, part=part)).cases) for part in found.parts(arch))


State = tuple[str, str]
"""Fingerprints of the simulator and of the other code of the package that a case depends on (``depends``)."""
States = Callable[[str, str], State]
"""The present state of the sources, for a family on an architecture."""


def present(family: str, arch: str) -> State:
    found = FAMILIES.get(family)
    return found.state(arch) if found and arch in found.archs else ("", "")


def summary(ledger: Ledger, total: Total = total, state: States = present) -> str:
    """The records by family and architecture, and mutants by kernel: first records of the present sources, or of
    ``state``; then those of the present simulator with earlier kernels; then those of earlier simulators."""
    every = [r for r in ledger.records.values() if r.outcome != "gone"]
    if not every:
        return "Nothing was run."
    now = [r for r in every if (r.simulator, r.sources) == state(r.family, r.arch)]
    others = [r for r in every if (r.simulator, r.sources) != state(r.family, r.arch)]
    changed = [r for r in others if r.simulator == state(r.family, r.arch)[0]]
    before = [r for r in others if r.simulator != state(r.family, r.arch)[0]]
    lines = [f"**{len(now):,} of {len(every):,} cases ran on the sources as they are here.**"]
    if now:
        lines[0] += f" Simulator: `{now[0].simulator}`."
        lines += ["", _span(now), "", *_families(now, total), *_mutants(now)]
    if changed:
        lines += [
            "",
            f"**{len(changed):,} cases ran with this simulator (`{changed[0].simulator}`)**, and something else that "
            "they depend on has changed since:",
            *("", *_families(changed, None), *_mutants(changed)),
        ]
    if before:
        lines += [
            *("", f"**{len(before):,} cases ran with earlier simulators**, and count for those alone:", ""),
            *("| simulator | cases | passed | failed | crashed | hung | last on |",
              "|---|---:|---:|---:|---:|---:|---|"),
            *(_simulator_row(*item) for item in _simulators(before)),
            *("", *_families(before, None), *_mutants(before)),
        ]  # fmt: skip
    return "\n".join(lines)


def _span(records: Sequence[Record]) -> str:
    days, hours = sorted({r.day for r in records}), sum(r.seconds for r in records) / 3600
    return f"They ran from {days[0]} to {days[-1]}, in {hours:.2f} hours of one process."


def _simulators(records: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    """The records of each simulator, latest first."""
    found: dict[str, list[Record]] = {}
    for r in records:
        found.setdefault(r.simulator, []).append(r)
    return sorted(found.items(), key=lambda item: (max(r.day for r in item[1]), len(item[1])), reverse=True)


def _simulator_row(simulator: str, records: Sequence[Record]) -> str:
    ended = Counter(r.outcome for r in records)
    cells = [f"{len(records):,}", *(f"{ended[name]:,}" for name in _OUTCOMES), max(r.day for r in records)]
    return " | ".join([f"| `{simulator}`", *cells]) + " |"


def table(records: Iterable[Record]) -> str:
    """A line for each family and architecture: what a run did."""
    found: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        found.setdefault((r.family, r.arch), []).append(r)
    lines = [f"{'cases of':24} {'on':8} {'run':>6} {'not passed':>10} {'CPU s':>8}"]
    for (family, arch), mine in sorted(found.items()):
        bad = sum(r.outcome not in ("passed", "gone") for r in mine)
        lines.append(f"{family:24} {arch:8} {len(mine):6} {bad:10} {sum(r.seconds for r in mine):8.0f}")
    return "\n".join(lines)


def _families(records: Sequence[Record], total: Total | None) -> list[str]:
    """A row for each family and architecture. With ``total``, all records are of the present sources; the row then has
    the total and the sources' fingerprint."""
    lines = [
        "| cases of | on | run | of | schedules each | or all, proved | kernels | passed | failed | crashed | hung |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    if total:
        lines = [lines[0] + " sources |", lines[1] + "---|"]
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
        counts += [f"`{mine[0].sources}`"] if total else []
        lines.append(f"| {family} | {arch} | " + " | ".join(counts) + " |")
    return lines


def _different(family: str, records: list[Record]) -> int:
    """How many cases these are; cases that stand for the same count once."""
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


def write(ledger: Ledger, page: Path = PAGE, total: Total = total, state: States = present) -> None:
    """Replaces the summary in the page."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{summary(ledger, total, state)}\n{END}{rest.partition(END)[2]}")

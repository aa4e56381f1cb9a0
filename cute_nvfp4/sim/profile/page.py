"""The details page of a launch: as text, as comma-separated values and as JSON."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cute_nvfp4.sim.observe.json_text import json_text
from cute_nvfp4.sim.profile.records import HotSpot, Metric, Saving, Section

COLUMNS = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size"),
    *("Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name", "Rule Type"),
    *("Rule Description", "Estimated Speedup Type", "Estimated Speedup", "Source"),
)
"""The columns of ``ncu --csv --page details``, and "Source", which says where a value is from."""
FORMATS = (".txt", ".csv", ".json")
_WIDTH, _SPOTS, _REASONS = 118, 10, 3
_SAVING_TITLE = "Where most could be saved"
SCHEMA = 1
"""The version of ``Profile.to_dict``; it grows when a key changes its meaning."""


@dataclass(frozen=True)
class Profile:
    """The details page of one launch.

    ``clock`` is the machine that times are modelled on, "" for none. ``python`` and ``ptx`` are the lines that cost
    most, the costliest first. ``savings`` are the changes that would save most, three at most.
    """

    kernel: str
    device: str
    capability: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    stream: int
    clock: str
    sections: tuple[Section, ...]
    python: tuple[HotSpot, ...]
    ptx: tuple[HotSpot, ...]
    savings: tuple[Saving, ...]
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, Metric]]:
        """Yields every metric with the name of its section."""
        for section in self.sections:
            for metric in section.metrics:
                yield section.name, metric

    def value(self, name: str, section: str = "") -> int | float | str | None:
        """Returns the value of the first metric called ``name``, in ``section`` if one is given. Raises ``KeyError`` if
        there is none."""
        for of, metric in self.rows():
            if metric.name == name and section in ("", of):
                return metric.value
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Returns the profile as a dictionary for JSON, with the version of its schema."""
        return {"schema": SCHEMA} | asdict(self)

    def text(self) -> str:
        """Returns the page as ``ncu --page details`` prints one."""
        return text([self])

    def csv(self) -> str:
        """Returns the rows that ``ncu --csv --page details`` prints, with a column for where each value is from."""
        return csv_text([self])


def written(profiles: Sequence[Profile], suffix: str) -> str:
    """Returns the profiles in the format of a file's ``suffix``, which is one of ``FORMATS``."""
    if suffix == ".json":
        return json_text({"profiles": [p.to_dict() for p in profiles]}) + "\n"
    return csv_text(profiles) if suffix == ".csv" else text(profiles)


def text(profiles: Sequence[Profile]) -> str:
    """Returns the profiles' sections as ``ncu --page details`` prints them, their savings, and their hot spots."""
    return "\n".join(line for p in profiles for line in (*_page(p), "")) + "\n"


def shown(metric: Metric) -> str:
    """Returns the value of a metric as the page shows it."""
    if metric.value is None:
        return metric.source
    return f"{metric.value:,.2f}" if isinstance(metric.value, float) else f"{metric.value:,}"


def _page(p: Profile) -> Iterator[str]:
    yield f"  {p.kernel} {p.grid}x{p.block}, Stream {p.stream}, Device {p.device}, CC {p.capability}"
    for note in p.notes:
        yield f"    note: {note}"
    for section in p.sections:
        yield f"    Section: {section.name}"
        cells = [(m.name, m.unit, shown(m), m.source if m.value is not None else "") for m in section.metrics]
        yield from _table(("Metric Name", "Metric Unit", "Metric Value", "Source"), cells)
        yield ""
    yield f"    {_SAVING_TITLE}" + (f" (modelled on {p.clock.upper()})" if p.clock else " (counted, not timed)")
    for number, saving in enumerate(p.savings, 1):
        yield from _wrapped(f"{number}. ", sentence(saving))
    if not p.savings:
        yield "      nothing that was tried saves 1 % of the time"
    yield ""
    for title, spots in (("Python line", p.python), ("PTX instruction", p.ptx)):
        yield f"    Source hot spots by {title}: " + _of(spots)
        yield from _spots(spots)
        yield ""


def sentence(saving: Saving) -> str:
    """Returns a saving in words."""
    end = f" Most of it at {saving.where}." if saving.where else ""
    if saving.microseconds is None:
        return f"{saving.what}. {saving.advice}{end}"
    most = "" if saving.basis == "replay" else "at most "
    return f"{saving.what}: {most}{saving.microseconds:.2f} us ({saving.share:.0%}). {saving.advice}{end}"


def _of(spots: Sequence[HotSpot]) -> str:
    if not spots:
        return "nothing was executed"
    return (
        "share of the warps' time (modelled)" if spots[0].modelled else "share of the executed instructions (counted)"
    )


def _spots(spots: Sequence[HotSpot]) -> Iterator[str]:
    for spot in spots[:_SPOTS]:
        reasons = ", ".join(f"{name} {share:.1%}" for name, share in list(spot.reasons.items())[:_REASONS])
        counts = f"executed {spot.executed:,}" + (f", {spot.bytes:,} bytes" if spot.bytes else "")
        yield f"      {spot.share:6.1%}  {spot.where}  {_cut(spot.text, 60)}"
        yield f"               {counts}" + (f"; {reasons}" if reasons else "")


def _cut(line: str, most: int) -> str:
    return line if len(line) <= most else line[: most - 1] + "…"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[j]) for row in (heads, *rows)) for j in range(len(heads))]
    rule = "    " + " ".join("-" * width for width in widths)
    yield rule
    for number, row in enumerate((heads, *rows)):
        cells = [c.rjust(w) if j == 2 and number else c.ljust(w) for j, (c, w) in enumerate(zip(row, widths))]
        yield ("    " + " ".join(cells)).rstrip()
        if not number:
            yield rule
    yield rule


def _wrapped(head: str, words: str) -> list[str]:
    return textwrap.wrap(words, _WIDTH, initial_indent=f"      {head}", subsequent_indent=" " * (6 + len(head)))


def csv_text(profiles: Sequence[Profile]) -> str:
    """Returns a row for each metric, and a row for each saving, which fills the columns of Nsight Compute's rules. Hot
    spots are metrics of the section "Source Counters", named by their line."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    for number, p in enumerate(profiles):
        own = {"ID": number, "Process Name": "cute_nvfp4", "Kernel Name": p.kernel, "Stream": p.stream}
        own |= {"Block Size": p.block, "Grid Size": p.grid, "Device": p.device, "CC": p.capability}
        for section, m in p.rows():
            row = {"Section Name": section, "Metric Name": m.name, "Metric Unit": m.unit, "Source": m.source}
            writer.writerow(own | row | {"Metric Value": "" if m.value is None else m.value})
        for kind, spots in (("Python", p.python), ("PTX", p.ptx)):
            for spot in spots:
                name = f"{kind} {spot.where}: {spot.text}"
                row = {"Section Name": "Source Counters", "Metric Name": name, "Metric Unit": "%"}
                row |= {"Metric Value": 100 * spot.share, "Source": "modelled" if spot.modelled else "counted"}
                writer.writerow(own | row)
        for saving in p.savings:
            row = {"Section Name": _SAVING_TITLE, "Rule Name": saving.what, "Rule Type": "OPT"}
            row |= {"Rule Description": sentence(saving), "Source": "modelled" if p.clock else "counted"}
            if saving.microseconds is not None:
                row |= {"Estimated Speedup Type": "global", "Estimated Speedup": 100 * saving.share}
            writer.writerow(own | row)
    return out.getvalue()

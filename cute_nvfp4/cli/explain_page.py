"""Explained kernels as text, and as a page in which a click on a line shows its PTX and SASS."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..sim.profile import Explanation, HotSpot
    from ..sim.profile.explanation import Row

_TEMPLATE, _AROUND = "explain.html.j2", 2
_REASONS, _BELOW = 3, 6


def text_lines(e: Explanation, number: int, most: int | None) -> Iterator[str]:
    """The ``most`` expensive lines of Python (all for None), each with its PTX, and the PTX with its SASS."""
    yield f"{number}. {e.kernel}"
    yield f"   grid {e.grid} block {e.block}" + ("" if e.cluster == (1, 1, 1) else f" cluster {e.cluster}")
    timed = f", {e.microseconds:.2f} us modelled on {e.clock.upper()} without the launch" if e.microseconds else ""
    yield f"   {e.instructions:,} PTX instructions of warps (counted){timed}"
    yield from (f"   note: {note}" for note in e.notes)
    what = "share of the warps' time (modelled)" if e.clock else "share of the executed instructions (counted)"
    yield f"   {what}, lines of Python; below each its PTX and SASS, the most expensive first"
    ranked = sorted(e.python, key=lambda row: -row.cost.share)
    for row in ranked[:most]:
        yield ""
        yield f"   {row.cost.share:6.1%}  {row.cost.where}  {row.cost.text}"
        yield f"           {_counts(row.cost)}"
        yield from _below(e, row, None if most is None else _BELOW)
    if most is not None and len(ranked) > most:
        yield ""
        yield f"   … and {len(ranked) - most} lines more (--all)"


def _below(e: Explanation, python: Row, most: int | None) -> Iterator[str]:
    """The PTX instructions of a line, each with its machine code."""
    found = sorted(e.below("ptx", python), key=lambda row: -row.cost.share)
    for ptx in found[:most]:
        yield f"           PTX  {ptx.cost.where:>5}  {_cut(ptx.cost.text, 64):64} {ptx.cost.executed:>10,}"
        for sass in list(e.below("sass", ptx))[:most]:
            reason = f"{sass.cost.share:6.1%} {_reasons(sass.cost)}" if e.clock else ""
            line = f"           SASS {sass.cost.where:>5}    {_cut(sass.cost.text, 62):62} {sass.cost.issued:>10,.0f}"
            yield f"{line} {reason}".rstrip()
    if most is not None and len(found) > most:
        yield f"           … and {len(found) - most} PTX instructions more"


def _counts(cost: HotSpot) -> str:
    parts = [f"executed {cost.executed:,}"] + ([f"issued {cost.issued:,.0f}"] if cost.modelled else [])
    parts += [f"{cost.bytes:,} bytes"] if cost.bytes else []
    return ", ".join(parts) + (f"; {_reasons(cost)}" if cost.reasons else "")


def _reasons(cost: HotSpot) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in list(cost.reasons.items())[:_REASONS])


def _cut(line: str, most: int) -> str:
    return line if len(line) <= most else line[: most - 1] + "…"


class Shown(NamedTuple):
    """A line of the page. row: None for a context line without cost; python, ptx: the ``id`` of its line of Python and
    of its PTX instruction, "" for none."""

    row: Row | None
    where: str
    text: str
    python: str
    ptx: str
    heat: float
    told: str


class Layers(NamedTuple):
    """The page's content for one kernel: lines of Python by file, PTX and SASS."""

    kernel: Explanation
    files: list[tuple[str, list[Shown]]]
    ptx: list[Shown]
    sass: list[Shown]


def write_page(explained: Sequence[Explanation], title: str, path: Path) -> None:
    """Writes the page to ``path``, as one file that needs no other."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("cute_nvfp4.cli", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    kernels = [_layers(e) for e in explained]
    path.write_text(environment.get_template(_TEMPLATE).render(title=title, kernels=kernels))


def _layers(e: Explanation) -> Layers:
    hottest = {
        name: max((r.cost.share for r in getattr(e, name)), default=0) or 1 for name in ("python", "ptx", "sass")
    }
    above = {row.id: row.of for row in e.ptx}

    def shown(row: Row, layer: str, python: str, ptx: str) -> Shown:
        heat = row.cost.share / hottest[layer]
        return Shown(row, row.cost.where, row.cost.text, python, ptx, heat, _counts(row.cost))

    ptx = [shown(row, "ptx", row.of, row.id) for row in e.ptx]
    sass = [shown(row, "sass", above.get(row.of, ""), row.of) for row in e.sass]
    files: dict[str, dict[int, Shown]] = {}
    for row in e.python:
        name, _, line = row.id.rpartition(":")
        files.setdefault(name, {})[int(line)] = shown(row, "python", row.id, "")
    return Layers(e, [(name, list(_with_context(name, found))) for name, found in files.items()], ptx, sass)


def _with_context(name: str, found: dict[int, Shown]) -> Iterator[Shown]:
    """The lines that cost something, with their text in the file, and the lines around them."""
    near = {n for line in found for n in range(max(1, line - _AROUND), line + _AROUND + 1)}
    before = None
    for n in sorted(near):
        text = linecache.getline(name, n).rstrip()
        if n not in found and not text:
            continue
        if before is not None and n > before + 1:
            yield Shown(None, "", "⋯", "", "", 0.0, "")
        before = n
        where = f"{PurePath(name).name}:{n}"
        yield found[n]._replace(text=text or found[n].text) if n in found else Shown(None, where, text, "", "", 0.0, "")

"""Drawings of a kernel's pipelines: which roles fill each ring of buffers, which wait, and what completes a phase.

A drawing shows either the plan of one of the package's kernels (``kernels.gemm.pipeline_graph``) or the mbarriers of
any kernel as a simulated launch used them (``sim.observe.barriers``).
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .svg import BAD, INK, LINE, PALETTE, SOFT, Drawing, Picture, width_of

if TYPE_CHECKING:
    from ..kernels.gemm.pipeline_graph import Edge
    from ..sim.observe.barriers import Barriers, Ring

BOX, GAP, ROW = 118, 34, 62
INIT = re.compile(r"mbarrier_init\(\s*([^,]+?)\s*,")
MOST_BUFFERS = 16


class Arrow(NamedTuple):
    """A ring of mbarriers, drawn as arrows from the roles that arrive to those that wait."""

    name: str
    producers: tuple[str, ...]  #: the roles whose arrivals complete its phases
    consumers: tuple[str, ...]  #: the roles that wait for its phases
    stages: int
    says: str  #: its counts, in words
    wrong: bool = False  #: whether to mark it as an error, such as a phase that lacked arrivals at the end


def of_plan(edges: Sequence[Edge], roles: Mapping[str, str] | None = None, title: str = "") -> Picture:
    """Draws the pipelines of a plan; ``roles`` maps the names of producers and consumers to words."""
    words = dict(roles or {})
    arrows = []
    for edge in edges:
        for kind, arrivals in edge.arrivals.items():
            ways = (edge.producer, edge.consumer) if kind == "full" else (edge.consumer, edge.producer)
            source, target = (words.get(name, name) for name in ways)
            arrows.append(Arrow(f"{edge.name} {kind}", (source,), (target,), edge.stages, str(arrivals)))
    return drawn(arrows, title or "pipelines of the plan")


def of_barriers(barriers: Barriers, title: str = "") -> Picture:
    """Draws the mbarriers that a simulated launch used, as rings of those used alike, with their counts and phases."""
    arrows = []
    for ring in barriers.rings():
        says = f"count {ring.count}"
        if ring.tx_bytes:
            says += f" + {ring.tx_bytes} bytes"
        says += f", {ring.phases} phase{'s' if ring.phases != 1 else ''}"
        if ring.pending:
            says += f"; unfinished: {ring.pending} of {ring.count} arrivals missing"
        arrows.append(Arrow(_named(ring), ring.arrive, ring.wait, ring.stages, says, bool(ring.pending)))
    return drawn(arrows, title or "mbarriers of the launch")


def _named(ring: Ring) -> str:
    """Returns the name of a ring; it begins with ``full`` if the source line has ``mbarrier_init(full, 1)``."""
    path, _, line = ring.where.rpartition(":")
    found = INIT.search(linecache.getline(path, int(line))) if line.isdigit() else None
    return f"{found[1]} ({ring.name})" if found else ring.name


def drawn(arrows: Sequence[Arrow], title: str) -> Picture:
    """Draws a column for each role, and a row for each ring, from the roles that arrive to those that wait."""
    names = list(dict.fromkeys(name for a in arrows for name in (*a.producers, *a.consumers)))
    step = max([BOX, *(24 + width_of(name) for name in names)]) + GAP
    left = 16 + step / 2
    widest = max((width_of(a.says, 10) for a in arrows), default=0)
    width = max(left + step * max(len(names), 1), widest + 24, 560)
    height = 84 + ROW * len(arrows)
    d = Drawing(width, height)
    d.add(
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    )
    d.text(8, 20, title, 13, font_weight="bold")
    at = {name: left + step * i for i, name in enumerate(names)}
    for name, x in at.items():
        d.line(x, 64, x, height - 10, LINE, stroke_dasharray="2 4")
        d.rect(x - step / 2 + GAP / 2, 36, step - GAP, 28, "#eef2f7", stroke=LINE, rx=6)
        d.text(x, 54, name, 11, "middle")
    lines = [f"{title}:"]
    for i, arrow in enumerate(arrows):
        _row(d, arrow, at, 92 + ROW * i, PALETTE[i % len(PALETTE)], width)
        who = f"{' and '.join(arrow.producers) or 'nobody'} -> {' and '.join(arrow.consumers) or 'nobody'}"
        lines.append(f"  {arrow.name} ({arrow.stages}): {who}: {arrow.says}")
    if not arrows:
        d.text(16, 80, "no mbarriers", fill=SOFT)
        lines = [f"{title}: none"]
    return Picture(d, "\n".join(lines))


def _row(d: Drawing, arrow: Arrow, at: Mapping[str, float], y: float, color: str, width: float) -> None:
    """Draws one ring: its buffers, its counts, and an arrow from each producer to each consumer."""
    places = [at[name] for name in (*arrow.producers, *arrow.consumers)]
    middle = sum(places) / len(places) if places else width / 2
    ink = BAD if arrow.wrong else INK
    for name in arrow.producers:
        d.add(f'<circle cx="{at[name]:g}" cy="{y + 14}" r="4" fill="{color}"/>')
    for source in arrow.producers:
        for target in arrow.consumers:
            if source == target:
                x = at[source]
                d.path(f"M{x:g} {y + 14}c40 -18 40 22 3 4", ink, marker_end="url(#head)", stroke_width=1.3)
            else:
                end = at[target] - (3 if at[target] > at[source] else -3)
                d.path(f"M{at[source]:g} {y + 14}L{end:g} {y + 14}", ink, marker_end="url(#head)", stroke_width=1.3)
    shown = min(arrow.stages, MOST_BUFFERS)
    for i in range(shown):
        d.rect(middle - 6 * shown + 12 * i, y + 9, 10, 10, color, stroke="#ffffff")
    label = f"{arrow.name} × {arrow.stages}" if arrow.stages > 1 else arrow.name
    for text, down, size, fill in ((label, 0, 11, ink), (arrow.says, 32, 10, BAD if arrow.wrong else SOFT)):
        half = width_of(text, size) / 2
        x = min(max(middle, 8 + half), width - 8 - half)
        d.rect(x - half - 2, y + down - size, 2 * half + 4, size + 4, "#ffffff", opacity=0.85)
        d.text(x, y + down, text, size, "middle", fill)

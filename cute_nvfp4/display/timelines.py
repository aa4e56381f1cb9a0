"""Time lines of each warp and engine of a CTA, from a trace in logical steps or from a timing in modelled time.

Where scripts run, the wheel zooms, the pointer drags, and a double click shows the whole again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import OperandError
from .svg import INK, PALETTE, SOFT, WAIT, Drawing, Picture, escape, number

if TYPE_CHECKING:
    from ..sim.observe.timing import Timing
    from ..sim.observe.trace import Trace

PLOT, LEFT, ROW, TICKS = 1000, 150, 22, 10
MOST_BARS, MOST_NAMES = 4000, 24
RUNS = "runs"
REASONS = {
    RUNS: "#5aae61", "issue": "#5aae61", "mbarrier": "#4477aa", "barrier": "#66ccee", "cluster": "#aa3377",
    "l2": "#ee6677", "dram": "#bb5566", "shared": "#ccbb44", "copies": "#004488", "tensor": "#9970ab",
    "fetch": "#997700", "constants": "#44aa99", "other": WAIT,
}  # fmt: skip
"""The colour of each reason for which a warp waits, the same in every picture."""
ROLES = {"copies": "load", "tensor": "MMA"}
_FOLDERS = re.compile(r"/(?:[^/\s]+/)+(?=[\w.-]+\.py\b)")
"""Matches the folders of a Python file; pictures, which may be stored, name only the file."""


class Bar(NamedTuple):
    """A bar of a track; ``begin`` and ``end`` are in the measure of the axis."""

    begin: float
    end: float
    name: str
    color: str
    more: str = ""  #: further words for the tooltip


def of_trace(trace: Trace, cta: str | None = None, begin: float = 0, end: float = math.inf, title: str = "") -> Picture:
    """Draws the trace of one CTA (by default the first) between the steps ``begin`` and ``end``.

    Runs and operations have a colour for each name, and waits are grey. The axis counts logical steps of the simulator,
    which order events and are no time.

    Raises:
        OperandError: the trace has nothing of that CTA between these steps.
    """
    rows = trace.rows()
    cta = cta or (rows[0].cta if rows else "")
    rows = [r for r in rows if r.cta == cta and r.begin < end and r.end > begin]
    if not rows:
        names = ", ".join(dict.fromkeys(r.cta for r in trace.rows())) or "none: nothing was launched with it"
        raise OperandError.of("CTA of the trace", got=repr(cta), expected=f"one of {names}, with bars in that time")
    colors: dict[str, str] = {}
    tracks: dict[str, list[Bar]] = {}
    for r in rows:
        name = "waits" if r.kind == "wait" else r.name
        next_color = PALETTE[sum(n != "waits" for n in colors) % len(PALETTE)]
        colors.setdefault(name, WAIT if r.kind == "wait" else next_color)
        more = str(r.args.get("for") or r.args.get("at") or r.args.get("instruction") or "")
        more = f"{r.name} {more}" if r.kind == "wait" else more
        bar = Bar(max(r.begin, begin), min(r.end, end), name, colors[name], more)
        tracks.setdefault(r.track, []).append(bar)
    return drawn(tracks, "logical steps (an order, not time)", title or cta, begin)


def of_timing(timing: Timing, cta: int | None = None, title: str = "") -> Picture:
    """Draws what the warps of one replayed CTA (by default the first) do and wait for, in modelled microseconds."""
    us = timing.cycles_per_us
    cta = timing.warps[0].cta if cta is None else cta
    tracks: dict[str, list[Bar]] = {}
    for w in timing.warps:
        if w.cta == cta:
            role = " and ".join(ROLES.get(r, r) for r in w.role.split(" and ") if r)
            bars = [Bar(w.begin / us, w.end / us, RUNS, REASONS[RUNS])]
            for at, warp, wait in timing.waits:
                if (at, warp) == (cta, w.warp):
                    name = wait.reason if wait.reason in REASONS else "other"
                    bars.append(Bar(wait.begin / us, wait.end / us, name, REASONS[name], wait.reason))
            tracks[f"warp {w.warp}" + (f", {role}" if role else "")] = bars
    axis = f"modelled microseconds on {timing.machine.upper()}, launch not counted"
    return drawn(tracks, axis, title or f"CTA {cta}", 0.0)


def drawn(tracks: dict[str, list[Bar]], axis: str, title: str, begin: float) -> Picture:
    """Draws a line for each track. Of too many bars it draws the longest, and the words say how many it left out."""
    bars = [(row, bar) for row, track in enumerate(tracks.values()) for bar in track]
    end = max(bar.end for _, bar in bars)
    left_out = max(0, len(bars) - MOST_BARS)
    if left_out:
        shortest = set(sorted(range(len(bars)), key=lambda j: bars[j][1].end - bars[j][1].begin)[:left_out])
        bars = [bar for j, bar in enumerate(bars) if j not in shortest]
    per = PLOT / max(end - begin, 1e-9)
    height = ROW * len(tracks)
    names = {bar.name: bar.color for _, bar in bars}
    d = Drawing(LEFT + PLOT + 20, 44 + height + 60 + 16 * math.ceil(len(names) / 6))
    d.text(8, 20, title, 13, font_weight="bold")
    for row, name in enumerate(tracks):
        d.text(LEFT - 8, 36 + ROW * (row + 0.68), name, 11, "end")
        d.line(LEFT, 36 + ROW * (row + 1), LEFT + PLOT, 36 + ROW * (row + 1), "#eeeeee")
    d.add(
        f'<svg x="{LEFT}" y="36" width="{PLOT}" height="{height}" viewBox="0 0 {PLOT} {height}" '
        f'preserveAspectRatio="none" style="cursor:grab;touch-action:none">'
        f'<rect width="{PLOT}" height="{height}" fill="#ffffff" fill-opacity="0"/>'
        f"{''.join(_boxes(bars, begin, per))}</svg>"
    )
    below = 36 + height
    d.line(LEFT, below, LEFT + PLOT, below, INK)
    digits = min(4, max(0, 2 - math.floor(math.log10(max(end - begin, 1e-9)))))
    for k in range(TICKS + 1):
        x = LEFT + PLOT * k / TICKS
        d.line(x, below, x, below + 4, INK)
        value = f"{begin + (end - begin) * k / TICKS:.{digits}f}"
        # where a picture zooms, its axis begins at 0
        zooms = {} if begin else {"data_at": k / TICKS, "data_per": f"{per:.9g}"}
        d.text(x, below + 16, value, 10, "middle", SOFT, **zooms)
    d.text(LEFT + PLOT / 2, below + 32, axis, 11, "middle", SOFT)
    shown = dict(list(names.items())[:MOST_NAMES])
    d.legend(LEFT, below + 54, shown, LEFT + PLOT)
    words = [f"{title}: {number(float(f'{end - begin:.4g}'))} {axis}"]
    words += [f"  {name}: {_summary(track, end - begin)}" for name, track in tracks.items()]
    words += [f"  left out: {left_out} of the shortest bars"] if left_out else []
    return Picture(d, "\n".join(words), zooms=not begin)


def _boxes(bars: Sequence[tuple[int, Bar]], begin: float, per: float) -> Iterable[str]:
    """Yields the boxes of bars, grouped by colour in the order of first use, so that waits lie on their runs."""
    for color in dict.fromkeys(bar.color for _, bar in bars):
        yield f'<g fill="{color}">'
        for row, bar in bars:
            if bar.color == color:
                x, w = (bar.begin - begin) * per, max((bar.end - bar.begin) * per, 0.2)
                more = _FOLDERS.sub("", re.sub(r"\s+", " ", f"{bar.name} {bar.more}")).strip()
                says = escape(f"{more}: {bar.begin:g} to {bar.end:g}"[:300])
                place = f'x="{x:.2f}" y="{ROW * row + 3}" width="{w:.2f}" height="{ROW - 5}"'
                yield f"<rect {place}><title>{says}</title></rect>"
        yield "</g>"


def _summary(track: Sequence[Bar], whole: float) -> str:
    """Returns the three names that take most of a track, with their shares of the whole."""
    spent: dict[str, float] = {}
    for bar in track:
        spent[bar.name] = spent.get(bar.name, 0.0) + bar.end - bar.begin
    if RUNS in spent:  # bars of waits lie on the bar of the run
        spent[RUNS] -= sum(v for k, v in spent.items() if k != RUNS)
    most = sorted(spent.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {share / whole:.0%}" for name, share in most)

"""Drawings of modelled times: the roofline of launches, and what their warps spend time on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .svg import IDLE, INK, LINE, PALETTE, SOFT, Drawing, Page, Picture, ink_on, stacked, table, width_of
from .timelines import REASONS, RUNS, of_timing

if TYPE_CHECKING:
    from ..sim.observe.timing import Timing

PLOT, LEFT = 760, 150
LEAST = 0.01
BINS, ABSENT = 120, "not there"


def timing(t: Timing) -> Page:
    """Returns a page of a modelled time: its figures, the roofline, lost time by reason, and the time line of a CTA."""
    rows = [
        ["modelled time", f"{t.microseconds:.2f} µs on {t.machine.upper()}"],
        ["of it a launch", f"{t.launch_us:.2f} µs ({t.launch_from})"],
        ["roofline", f"{t.roofline_us:.2f} µs"],
        ["bound by", t.bound_by],
        ["busy", ", ".join(f"{name} {share:.0%}" for name, share in t.busy.items())],
        *(["note", note] for note in t.notes),
    ]
    return stacked(table(["modelled, not measured", ""], rows), rooflines({"": t}), lost({"": t}), of_timing(t))


def rooflines(timings: Mapping[str, Timing]) -> Picture:
    """Draws the modelled time of each launch beside its bounds: the times that its bytes and its issue slots would take
    alone, at full rate. No bar includes the launch overhead."""
    most = max(t.microseconds - t.launch_us for t in timings.values())
    most = max([most, *(v for t in timings.values() for v in t.bounds_us.values()), 1e-6])
    d = Drawing(LEFT + PLOT + 90, 40 + sum(26 + 20 * (1 + len(t.bounds_us)) for t in timings.values()) + 20)
    d.text(8, 20, "roofline: modelled µs, launch not counted", 13, font_weight="bold")
    y, words = 34, ["roofline, modelled us, launch not counted:"]
    for name, t in timings.items():
        took = t.microseconds - t.launch_us
        entries = {"modelled": took} | {f"{bound} at full rate": value for bound, value in t.bounds_us.items()}
        if name:
            d.text(8, y + 13, name, 11, font_weight="bold")
            y += 18
        for j, (what, value) in enumerate(entries.items()):
            d.text(LEFT - 8, y + 13, what, 11, "end")
            d.rect(LEFT, y, max(1.0, PLOT * value / most), 16, PALETTE[0] if not j else "#888888", what)
            d.text(LEFT + PLOT * value / most + 6, y + 13, f"{value:.3g}", 10, fill=SOFT)
            y += 20
        limit = LEFT + PLOT * max(t.bounds_us.values()) / most
        d.line(limit, y - 20 * len(entries) - 2, limit, y, INK, stroke_dasharray="3 3")
        said = ", ".join(f"{what} {value:.3g}" for what, value in entries.items())
        words.append(f"  {name + ': ' if name else ''}{said}")
        y += 8
    d.height = y + 10
    return Picture(d, "\n".join(words))


def lost(timings: Mapping[str, Timing]) -> Picture:
    """Draws a bar for each launch: the share of warp time that each reason cost. The rest is issue and latency."""
    names: dict[str, str] = {}
    d = Drawing(LEFT + PLOT + 24, 40 + 34 * len(timings) + 54)
    d.text(8, 20, "what the warps' time went to (modelled)", 13, font_weight="bold")
    words = ["share of the warps' time, modelled:"]
    for row, (name, t) in enumerate(timings.items()):
        x, y = float(LEFT), 34 + 34 * row
        d.text(LEFT - 8, y + 17, name, 11, "end")
        for reason, share in sorted(t.lost.items(), key=lambda item: -item[1]):
            color = REASONS.get(reason, PALETTE[len(names) % len(PALETTE)])
            if share >= LEAST:
                names[reason] = color
            d.rect(x, y, PLOT * share, 24, color, f"{reason} {share:.1%}", stroke="#ffffff", stroke_width=0.7)
            if width_of(reason, 10) < PLOT * share - 4:
                d.text(x + PLOT * share / 2, y + 16, reason, 10, "middle", ink_on(color))
            x += PLOT * share
        said = ", ".join(f"{k} {v:.0%}" for k, v in sorted(t.lost.items(), key=lambda item: -item[1]) if v >= LEAST)
        words.append(f"  {name + ': ' if name else ''}{said}")
    end = 34 + 34 * len(timings)
    d.line(LEFT, end, LEFT + PLOT, end, LINE)
    d.legend(LEFT, end + 20, names, LEFT + PLOT)
    return Picture(d, "\n".join(words))


def phases(timings: Mapping[str, Timing]) -> Picture:
    """Draws which share of the replayed warps does what, from the first CTA's start to the last one's end."""
    d = Drawing(LEFT + PLOT + 24, 40 + 92 * len(timings) + 30)
    d.text(8, 20, "what all replayed warps do (modelled)", 13, font_weight="bold")
    names: dict[str, str] = {}
    words = ["what most replayed warps do, modelled:"]
    for row, (name, t) in enumerate(timings.items()):
        y = 34 + 92 * row
        d.text(LEFT - 8, y + 40, name, 11, "end")
        at = np.ones(BINS)  # from below
        for kind, part in shares(t).items():
            color = REASONS.get(kind, IDLE)
            if part.any():
                names[kind] = color
            top = at - part
            edge = [f"{LEFT + PLOT * k / BINS:g} {y + 72 * v:.2f}" for k, v in _steps(top)]
            back = [f"{LEFT + PLOT * k / BINS:g} {y + 72 * v:.2f}" for k, v in reversed(_steps(at))]
            d.add(f'<path d="M{" L".join(edge + back)}z" fill="{color}"/>')
            at = top
        d.text(LEFT, y + 84, "0", 10, "middle", SOFT)
        d.text(LEFT + PLOT, y + 84, f"{t.cycles / t.cycles_per_us:.2f} µs", 10, "end", SOFT)
        said = ", ".join(f"{p.begin:.1f} to {p.end:.1f} us {p.bound_by}" for p in t.phases())
        words.append(f"  {name + ': ' if name else ''}{said}")
    d.legend(LEFT, 40 + 92 * len(timings) + 14, names, LEFT + PLOT)
    return Picture(d, "\n".join(words))


def shares(t: Timing) -> dict[str, np.ndarray]:
    """Returns the shares (``BINS``,) of the replayed warps that do each thing in each part of a launch, in all 1."""
    edges = np.linspace(0, t.cycles, BINS + 1)

    def overlap(begin: float, end: float) -> np.ndarray:
        return np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin), 0, None)

    out = {kind: np.zeros(BINS) for kind in (RUNS, *REASONS, ABSENT)}
    for w in t.warps:
        out[RUNS] += overlap(w.begin, w.end)
    for _, _, wait in t.waits:
        part = overlap(wait.begin, wait.end)
        out[RUNS] -= part
        out[wait.reason if wait.reason in REASONS else "other"] += part
    whole = len(t.warps) * t.cycles / BINS
    out[ABSENT] = whole - sum(out.values())
    return {kind: part / whole for kind, part in out.items()}


def _steps(values: np.ndarray) -> list[tuple[int, float]]:
    """Returns the corners of a line of steps, which has each value over its part."""
    return [(k + side, float(v)) for k, v in enumerate(values) for side in (0, 1)]

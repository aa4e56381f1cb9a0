"""Draws the trace of a simulated launch: what each warp and engine of a CTA does, over logical steps."""

from __future__ import annotations

import sys
from typing import Any

import matplotlib.pyplot as plt

from cute_nvfp4.sim.observe.trace import Row, Trace

WAIT = "0.85"
PALETTE = [c for j, c in enumerate(plt.get_cmap("tab20").colors) if j not in (14, 15)]  # without its greys


def plot(trace: Trace, ax: Any = None, cta: str | None = None, begin: int = 0, end: int = sys.maxsize) -> Any:
    """Bars of one CTA (by default the first) between two steps; waits are grey, and equal names have equal colours.

    Returns the axes. The horizontal axis counts steps of the simulator, not time.
    """
    rows = [r for r in trace.rows() if r.begin < end and r.end > begin]
    cta = cta or min((r for r in rows), key=lambda r: r.begin).cta
    rows = [r for r in rows if r.cta == cta]
    tracks = list(dict.fromkeys(r.track for r in rows))
    ax = ax or plt.subplots(figsize=(12, 0.4 * len(tracks) + 1.6))[1]
    colours = _colours(rows)
    for r in rows:
        low, high = max(r.begin, begin), min(r.end, end)
        colour = WAIT if r.kind == "wait" else colours[r.name]
        ax.barh(tracks.index(r.track), high - low, left=low, height=0.8, color=colour, linewidth=0)
    ax.set_yticks(range(len(tracks)), tracks)
    ax.invert_yaxis()
    ax.set_xlabel("logical steps (not time)")
    ax.set_title(cta, loc="left")
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in [*colours.values(), WAIT]]
    ax.legend(handles, [*colours, "waiting"], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    return ax


def _colours(rows: list[Row]) -> dict[str, Any]:
    names = list(dict.fromkeys(r.name for r in rows if r.kind != "wait"))
    return {name: PALETTE[j % len(PALETTE)] for j, name in enumerate(names)}

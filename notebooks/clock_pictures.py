"""Pictures of what the simulator's clock says of a launch, for ``07_time.ipynb``. All times are modelled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from cute_nvfp4.sim.observe.timing import Timing

COLORS = {
    "runs": "tab:green",
    "mbarrier": "tab:blue",
    "barrier": "tab:cyan",
    "cluster": "tab:purple",
    "fetch": "tab:orange",
    "constants": "tab:olive",
    "other": "tab:gray",
    "not there": "0.95",
}
"""What a warp does or waits for; ``mbarrier``: a stage, or an accumulator."""
ROLES = {"copies": "load warp", "tensor": "MMA warp", "": "epilogue warp"}
BINS = 120


def _kind(reason: str) -> str:
    return reason if reason in COLORS else "other"


def role_lines(ax: Any, timing: Timing, title: str) -> None:
    """A line for each role of the first replayed CTA: what its warp waits for, and where it runs."""
    cta, us = timing.warps[0].cta, timing.cycles_per_us
    shown = {w.role: w for w in timing.warps if w.cta == cta}  # of a role the last: the first may also store by TMA
    order = [role for role in ROLES if role in shown]
    for row, role in enumerate(order):
        warp = shown[role]
        ax.barh(row, (warp.end - warp.begin) / us, left=warp.begin / us, height=0.7, color=COLORS["runs"])
        for at, number, wait in timing.waits:
            if (at, number) == (cta, warp.warp):
                length = (wait.end - wait.begin) / us
                ax.barh(row, length, left=wait.begin / us, height=0.7, color=COLORS[_kind(wait.reason)])
    ax.set(yticks=range(len(order)), ylim=(len(order) - 0.4, -0.6), title=title)
    ax.set_yticklabels([ROLES[role] for role in order])


def shares(timing: Timing) -> dict[str, np.ndarray]:
    """What share of the replayed warps does what, in each of ``BINS`` parts of the launch."""
    edges = np.linspace(0, timing.cycles, BINS + 1)
    out = {kind: np.zeros(BINS) for kind in COLORS}

    def overlap(begin: float, end: float) -> np.ndarray:
        return np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin), 0, None)

    for w in timing.warps:
        out["runs"] += overlap(w.begin, w.end)
    for _, _, wait in timing.waits:
        part = overlap(wait.begin, wait.end)
        out["runs"] -= part
        out[_kind(wait.reason)] += part
    whole = len(timing.warps) * timing.cycles / BINS
    out["not there"] = whole - sum(out.values())
    return {kind: part / whole for kind, part in out.items()}


def stacked(ax: Any, timing: Timing, title: str) -> None:
    """The phases of a launch: what all replayed warps do, stacked."""
    parts = shares(timing)
    at = (np.arange(BINS) + 0.5) * timing.cycles / BINS / timing.cycles_per_us
    ax.stackplot(at, *parts.values(), colors=[COLORS[kind] for kind in parts])
    ax.set(ylim=(0, 1), yticks=[], title=title, xlabel="modelled µs of a B200, launch not counted")


def legend(figure: Any) -> None:
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, ncol=len(COLORS), loc="lower center", frameon=False, bbox_to_anchor=(0.5, -0.06))


def rooflines(ax: Any, timings: Mapping[str, Timing]) -> None:
    """The modelled time of each launch beside what its bytes and its issue slots would take at full rate."""
    for row, timing in enumerate(timings.values()):
        least = timing.roofline_us - timing.launch_us
        took = timing.microseconds - timing.launch_us
        ax.barh(row - 0.2, took, height=0.36, color="tab:blue", label="" if row else "modelled")
        ax.barh(row + 0.2, least, height=0.36, color="0.5", label="" if row else "roofline")
        ax.text(took, row - 0.2, f" {took:.2f}", va="center", fontsize=8)
        ax.text(least, row + 0.2, f" {least:.2f}", va="center", fontsize=8)
    ax.set(yticks=range(len(timings)), ylim=(len(timings) - 0.4, -0.6), xlabel="µs, launch not counted")
    ax.set_yticklabels(timings)
    ax.legend(frameon=False, loc="lower right")

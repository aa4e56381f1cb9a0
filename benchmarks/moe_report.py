"""Prints what ``moe.py`` measures of a layer: its times, and the times of each launch."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import moe_contestants
import torch
from common import Captured

TRACED = 7
"""How many calls the profiler traces to time each launch."""
CONTESTANTS = ("moe", "added", "w4a8", "torch", *moe_contestants.NAMES)
OURS = "cute_nvfp4"
"""The name of each kernel of the package contains this."""


def parts(call: Captured, clear: Callable[[], None]) -> list[dict]:
    """The time of each launch of a call, and the gap before the next one, in µs: medians of torch's profiler. Empty if
    the profiler sees no kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED):
            clear()
            call.graph.replay()
        torch.cuda.synchronize()
    spans = [(x.time_range.start, x.time_range.end, x.name) for x in profiler.events() if OURS in x.name]
    each, rest = divmod(len(spans), TRACED)
    if rest or not each:
        return []
    spans.sort()
    runs = [spans[i : i + each] for i in range(0, len(spans), each)]
    found = []
    for i in range(each):
        name = spans[i][2].partition(OURS)[2][:40]
        us = statistics.median(run[i][1] - run[i][0] for run in runs)
        after = statistics.median(run[i + 1][0] - run[i][1] for run in runs) if i + 1 < each else 0.0
        found.append({"kernel": name, "us": us, "until_next_us": after})
    return found


def show_parts(row: dict) -> None:
    """Prints the launches of each call."""
    for name, launches in row["parts"].items():
        words = ", ".join(f"{x['kernel']} {x['us']:.1f} (+{x['until_next_us']:.1f})" for x in launches)
        print(f"{row['model']:>14} {row['tokens']:5} {name}: {words}", flush=True)


def show_times(row: dict) -> None:
    """Prints a row of the table."""
    kind, us = "skewed" if row["skewed"] else "uniform", row["us"]
    words = " ".join(f"{us[name]:8.1f}" if name in us else " " * 8 for name in CONTESTANTS)
    ratio = f"{us['torch'] / us['moe']:8.2f}" if {"torch", "moe"} <= us.keys() else " " * 8
    print(f"{row['model']:>14} {row['tokens']:5} {kind:>7} {words} {ratio} {row['floor_us']:8.1f}", flush=True)


def show(rows: list[dict]) -> None:
    """Prints the table."""
    columns = (*(f"{name} us" for name in CONTESTANTS), "ratio", "floor us")
    print(f"{'layer':>14} {'T':>5} {'routing':>7} " + " ".join(f"{x:>8}" for x in columns))
    for row in rows:
        show_times(row)

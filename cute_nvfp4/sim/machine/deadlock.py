"""The picture of a deadlock: who waits, for what, and who could still have brought it."""

from __future__ import annotations

from typing import Any

from cute_nvfp4.sim.machine.engine import Wait
from cute_nvfp4.sim.machine.wave import Wave

MOST = 12
"""Lines shown for waits of one kind."""


def picture(parked: list[Wait], wave: Wave) -> list[str]:
    """One line for each place and reason, with the first warp that waits there and how many more do."""
    seen: dict[tuple[str, str], list[Any]] = {}
    for wait in parked:
        for row in range(len(wait.group.warps)):
            what = wait.describe(row)
            key = (wait.instruction.where(), what.partition(" of CTA")[0])
            entry = seen.setdefault(key, [0, int(wait.group.warps[row]), wait, row])
            entry[0] += 1
    lines = []
    for (where, _), (count, warp, wait, row) in list(seen.items())[:MOST]:
        who = f"{wave.cta_name(int(wave.cta_of_warp[warp]))}, warp {int(wave.warp_in_cta[warp])}"
        others = f" and {count - 1} more warp{'s' if count > 2 else ''} wait" if count > 1 else " waits"
        lines.append(f"  {who}{others} at {where}")
        lines.append(f"    for {wait.describe(row)}")
    if len(seen) > MOST:
        lines.append(f"  … and {len(seen) - MOST} other waits")
    done = int((~wave.live.any(axis=1)).sum())
    pending = sum(len(q) for q in wave.engines.queues.values())
    lines.append(f"  {done} of {wave.warps} warps have exited; {pending} asynchronous operations are under way")
    if wave.run.clusters_left.size:
        waiting = wave.run.clusters_left.size * wave.cluster_size
        lines.append(f"  {waiting} CTAs have not started: the GPU holds {wave.count} of them at a time")
    return lines

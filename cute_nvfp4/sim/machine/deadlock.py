"""The description of a deadlock in its error message: which warps wait, where, and for what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from cute_nvfp4.sim.machine.barriers import Barriers
from cute_nvfp4.sim.machine.engine import Wait
from cute_nvfp4.sim.machine.wave import Group, Wave

MOST = 32
"""The most reasons to wait that a message lists."""
MOST_CTAS = 8
"""The most CTAs whose warps a message lists for one reason."""


def picture(wave: Wave, unmet: list[Group], barriers: Barriers, parked: list[Wait]) -> list[str]:
    """Returns the lines of a message that list every waiting warp by its reason.

    unmet: groups that wait for other lanes of their warps or other warps of their warpgroups.
    barriers: the named barriers, at which groups wait.
    parked: the other waits.
    """
    by: dict[tuple[str, ...], tuple[list[int], list[str]]] = {}
    reasons = (*_for_lanes(wave, unmet), *_at_barriers(wave, barriers), *_parked(parked))
    for warp, key, lines in reasons:
        by.setdefault(key, ([], lines))[0].append(warp)
    lines = []
    for warps, (first, *more) in list(by.values())[:MOST]:
        lines.append(f"  {who(wave, warps)} wait{'s' if len(warps) == 1 else ''} {first}")
        lines += [f"    {line}" for line in more]
    left = [warps for warps, _ in list(by.values())[MOST:]]
    if left:
        lines.append(f"  … and {sum(map(len, left))} more for {len(left)} other reasons")
    every = len({warp for warp, _, _ in reasons})
    done = int((~wave.live.any(axis=1)).sum())
    pending = sum(len(q) for q in wave.engines.queues.values())
    lines.append(
        f"  {every} of {wave.warps} warps wait, {done} have exited; {pending} asynchronous operations are under way"
    )
    if wave.run.clusters_left:
        waiting = len(wave.run.clusters_left) * wave.cluster_size
        lines.append(f"  {waiting} CTAs have not started: the GPU holds {wave.count} of them at a time")
    return lines


def who(wave: Wave, warps: Iterable[int]) -> str:
    """Returns the names of warps, given by index in the wave; CTAs with the same warps are named together."""
    by: dict[int, list[int]] = {}
    for warp in sorted(set(warps)):
        by.setdefault(int(wave.cta_of_warp[warp]), []).append(int(wave.warp_in_cta[warp]))
    alike: dict[str, list[str]] = {}
    for cta, own in list(by.items())[:MOST_CTAS]:
        alike.setdefault(_ranges(own), []).append(wave.cta_name(cta))
    parts = [f"{_several(names)}, {own}" for own, names in alike.items()]
    rest = list(by.values())[MOST_CTAS:]
    return "; ".join(parts) + (f"; and {sum(map(len, rest))} warps of {len(rest)} more CTAs" if rest else "")


def _several(names: list[str]) -> str:
    """Joins the names of CTAs; several names lose their ranks."""
    if len(names) == 1:
        return names[0]
    return "CTAs " + ", ".join(name.partition(" (rank")[0].removeprefix("CTA ") for name in names)


def _ranges(numbers: list[int]) -> str:
    """Returns ascending warp numbers as ranges, such as "warps 0-3, 7"."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    parts = [f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in np.split(np.array(numbers), cuts)]
    return f"warp{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


Reason = tuple[int, tuple[str, ...], list[str]]
"""A warp, the key that equal reasons share, and the lines that word the reason."""


def _for_lanes(wave: Wave, unmet: list[Group]) -> Iterator[Reason]:
    for g in unmet:
        where = wave.run.kernel.blocks[g.block].code[0][0].where()
        lanes = int(g.lanes()[0].sum())
        for warp in g.warps.tolist():
            yield warp, ("lanes", where), [f"({lanes} lane(s) of it) for other lanes of the warp at {where}"]


def _at_barriers(wave: Wave, barriers: Barriers) -> Iterator[Reason]:
    here = barriers.came
    for w in barriers.waiting:
        where = w.block.code[-1][0].where()
        for warp, ident, count in zip(w.group.warps.tolist(), w.ident.tolist(), w.count.tolist()):
            cta = int(wave.cta_of_warp[warp])
            alive = int(wave.live[wave.cta_of_warp == cta].sum())
            threads = f"{int(here[cta, ident])} thread(s) of the CTA here, {count or alive} wanted, {alive} alive"
            yield warp, ("barrier", str(ident), where, threads), [f"at barrier {ident}: {where}", threads]


def _parked(parked: list[Wait]) -> Iterator[Reason]:
    for wait in parked:
        where = wait.instruction.where()
        for row, warp in enumerate(wait.group.warps.tolist()):
            what = wait.describe(row)
            yield warp, ("wait", where, what.partition(" of CTA")[0]), [f"at {where}", f"for {what}"]

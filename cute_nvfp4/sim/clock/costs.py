"""The costs of a replay, by SASS instruction, by SM and by pipe."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from cute_nvfp4.sim.clock.replay import Replay
from cute_nvfp4.sim.clock.steps import PIPES
from cute_nvfp4.sim.clock.warps import SCHEDULERS, Warp
from cute_nvfp4.sim.observe.timing import Cost, SmTime

_UNIT = PIPES.index("tensor")


def costs(replay: Replay) -> tuple[Cost, ...]:
    """Returns the cost of every SASS instruction of the kernel, in the order of the code. Instructions that no warp has
    issued cost nothing."""
    passes: Counter[int] = Counter()
    lists = {}
    for warp in replay.warps:
        for steps, _ in warp.program:  # a warp issues all steps of a list
            passes[id(steps)] += warp.sm.weight
            lists[id(steps)] = steps
    issued: Counter[int] = Counter()
    steps = {}
    for key, times in passes.items():
        for step in lists[key]:
            issued[step.slot.address] += times
            steps[step.slot.address] = step
    lost: dict[int, dict[str, float]] = defaultdict(dict)
    for (address, reason), cycles in sorted(replay.lost.items()):
        if cycles:
            lost[address][reason] = cycles
    out = []
    for slot in replay.code.listing:
        times, step = issued[slot.address], steps.get(slot.address)
        pipe, busy = ("", 0.0) if step is None else (PIPES[step.pipe], times * step.interval)
        waited = lost[slot.address]
        out.append(Cost(slot.address, slot.text, slot.source, times, times * slot.stall, waited, pipe, busy))
    return tuple(out)


def pipes(replay: Replay, code: Iterable[Cost], cycles: float) -> dict[str, float]:
    """Returns the share of ``cycles`` in which each pipe is busy, averaged over all schedulers of all SMs."""
    busy: Counter[str] = Counter()
    for cost in code:
        busy[cost.pipe] += cost.busy
    busy[PIPES[_UNIT]] += SCHEDULERS * sum(sm.weight * sm.tensor_busy for sm in replay.sms)  # tcgen05: all four
    whole = SCHEDULERS * replay.machine.sms * cycles
    return {pipe: busy[pipe] / whole for pipe in PIPES if busy[pipe]}


def sm_times(replay: Replay) -> tuple[SmTime, ...]:
    """Returns the times of each replayed SM."""
    warps: dict[int, list[Warp]] = defaultdict(list)
    for warp in replay.warps:
        warps[id(warp.sm)].append(warp)
    out = []
    for sm in replay.sms:
        mine = warps[id(sm)]
        alive = sum(w.ready - w.begin for w in mine)
        start = len(mine) * replay.machine["launch.constants"]
        out.append(SmTime(sm.weight, _covered((w.begin, w.ready) for w in mine), alive, start, sm.issued))
    return tuple(out)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of ``spans``."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total

"""Runs a launch: its waves of CTAs one after the other, and in each wave one group of warps after the other.

Lanes or warps of a group that branch to different blocks become different groups. The group in the lowest block
(reverse post-order) runs first; groups that reach the same block are merged. A group that has waited long for its turn
goes before all others, so that a warp which spins on a flag cannot starve the warp that sets it. Execution is
deterministic.

A group that polls memory in a loop is parked until memory changes. If some warps of a group must wait for lanes that
are elsewhere, the others wait with them, so that the group stays together; when nothing else can run, or the group has
waited long, they go on without them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import closing

import numpy as np

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim.errors import Deadlock, DivergentBarrier, LaunchError, ResidencyError, StepLimit, Trap
from cute_nvfp4.sim.frontend.flow import EXIT, asks, loop_around
from cute_nvfp4.sim.frontend.opcodes import WARPGROUP
from cute_nvfp4.sim.machine.barriers import Barriers
from cute_nvfp4.sim.machine.deadlock import picture, who
from cute_nvfp4.sim.machine.engine import MemoryWait, Wait
from cute_nvfp4.sim.machine.held import Held
from cute_nvfp4.sim.machine.launched import Run
from cute_nvfp4.sim.machine.livelock import Livelock
from cute_nvfp4.sim.machine.merge import merge
from cute_nvfp4.sim.machine.residency import clusters_together
from cute_nvfp4.sim.machine.wave import PATIENCE, Group, Wave

IMPATIENCE = 8
"""The least ``Group.patience``, which is halved each time that a group was overdue."""
SPLITS = 1 / 16
"""The probability that a group is split before it runs a block, under a schedule with random warps."""
IDLE = 64
"""Steps after which batch engines get a turn and waits are tested though warps can go on, which may poll for ever."""
TOGETHER = "CTAs that wait for one another must be resident together: launch fewer, or cooperatively"
_NONE = np.zeros(1, bool)


def execute(run: Run, warps_per_wave: int | None) -> None:
    """Runs all waves of a launch. ``warps_per_wave`` is that of ``residency.clusters_together``."""
    with np.errstate(all="ignore"):
        while len(run.clusters_left):
            with closing(Wave(run, run.take(clusters_together(run, warps_per_wave)))) as wave:
                WaveRunner(run, wave).run()


def _last_before_exit(blocks: Iterable[int]) -> int:
    """Returns the last of ``blocks`` in the program, or the exit if it is among them."""
    every = list(blocks)
    return EXIT if EXIT in every else max(every)


class WaveRunner:
    """The scheduler of one wave."""

    def __init__(self, state: Run, wave: Wave) -> None:
        self.state, self.wave, self.kernel = state, wave, state.kernel
        self.blocks, self.functions = state.kernel.blocks, state.kernel.functions
        wave.live = self.live = wave.live.copy()
        mask = None if self.live.all() else self.live
        start = 0 if self.blocks else EXIT
        first = Group(wave, start, np.arange(wave.warps), mask, list(state.zeros))
        self.random = random.Random(state.schedule.seed)
        wave.random = self.random if state.schedule.warps == "random" else None
        self.first = _last_before_exit if state.schedule.warps == "late" else min
        self.ready = [first] if wave.random is None else self._split(first)  # groups that can run
        self.held = Held(wave)
        self.unmet: list[Group] = []  # groups of which some warps must wait for lanes or warps that are elsewhere
        self.parked: list[Wait] = []  # all other waits
        self.asked = -1  # ``wave.changes`` when the parked waits were last tested
        self.polls: int | None = None  # the head of the polling loop around the block that runs
        self.barriers = Barriers(wave)
        self.engines = wave.engines
        self.livelock = Livelock(wave)
        self.events = wave.events
        self.clock = self.instructions = 0  # steps (runs of a group), and their instructions

    def run(self) -> None:
        while self.ready or self.held.back or self.unmet or self.parked or self.barriers.waiting:
            if self.held.on:
                self.ready = self.held.keep(self.ready, self.clock, self._rows)
            idle = not self.ready or self.clock % IDLE == 0
            self.engines.turn(idle)
            if self.parked and (idle or self.wave.random is not None):
                self._ask()
            if self.unmet and idle and self.clock - min(g.age for g in self.unmet) > PATIENCE:
                self._part_unmet()
            if not self.ready:
                self._wake()
                continue
            group = self._next()
            if group.block == EXIT:
                self._retire(group)
            elif self._lanes_missing(group).any():
                group.age = self.clock
                self.unmet.append(group)
            else:
                self._step(group)
        self.engines.drain()
        if self.wave.tensor_memory is not None:
            self.wave.tensor_memory.cta_exited(np.arange(self.wave.count))
        self.events.finished()

    def _split(self, group: Group) -> list[Group]:
        """Splits a group into at most 8 groups, at random."""
        parts = np.array([self.random.randrange(min(8, group.n)) for _ in range(group.n)])
        return [group.some(np.flatnonzero(parts == k), []) for k in np.unique(parts)]

    def _part(self, group: Group) -> Group:
        """Returns a random part of the group, and makes the rest wait for another turn. Otherwise warps that were at
        the same block once would stay together, even those of different CTAs."""
        stays = np.array([self.random.random() < 0.5 for _ in range(group.n)])
        if stays.all() or not stays.any():
            return group
        rest, part = (self._rows(group, np.flatnonzero(rows)) for rows in (stays, ~stays))
        rest.age = part.age = self.clock
        self.ready.append(rest)
        return part

    def _park(self, wait: Wait) -> None:
        self.parked.append(wait)
        self.asked = -1
        self.events.parked(wait.group, wait.instruction, wait)

    def _ask(self) -> None:
        """Makes the parked warps ready whose waits are over."""
        if self.asked == self.wave.changes:
            return
        self.asked = self.wave.changes
        still = []
        for wait in self.parked:
            go = wait.ready()
            if not go.any():
                still.append(wait)
                continue
            rows = np.flatnonzero(go)
            group = self._rows(wait.group, rows)
            wait.passed(rows, group)
            self.events.resumed(group, wait.instruction)
            group.age = self.clock
            self.ready.append(group)
            rest = np.flatnonzero(~go)
            if len(rest):
                still.append(wait.part(rest, self._rows(wait.group, rest)))
        self.parked = still

    def _rows(self, group: Group, rows: np.ndarray) -> Group:
        return group if len(rows) == group.n else group.some(rows, self.kernel.live_slots(group.block))

    def _wake(self) -> None:
        """Helps when no group is ready: runs warps of ``unmet`` that need not wait, else operations of the engines,
        else releases held warps or barriers. Raises an error if nothing can help."""
        if self._part_unmet():
            return
        before = self.wave.changes
        if self.engines.work() or self.wave.changes != before or self.asked != before:
            self._ask()
            return
        if self.held.let_go():
            return
        self.ready = self.barriers.release(self.live)
        if not self.ready:
            raise self._stuck()

    def _next(self) -> Group:
        """Takes the next group to run from ``ready``, merged with others at its block."""
        ready = self.ready
        self.clock += 1
        if len(ready) == 1:
            group = ready.pop()
        else:
            first = min(ready, key=lambda g: g.age + g.patience)
            # The exit is the lowest block, so it comes first: lanes that exit release others.
            overdue = self.clock - first.age > first.patience
            block = first.block if overdue else self.first(g.block for g in ready)
            if self.wave.random is not None and block != EXIT:
                block = self.random.choice(ready).block
            same = [g for g in ready if g.block == block]
            if self.wave.random is not None and len(same) > 1 and self.random.random() < 0.5:
                same = [self.random.choice(same)]
            self.ready = [g for g in ready if g not in same]
            group = same[0] if len(same) == 1 else merge(same, self.kernel.live_slots(block))
            # A group that was overdue, as behind a polling loop, need not wait as long again.
            group.patience = max(first.patience // 2, IMPATIENCE) if overdue else PATIENCE
        if self.unmet and group.block != EXIT:
            same = [g for g in self.unmet if g.block == group.block]
            if same:
                self.unmet = [g for g in self.unmet if g.block != group.block]
                group = merge([group, *same], self.kernel.live_slots(group.block))
        if self.wave.random is not None and group.n > 1 and group.block != EXIT and self.random.random() < SPLITS:
            group = self._part(group)
        if self.clock > self.state.step_limit or self.instructions > self.state.instruction_limit:
            raise StepLimit(self._out_of_steps(group))
        if (
            group.block != EXIT
            and not self.held.back
            and self.livelock.hangs(group, self.clock, self.kernel.live_slots(group.block))
        ):
            stuck = self.livelock.stuck
            if not self.engines.waiting and all(stuck[g.warps].all() for g in [group, *self.ready]):
                raise self._hung([group, *self.ready])
        return group

    def _hung(self, groups: list[Group]) -> SimError:
        """Returns the error for loops that can never end; they may wait for CTAs that have not started."""
        lines = [f"{self.state.launch.title}: every warp that runs repeats a loop that changes nothing"]
        for g in groups:
            lines.append(f"  {who(self.wave, g.warps.tolist())} come back to {self._place(g)}")
        lines += picture(self.wave, self.unmet, self.barriers, self.parked)
        if not len(self.state.clusters_left):
            return Deadlock("\n".join(lines))
        lines.append(f"  {TOGETHER}")
        return ResidencyError("\n".join(lines))

    def _lanes_missing(self, group: Group) -> np.ndarray:
        """Returns which warps must wait for lanes or warps that are elsewhere, (n,) or one False for all, because the
        first instruction of the group's block needs them."""
        block = self.blocks[group.block] if group.block != EXIT else None
        if block is None or block.converge is None:
            return _NONE
        absent = self._warps_missing(group) if block.converge == WARPGROUP else _NONE
        if group.mask is None:
            return absent
        need = self.live[group.warps]
        if block.converge >= 0:
            need = need & self.kernel.member_lanes(group, block)
        return (need & ~group.mask).any(axis=1) | absent

    def _warps_missing(self, group: Group) -> np.ndarray:
        """Returns which warps must wait for other warps of their warpgroups, (n,) or one False for all."""
        if group.n == self.wave.warps:
            return _NONE
        here = ~self.live.any(axis=1)
        here[group.warps] = True
        inside, last = self.wave.warp_in_cta[group.warps], self.wave.warps_per_cta - 1
        others = np.minimum((inside // 4 * 4)[:, None] + np.arange(4), last)
        return ~here[(group.warps - inside)[:, None] + others].all(axis=1)

    def _step(self, group: Group) -> None:
        block = self.blocks[group.block]
        self.wave.steps = self.clock
        self.instructions += len(block.code)
        self.events.block(group, block.index)
        self.polls = block.polls
        if block.polls is None:
            group.seen = -1
        elif block.polls == block.index:
            group.seen = self.wave.changes
        outcome = self.functions[block.index](group)
        if block.control == "barrier":
            released = self.barriers.arrive(group, block, outcome, self.live)
            self.ready += released
            for g in released:
                g.age = self.clock
        elif block.control == "wait":
            group.block, group.age = block.next, self.clock
            if outcome is None:
                self.ready.append(group)
            else:
                self._park(outcome)
        elif block.control == "table":
            self._branch_table(group, outcome[0])
        elif block.control == "trap":
            raise Trap(f"trap executed: {block.code[-1][0].where()}")
        elif not block.control:
            self._go(group, block.next)
        else:
            target = block.targets[0] if block.control == "branch" else EXIT
            if outcome is None:
                self._go(group, target)
            else:
                self._branch(group, outcome, target, block.next)

    def _go(self, group: Group, block: int) -> None:
        group.block, group.age = block, self.clock
        if block == self.polls and group.seen >= 0:
            self._park(MemoryWait(group, asks(self.blocks[block]), group.seen))
        else:
            self.ready.append(group)

    def _branch(self, group: Group, p: np.ndarray, target: int, fall: int) -> None:
        if self.blocks[group.block].spins is not None and group.polled is not None:
            self._spin(group, p, target, fall)
            return
        if p.size == 1:
            self._go(group, target if p.item() else fall)
            return
        lanes = np.broadcast_to(p, (group.n, 32))
        taken = lanes if group.mask is None else lanes & group.mask
        stays = ~lanes if group.mask is None else ~lanes & group.mask
        group.goes_apart(self.blocks[group.block].code[-1][0], taken, stays)
        for mask, block in ((taken, target), (stays, fall)):
            rows = np.flatnonzero(mask.any(axis=1))
            if len(rows):
                part = mask if len(rows) == group.n else mask[rows]
                self._go(group.rows(rows, part, block, self.kernel.live_slots(block)), block)

    def _spin(self, group: Group, p: np.ndarray, target: int, fall: int) -> None:
        """Branches in a loop that only polls an mbarrier, and parks the lanes that would poll again in vain."""
        block = self.blocks[group.block]
        wait, group.polled = group.polled(group), None
        lanes = group.lanes()
        taken = np.broadcast_to(p, lanes.shape) & lanes
        unanswered = ~np.broadcast_to(wait.answered, lanes.shape)
        for mask, goes in ((taken, target), (lanes & ~taken, fall)):
            parks = mask & unanswered if goes == block.spins else np.zeros_like(mask)
            for part, to in ((mask & ~parks, goes), (parks, block.index)):
                rows = np.flatnonzero(part.any(axis=1))
                if not len(rows):
                    continue
                sub = group.rows(rows, part[rows], to, self.kernel.live_slots(to))
                if to == block.index and part is parks:
                    self._park(wait.part(rows, sub))
                else:
                    self._go(sub, to)

    def _branch_table(self, group: Group, index: np.ndarray) -> None:
        block = self.blocks[group.block]
        lanes, all_lanes = np.broadcast_to(index, (group.n, 32)), group.lanes()
        for k in np.unique(lanes[all_lanes]).tolist():
            if k >= len(block.targets):
                raise LaunchError(f"{block.code[-1][0].where()}: index {k} of {len(block.targets)} targets")
            mask = (lanes == k) & all_lanes
            rows = np.flatnonzero(mask.any(axis=1))
            target = block.targets[k]
            self._go(group.rows(rows, mask[rows], target, self.kernel.live_slots(target)), target)

    def _retire(self, group: Group) -> None:
        wave = self.wave
        self.live[group.warps] &= ~group.lanes()
        ctas = np.unique(wave.cta_of_warp[group.warps])
        alive = self.live.reshape(wave.count, -1).any(axis=1)
        gone = ctas[~alive[ctas]]
        self.events.exited(group)
        if len(gone):
            if wave.tensor_memory is not None:
                wave.tensor_memory.cta_exited(gone)
            wave.cta_alive[gone] = False
        if wave.cluster_barrier.settle(self.live) or len(gone):
            wave.progress += 1
        if self.barriers.waiting:
            self.ready += self.barriers.release(self.live)
        met = [g for g in self.unmet if not self._lanes_missing(g).any()]
        self.unmet = [g for g in self.unmet if g not in met]
        self.ready += met

    def _part_unmet(self) -> bool:
        """Runs the warps in ``unmet`` that need not wait, though others of their group must; returns whether there
        were any."""
        complete, self.unmet, unmet = [], [], self.unmet
        for g in unmet:
            missing = np.broadcast_to(self._lanes_missing(g), g.n)
            for rows, where in ((~missing, complete), (missing, self.unmet)):
                if rows.any():
                    where.append(self._rows(g, np.flatnonzero(rows)))
                    where[-1].age = self.clock
        for g in complete:
            self.clock += 1
            self._step(g)
        return bool(complete)

    def _stuck(self) -> SimError:
        """Returns the error for a wave in which nothing can run any more."""
        text = self._who_waits()
        polls = any(isinstance(wait, MemoryWait) for wait in self.parked)
        if polls and len(self.state.clusters_left):
            return ResidencyError(f"{text}\n  {TOGETHER}")
        # Lanes that are parked elsewhere may still come: only lanes that cannot are a divergence.
        waiting = {w for wait in self.parked for w in wait.group.warps.tolist()}
        diverged = self.unmet and not waiting.intersection(w for g in self.unmet for w in g.warps.tolist())
        return (DivergentBarrier if diverged else Deadlock)(text)

    def _out_of_steps(self, group: Group) -> str:
        state, option = self.state, "step_limit" if self.clock > self.state.step_limit else "instruction_limit"
        lines = [
            f"{state.launch.title}: {self.clock} blocks executed without an end, {self.instructions} instructions "
            f"({option}={getattr(state, option)})",
            f"  {group.thread()} is at {self._place(group)}",
        ]
        loop = loop_around(self.blocks, group.block) if group.block != EXIT else []
        if loop:
            code = sorted((i for block in loop for i, _ in block.code), key=lambda i: i.line)
            lines.append(f"  in a loop of {len(code)} instructions, from {code[0].where()} to {code[-1].where()}")
        return "\n".join(
            [*lines, f"  If the kernel ends, raise {option}; if not, see what decides that loop's branch."]
        )

    def _place(self, group: Group) -> str:
        code = self.blocks[group.block].code if group.block != EXIT else []
        return code[0][0].where() if code else "the end"

    def _who_waits(self) -> str:
        title = f"{self.state.launch.title}: nothing can run any more"
        return "\n".join([title, *picture(self.wave, self.unmet, self.barriers, self.parked)])

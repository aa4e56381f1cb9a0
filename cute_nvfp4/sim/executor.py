"""Runs a launch: waves of CTAs, groups of warps, and who goes next.

Lanes of a warp that go different ways become different groups, and so do warps. The group in the lowest block
(reverse post-order) runs first; groups that reach the same block are joined again. A group that has waited long for
its turn goes before all, so that a warp which spins on a flag cannot starve the one that sets it. Everything is
deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_nvfp4.sim.barriers import Barriers
from cute_nvfp4.sim.counters import Counters, Result
from cute_nvfp4.sim.errors import Deadlock, DivergentBarrier, LaunchError, StepLimit, Trap
from cute_nvfp4.sim.flow import EXIT
from cute_nvfp4.sim.host import Launch
from cute_nvfp4.sim.merge import merge
from cute_nvfp4.sim.regions import GlobalMemory
from cute_nvfp4.sim.wave import Group, Wave, owned

if TYPE_CHECKING:
    from cute_nvfp4.sim.access import Access
    from cute_nvfp4.sim.program import CompiledKernel, Program

DEFAULT_STEPS = 2_000_000
PATIENCE = 512
"""How many blocks others may run before a waiting group goes first."""


def run(
    program: Program,
    launch: Launch,
    memory: GlobalMemory,
    *,
    counters: bool = False,
    step_limit: int = DEFAULT_STEPS,
    warps_per_wave: int = 512,
    sm_count: int = 148,
) -> Result:
    """Executes one launch on ``memory`` and returns what was counted.

    ``counters`` adds the per-request memory counters (instruction counts are always kept). ``step_limit`` bounds the
    blocks executed by one wave. ``warps_per_wave`` is how many warps are resident together; a cooperative launch is
    one wave. Raises a subclass of
    ``SimError`` for every hazard, ``LaunchError`` when launch and kernel do not fit together.
    """
    state = Run(program, launch, memory, counters, step_limit, sm_count)
    total = launch.grid[0] * launch.grid[1] * launch.grid[2]
    warps = -(-launch.block[0] * launch.block[1] * launch.block[2] // 32)
    per_wave = total if launch.cooperative else max(1, min(total, warps_per_wave // warps))
    with np.errstate(all="ignore"):
        for first in range(0, total, per_wave):
            WaveRunner(state, Wave(state, first, min(per_wave, total - first))).run()
    return state.counters.result(state.kernel, launch)


class Run:
    """What stays the same over the waves of one launch."""

    def __init__(
        self, program: Program, launch: Launch, memory: GlobalMemory, counting: bool, step_limit: int, sm_count: int
    ) -> None:
        self.kernel: CompiledKernel = program.kernel(launch.kernel)
        self.launch, self.memory = launch, memory
        self.counting, self.step_limit, self.sm_count = counting, step_limit, sm_count
        self.static_shared, self.local_bytes = self.kernel.layout.static_shared, self.kernel.layout.local_bytes
        self._check()
        self.zeros = self.kernel.zeros
        self.variables = program.variables(memory)
        self.counters = Counters(self.kernel, memory)
        self._param_bytes, self.params = owned(self.kernel.source.param_bytes, "kernel parameters")
        data = self.params.rows(1, 1)[1]
        for p, given in zip(self.kernel.source.params, launch.params):
            data[p.offset : p.offset + p.size] = np.frombuffer(given, np.uint8)
        self._param_cache: dict[tuple, object] = {}

    def _check(self) -> None:
        kernel, launch = self.kernel.source, self.launch
        sizes, given = [p.size for p in kernel.params], [len(p) for p in launch.params]
        if sizes != given:
            raise LaunchError(f"{kernel.name} takes parameters of {sizes} bytes, the launch gives {given}")
        required = kernel.directives.get("reqntid")
        if required and tuple((*required, 1, 1)[:3]) != tuple(launch.block):
            raise LaunchError(
                f"{kernel.name} is compiled for blocks of {required} threads, the launch has {launch.block}"
            )
        most = kernel.directives.get("maxntid")
        if most and np.prod(launch.block) > np.prod(most):
            raise LaunchError(f"{kernel.name} is compiled for at most {most} threads, the launch has {launch.block}")
        if launch.cluster != (1, 1, 1):
            raise LaunchError(
                f"{kernel.name} is launched in clusters of {launch.cluster}: clusters are not modelled yet"
            )

    def read_param(self, a: Access, offset: int):
        """Parameter bytes as (1, 1) arrays."""
        key = (offset, a.unit, a.count)
        if key not in self._param_cache:
            raw = self.params.rows(1, 1)[1][max(offset, 0) : offset + a.total].copy()
            values = raw[: len(raw) // a.unit * a.unit].view(f"u{a.unit}")
            if len(values) != a.count or offset % a.total:
                raise LaunchError(
                    f"{a.instruction.where()}: bytes {offset}..{offset + a.total} of {self.params.size} parameter bytes"
                )
            arrays = tuple(v.reshape(1, 1) for v in values)
            self._param_cache[key] = arrays if a.count > 1 else arrays[0]
        return self._param_cache[key]


class WaveRunner:
    """The scheduler of one wave."""

    def __init__(self, state: Run, wave: Wave) -> None:
        self.state, self.wave, self.kernel = state, wave, state.kernel
        self.blocks, self.functions = state.kernel.blocks, state.kernel.functions
        self.live = wave.live.copy()
        mask = None if self.live.all() else self.live
        start = 0 if self.blocks else EXIT
        self.ready = [Group(wave, start, np.arange(wave.warps), mask, list(state.zeros))]
        self.unmet: list[Group] = []
        self.barriers = Barriers(wave)
        self.clock = 0

    def run(self) -> None:
        while self.ready or self.unmet or self.barriers.waiting:
            if not self.ready:
                self._wake()
            group = self._next()
            if group.block == EXIT:
                self._retire(group)
            elif self._lanes_missing(group):
                self.unmet.append(group)
            else:
                self._step(group)

    def _wake(self) -> None:
        """Nothing can run: lanes that waited for others of their warp, now exited, may go; otherwise this is the
        end."""
        met = [g for g in self.unmet if not self._lanes_missing(g)]
        if met:
            self.unmet = [g for g in self.unmet if g not in met]
            self.ready = met
            return
        released = self.barriers.release(self.live)
        if released:
            self.ready = released
            return
        raise (DivergentBarrier if self.unmet else Deadlock)(self._who_waits())

    def _next(self) -> Group:
        ready = self.ready
        self.clock += 1
        if len(ready) == 1:
            group = ready.pop()
        else:
            oldest = min(ready, key=lambda g: g.age)
            block = oldest.block if self.clock - oldest.age > PATIENCE else _lowest(ready)
            same = [g for g in ready if g.block == block]
            self.ready = [g for g in ready if g.block != block]
            group = same[0] if len(same) == 1 else merge(same, self.kernel.live_slots(block))
        if self.unmet and group.block != EXIT:
            same = [g for g in self.unmet if g.block == group.block]
            if same:
                self.unmet = [g for g in self.unmet if g.block != group.block]
                group = merge([group, *same], self.kernel.live_slots(group.block))
        if self.clock > self.state.step_limit:
            raise StepLimit(self._out_of_steps(group))
        return group

    def _lanes_missing(self, group: Group) -> bool:
        """Whether the group's block begins with an instruction that must wait for lanes that are elsewhere."""
        block = self.blocks[group.block] if group.block != EXIT else None
        if block is None or block.converge is None or group.mask is None:
            return False
        need = self.live[group.warps]
        if block.converge >= 0:
            need = need & self.kernel.member_lanes(group, block)
        return bool((need & ~group.mask).any())

    def _step(self, group: Group) -> None:
        block = self.blocks[group.block]
        self.wave.steps = self.clock
        self.state.counters.count_block(block.index, group)
        outcome = self.functions[block.index](group)
        if block.control == "barrier":
            released = self.barriers.arrive(group, block, outcome, self.live)
            self.ready += released
            for g in released:
                g.age = self.clock
        elif block.control == "table":
            self._branch_table(group, outcome[0])
        elif outcome is None:
            goes = {"branch": block.targets[0] if block.targets else EXIT, "exit": EXIT, "trap": EXIT}.get(
                block.control, block.next
            )
            if block.control == "trap":
                raise Trap(f"trap executed: {block.code[-1][0].where()}")
            self._go(group, goes)
        else:
            target = block.targets[0] if block.control == "branch" and block.targets else EXIT
            self._branch(group, outcome, target, block.next)

    def _go(self, group: Group, block: int) -> None:
        group.block, group.age = block, self.clock
        self.ready.append(group)

    def _branch(self, group: Group, p: np.ndarray, target: int, fall: int) -> None:
        if p.size == 1:
            self._go(group, target if p.item() else fall)
            return
        lanes = np.broadcast_to(p, (group.n, 32))
        taken = lanes if group.mask is None else lanes & group.mask
        stays = ~lanes if group.mask is None else ~lanes & group.mask
        for mask, block in ((taken, target), (stays, fall)):
            rows = np.flatnonzero(mask.any(axis=1))
            if len(rows):
                part = mask if len(rows) == group.n else mask[rows]
                self._go(group.rows(rows, part, block, self.kernel.live_slots(block)), block)

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
        self.live[group.warps] &= ~group.lanes()
        if self.barriers.waiting:
            self.ready += self.barriers.release(self.live)
        if self.unmet:
            met = [g for g in self.unmet if not self._lanes_missing(g)]
            self.unmet = [g for g in self.unmet if g not in met]
            self.ready += met

    def _out_of_steps(self, group: Group) -> str:
        code = self.blocks[group.block].code if group.block != EXIT else []
        where = code[0][0].where() if code else "the end"
        who = self.wave.thread(int(group.warps[0]), int(group.lanes()[0].argmax()))
        limit = f"(step_limit={self.state.step_limit})"
        return f"{self.state.launch.kernel}: {self.clock} blocks executed without an end; {who} is at {where} {limit}"

    def _who_waits(self) -> str:
        lines = [f"{self.state.launch.kernel}: nothing can run any more"]
        for g in self.unmet:
            text = self.blocks[g.block].code[0][0].where()
            row = g.lanes()[0]
            who = self.wave.thread(int(g.warps[0]), int(row.argmax()))
            lanes = f"{int(row.sum())} lane(s) of it, wait for other lanes of the warp at {text}"
            lines.append(f"  {len(g.warps)} warp(s), first {who}, {lanes}")
        lines += self.barriers.describe(self.live)
        return "\n".join(lines)


def _lowest(groups: list[Group]) -> int:
    """The lowest block; the exit comes before all, because leaving lanes set others free."""
    return min(g.block for g in groups)

"""The clock, which hears a launch while it is executed, and models afterwards how long it takes."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from cute_nvfp4.sim.clock.costs import costs, pipes, sm_times
from cute_nvfp4.sim.clock.effects import in_short
from cute_nvfp4.sim.clock.last import last
from cute_nvfp4.sim.clock.machine import Machine, machine
from cute_nvfp4.sim.clock.matching import MachineCode, differing, machine_code
from cute_nvfp4.sim.clock.recorder import Recorder
from cute_nvfp4.sim.clock.replay import Replay
from cute_nvfp4.sim.clock.sampling import SHARED, Sample, limits, resample, sample, with_raisers
from cute_nvfp4.sim.clock.sectors import Sectors
from cute_nvfp4.sim.clock.warps import Warp
from cute_nvfp4.sim.errors import ClockError
from cute_nvfp4.sim.machine.events import Client, Listener
from cute_nvfp4.sim.machine.global_memory import SECTOR, GlobalMemory
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.wave import Wave
from cute_nvfp4.sim.observe.timing import Timing, WarpTime
from cute_nvfp4.sim.program import Program

SAMPLES, LOST = 2, 0.05
REPLAYS = 4
"""Replays of a launch, each with other latencies of memory. How far their ends differ says when the last SM ends."""


class Clock:
    """The clock of one launch, a client of its events. Call ``settle`` and then ``timing`` when the launch has ended.

    on: a machine or its name. Its architecture must be the PTX target, else ``ClockError`` is raised.
    warm: whether L2 holds all data at the start; else it is cold.
    """

    def __init__(
        self, program: Program, kernel: CompiledKernel, launch: Launch, memory: GlobalMemory, on: str | Machine,
        warm: bool = False,
    ) -> None:  # fmt: skip
        self.machine = machine(on) if isinstance(on, str) else on
        target = program.module.target
        if target != self.machine.arch:
            raise ClockError.of(f"the clock {self.machine.name}", got=f"PTX for {target}", expected=self.machine.arch)
        self._launch = launch
        self.code = code_of(program, kernel)
        static = kernel.layout.static_shared
        self._room = math.prod(launch.block), static + launch.dynamic_smem, self.code.registers
        self._sample: Sample = sample(launch, self.machine, static, self.code.registers, SAMPLES)
        self._unknown = 0
        capacity = self.machine["l2.bytes"]
        self._record = lambda sample: Recorder(kernel, memory, sample, Sectors(memory, warm, capacity))
        self.recorder = self._record(self._sample)
        shared = self._sample.ctas_per_sm * (static + launch.dynamic_smem)
        self._l1_bytes = 256 * 1024 - min(SHARED, shared + self._sample.ctas_per_sm * 1024)
        self._divides = shared > self.machine["launch.undivided_bytes"]

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        return self.recorder.listeners(wave)

    def settle(self, again: Callable[[Client], Any]) -> None:
        """Executes the launch again with another sample, where its CTAs differ more than the sampled ones, or these
        wait for flags of others. ``again`` executes the launch with a client."""
        better = resample(self._sample, self._launch, self.machine, self.recorder.work())
        waits_for = self.recorder.flags.waits_for
        more = with_raisers(better or self._sample, self._launch, self.machine, waits_for)
        better = more or better
        if better is not None:
            self.recorder.restore()
            self._sample = better
            self.recorder = self._record(self._sample)
            again(self)
        self._unknown = self.recorder.flags.settle()

    def timing(self, on: Machine | None = None) -> Timing:
        """Returns the modelled time, on another machine ``on`` with as many SMs if one is given. Raises ``ClockError``
        if more than 5 % of the accesses and arrivals find no instruction in the SASS."""
        m = on or self.machine
        replay, first = self._replayed(m)
        cycles = self._last(m, replay)
        if replay.unmatched > LOST * replay.events:
            got = f"{replay.unmatched} of {replay.events} accesses and arrivals without an instruction"
            raise ClockError.of(f"the machine code of {self._launch.kernel}", got=got, expected=f"at most {LOST:.0%}")
        code, lost = costs(replay), Counter[str]()
        for (_, reason), time in replay.lost.items():
            lost[in_short(reason)] += time
        alive = sum(w.sm.weight * (w.ready - w.begin) for w in replay.warps)
        issued = sum(sm.issued * sm.weight for sm in replay.sms) / (4 * m.sms)
        moved = self._bytes(replay)
        reading = moved["dram_read"] / m["dram.bytes_per_cycle"]
        writing = moved["dram_written"] / m["dram.written_bytes_per_cycle"]
        bounds = {"dram": reading + writing, "issue": issued}
        busy = {"dram": replay.shared.dram_busy, "issue": issued, "l2": replay.shared.l2_busy}
        busy["l1"] = sum(sm.weight * sm.port.busy for sm in replay.sms) / m.sms
        return Timing(
            machine=m.name,
            microseconds=self._microseconds(m, cycles),
            launch_us=m["launch.empty_us"],
            launch_from=m.sources["launch.empty_us"],
            cycles=cycles,
            lost={name: time / alive for name, time in sorted(lost.items())},
            busy={name: time / cycles for name, time in busy.items()},
            bounds_us={name: m.microseconds(time) for name, time in bounds.items()},
            replayed_sms=len(replay.sms),
            instructions=sum(sm.issued for sm in replay.sms),
            waits=tuple((w.cta, w.warp, wait) for w in replay.warps for wait in w.waits),
            warps=tuple(WarpTime(w.cta, w.warp, _role(w), w.begin, w.ready) for w in replay.warps),
            cycles_per_us=m["clock_mhz"],
            again=functools.partial(self._again, more=cycles - first),
            coverage={"code": self.code.coverage.issued, "events": 1 - replay.unmatched / max(1, replay.events)},
            notes=tuple(self._notes(replay)),
            pipes=pipes(replay, code, cycles),
            bytes=moved,
            registers=self.code.registers,
            limits=limits(*self._room)._asdict(),
            code=code,
            sms=sm_times(replay),
        )

    def _replayed(self, m: Machine, before: Replay | None = None) -> tuple[Replay, float]:
        """Returns a replay that has run, and its cycles. It repeats ``before`` with other latencies."""
        replay = Replay(self.recorder, self.code, self._sample, m, self._l1_bytes, before)
        return replay, replay.run()

    def _last(self, m: Machine, first: Replay) -> float:
        """Returns the cycles until the last of all SMs ends and all is written. ``first`` is the first replay."""
        replays = [first]
        while len(replays) < REPLAYS:
            replays.append(self._replayed(m, replays[-1])[0])
        places = self._sample.places
        ends = last([[replay.ends[n] for replay in replays] for n in range(len(places))], [p.weight for p in places])
        return max(ends, statistics.fmean(replay.drained for replay in replays))

    def _bytes(self, replay: Replay) -> dict[str, float]:
        """Returns ``Timing.bytes``."""
        sectors = {name: sum(sm.weight * getattr(sm.port, name) for sm in replay.sms) for name in ("asked", "held")}
        return {
            "l2": replay.shared.l2_busy * replay.machine["l2.bytes_per_cycle"],
            "dram_read": self.recorder.sectors.fetched,
            "dram_written": self.recorder.sectors.stored,
            "asked": SECTOR * sectors["asked"],
            "held": SECTOR * sectors["held"],
        }

    def _microseconds(self, m: Machine, cycles: float) -> float:
        """Returns the time between two events around a launch of ``cycles``. A launch that needs much shared memory has
        L1 divided anew."""
        divided = m["launch.divide"] if self._divides else 0.0
        return m["launch.empty_us"] + m.microseconds(divided + max(0.0, cycles - m["launch.hidden"]))

    def _again(self, factors: Mapping[str, float], more: float) -> float:
        """Returns the microseconds of one replay with figures of the machine multiplied by ``factors``, and ``more``
        cycles until the last SM ends."""
        known = {name: self.machine[name] * factor for name, factor in factors.items() if name in self.machine.figures}
        on = self.machine.with_figures(known)
        return self._microseconds(on, self._replayed(on)[1] + more)

    def _notes(self, replay: Replay) -> Iterator[str]:
        """Yields what may make the time wrong, in words."""
        if replay.unmatched:
            yield f"{replay.unmatched} of {replay.events} accesses and arrivals have no instruction in the machine code"
        if self._unknown:
            yield f"{self._unknown} waits for flags of CTAs that are not replayed cost nothing"
        if replay.flags_given_up:
            yield f"{replay.flags_given_up} polls of flags went on before the flag was raised"
        if self._launch.cubin and (differ := _differing(self.code, self._launch.cubin, self._launch.kernel)):
            yield f"the launch's own cubin differs from this machine code: {differ} of {len(self.code.opcodes)} opcodes"


def _role(warp: Warp) -> str:
    """Returns ``WarpTime.role``: whether a warp issues asynchronous "copies", and products of "tensor" cores."""
    kinds = {step.kind for steps, _ in warp.program for step in steps}
    names = {"bulk": "copies", "copy": "copies", "wgmma": "tensor", "product": "tensor"}
    return " and ".join(dict.fromkeys(names[kind] for kind in names if kind in kinds))


_differing = functools.lru_cache(maxsize=256)(differing)
_CODES: dict[tuple[int, str], MachineCode] = {}


def code_of(program: Program, kernel: CompiledKernel) -> MachineCode:
    """Returns the machine code of a kernel, which is compiled once in a process. Raises ``ClockError`` where ptxas or
    nvdisasm is missing or fails."""
    key = (hash(program.text), kernel.source.name)
    if key not in _CODES:
        _CODES[key] = machine_code(program.text, program.module.target, kernel.source, kernel.blocks)
    return _CODES[key]

"""``Clock``: hears a launch while it is executed, and says afterwards how long it would take."""

from __future__ import annotations

from collections.abc import Iterable

from cute_nvfp4.sim.clock.machine import Machine, machine
from cute_nvfp4.sim.clock.recorder import Recorder
from cute_nvfp4.sim.clock.replay import Replay
from cute_nvfp4.sim.clock.sampling import SHARED, Sample, sample
from cute_nvfp4.sim.clock.sass import MachineCode, machine_code
from cute_nvfp4.sim.errors import ClockError
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.global_memory import GlobalMemory
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.wave import Wave
from cute_nvfp4.sim.observe.timing import Timing
from cute_nvfp4.sim.program import Program

SAMPLES = 2


class Clock:
    """The clock of one launch: a client of its events; ``timing`` when it has ended."""

    def __init__(
        self, program: Program, kernel: CompiledKernel, launch: Launch, memory: GlobalMemory, on: str | Machine,
        warm: bool = False,
    ) -> None:  # fmt: skip
        self.machine = machine(on) if isinstance(on, str) else on
        target = program.module.target
        if target != self.machine.arch:
            raise ClockError.of(f"the clock {self.machine.name}", got=f"PTX for {target}", expected=self.machine.arch)
        self._launch = launch
        self.code = _code(program, kernel)
        static = kernel.layout.static_shared
        self._sample: Sample = sample(launch, self.machine, static, self.code.registers, SAMPLES)
        self.recorder = Recorder(kernel, memory, self._sample, warm)
        self._l1_bytes = 256 * 1024 - min(SHARED, self._sample.ctas_per_sm * (static + launch.dynamic_smem + 1024))

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        return self.recorder.listeners(wave)

    def timing(self) -> Timing:
        """Replays the launch."""
        m, replay = self.machine, Replay(self.recorder, self.code, self._sample, self.machine, self._l1_bytes)
        cycles = replay.run()
        total = sum(replay.lost.values()) + 1e-9
        alive = sum(w.ready for w in replay.warps)
        sms = [sm for _, each in replay._places for sm in each]
        issued = sum(sm.issued * sm.weight for sm in sms)
        bounds = {
            "dram": (self.recorder.bytes_fetched + self.recorder.bytes_written) / m["dram.bytes_per_cycle"],
            "issue": issued / (4 * m.sms),
        }
        launch_us = m["launch.empty_us"]
        notes = [] if not replay.unmatched else [f"{replay.unmatched} arrivals have no instruction in the machine code"]
        return Timing(
            m.name,
            launch_us + m.microseconds(cycles),
            launch_us,
            cycles,
            {k: v / max(alive, total) for k, v in sorted(replay.lost.items())},
            {
                "l2": replay.shared.l2_busy / cycles,
                "dram": replay.shared.dram_busy / cycles,
                "issue": issued / (4 * m.sms * cycles),
            },
            {k: m.microseconds(v) for k, v in bounds.items()},
            len(sms),
            sum(sm.issued for sm in sms),
            tuple((w.cta, w.warp, wait) for w in replay.warps for wait in w.waits),
            tuple(notes),
        )


_CODES: dict[tuple[int, str], MachineCode] = {}


def _code(program: Program, kernel: CompiledKernel) -> MachineCode:
    key = (hash(program.text), kernel.source.name)
    if key not in _CODES:
        _CODES[key] = machine_code(program.text, program.module.target, kernel.source, kernel.blocks)
    return _CODES[key]

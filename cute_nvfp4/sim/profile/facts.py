"""The facts that a profile is made of: a launch, its kernel, what was counted and what was modelled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from cute_nvfp4.sim.clock.tools import found
from cute_nvfp4.sim.host.device import Device
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.multiprocessor import Multiprocessor, multiprocessor
from cute_nvfp4.sim.observe.result import Result
from cute_nvfp4.sim.observe.timing import Timing
from cute_nvfp4.sim.program import Program

SCHEDULERS = 4


class Facts:
    """The figures that several parts of a profile need. Cycles and instructions are sums over all SMs of the GPU."""

    def __init__(self, program: Program, launch: Launch, result: Result) -> None:
        self.program, self.launch, self.result = program, launch, result
        self.timing: Timing | None = result.timing
        self.target = program.module.target
        self.device = Device.of(self.target)
        self.kernel = program.kernel(launch.kernel)
        self.code = self.kernel.source.code
        self.sm: Multiprocessor = multiprocessor(self.target)
        self.threads = math.prod(launch.block)
        self.warps_of_cta = -(-self.threads // 32)
        self.ctas = math.prod(launch.grid)
        self.sms = self.device.sm_count
        self.static_shared = self.kernel.layout.static_shared
        self.registers = self.timing.registers if self.timing else launch.registers

    def notes(self) -> Iterator[str]:
        """Yields what a reader should know of the figures."""
        if self.timing is None:
            why = "" if found("ptxas") and found("nvdisasm") else ": ptxas or nvdisasm was not found"
            yield f"no clock was asked for, or there is none for {self.target}{why}; nothing here is a time"
        else:
            on = self.timing.machine.upper()
            yield f"times are modelled on {on} (docs/explanation/clock.md), nothing was measured"
            yield f"a launch costs {self.timing.launch_us:.2f} us more ({self.timing.launch_from})"
            yield from self.timing.notes
        if not self.counted:
            yield "counters of memory were not asked for"

    @cached_property
    def counted(self) -> bool:
        """Whether the launch ran with counters."""
        return self.result.l2 is not None

    @cached_property
    def limits(self) -> dict[str, int | None]:
        """How many CTAs an SM has room for by each limit alone, None where that is not known."""
        if self.timing is not None:
            return dict(self.timing.limits)
        shared = -(-(self.static_shared + self.launch.dynamic_smem) // 128) * 128 + 1024
        warps = self.sm.threads // (32 * self.warps_of_cta)
        return {"sm": self.sm.ctas, "warps": warps, "shared": self.sm.shared // shared, "registers": None}

    @property
    def ctas_per_sm(self) -> int:
        return max(1, min(limit for limit in self.limits.values() if limit is not None))

    # of the clock

    @cached_property
    def active(self) -> float:
        """The cycles in which an SM held a warp."""
        return sum(sm.weight * sm.active for sm in self.timing.sms)

    @cached_property
    def warp_cycles(self) -> float:
        return sum(sm.weight * sm.warp_cycles for sm in self.timing.sms)

    @cached_property
    def start(self) -> float:
        """The cycles of warps before their first instruction."""
        return sum(sm.weight * sm.start for sm in self.timing.sms)

    @cached_property
    def issued(self) -> float:
        """The SASS instructions that warps issued."""
        return sum(sm.weight * sm.issued for sm in self.timing.sms)

    @cached_property
    def whole(self) -> float:
        """The cycles of all SMs from the start of the launch to its end."""
        return self.sms * self.timing.cycles

    @cached_property
    def reasons(self) -> dict[str, float]:
        """The cycles of warps by reason, "stalls" for issue and fixed latencies. With ``start`` they are
        ``warp_cycles``."""
        out = {"stalls": sum(cost.stalls for cost in self.timing.code)}
        for cost in self.timing.code:
            for reason, cycles in cost.lost.items():
                out[reason] = out.get(reason, 0.0) + cycles
        return out

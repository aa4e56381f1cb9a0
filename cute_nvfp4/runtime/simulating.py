"""``simulating``: the simulator for the calls within a block, and what each simulated launch did."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import TargetError
from ..target import architecture

if TYPE_CHECKING:
    from ..sim import Launch, Result, Trace
    from ..sim.profile import Profile
    from .cache import CompiledKernel

ARCH_VARIABLE = "CUTE_NVFP4_ARCH"
SESSIONS = "cute_nvfp4.sim.session"
"""The module of simulated GPUs, which is there only if somebody opened one."""
OPTIONS = (
    "checks",
    "counters",
    "schedule",
    "step_limit",
    "instruction_limit",
    "trace",
    "warps_per_wave",
    "sm_count",
    "allow",
    "on_hazard",
    "strict",
    "clock",
    "warm",
    "others",
)


@dataclass(frozen=True, repr=False)
class SimulatedLaunch:
    """One launch that ran in the simulator.

    kernel: the compiled kernel, with its PTX; launch: grid, block, cluster, parameters; result: what was counted
    (``sim.Result``); trace: who did what, if ``simulating(trace=…)`` asked for it.
    """

    kernel: CompiledKernel
    launch: Launch
    result: Result
    trace: Trace | None = None

    @property
    def name(self) -> str:
        """The operation's kernel: "gemv", "gemm" and so on."""
        return self.kernel.name

    @property
    def ptx(self) -> str:
        return self.kernel.ptx

    def __repr__(self) -> str:
        """The kernel, its grid and what the result says, in a line: a list of launches prints as such lines."""
        return f"<{self.name}, grid {self.launch.grid}, block {self.launch.block}: {self.result}>"

    def profile(self) -> Profile:
        """The launch as Nsight Compute's details page has it: ``print(runs[0].profile().text())``.

        It has all values where the simulation had ``counters=True`` and a ``clock`` (docs/how-to/profiling.md).
        """
        from ..sim import Program
        from ..sim.profile import profile

        return profile(Program.parse(self.ptx), self.launch, self.result)


@dataclass(frozen=True)
class Simulation:
    """The innermost ``simulating``: its options, and the lists to which every launch is added, its own last.

    replaced: what ``kernel`` gave instead of a kernel, for each launcher that asked (:mod:`.launch`).
    """

    arch: str | None = None
    kernel: Callable[[CompiledKernel], CompiledKernel] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    runs: tuple[list[SimulatedLaunch], ...] = ()
    replaced: dict[int, tuple] = field(default_factory=dict)

    def record(self, launch: SimulatedLaunch) -> None:
        for runs in self.runs:
            runs.append(launch)


_active: contextvars.ContextVar[Simulation | None] = contextvars.ContextVar("simulation", default=None)


def simulation() -> Simulation | None:
    """The innermost ``simulating`` that is under way, or None."""
    return _active.get()


def current_session() -> Any:
    """The simulated GPU that stands in for torch's "cuda" (``sim.session``), or None."""
    session = sys.modules.get(SESSIONS)
    return None if session is None else session.current_session()


def surroundings(on_cpu: bool) -> Any:
    """What decides where a call runs besides its tensors and ``backend``: the simulation or the session around it."""
    if not on_cpu:
        return session_number()
    active = _active.get()
    return os.environ.get(ARCH_VARIABLE) if active is None else (active.arch, os.environ.get(ARCH_VARIABLE))


def session_number() -> int:
    """The number of that session in this process, from 1; 0 if there is none."""
    session = current_session()
    return 0 if session is None else session.number


@contextlib.contextmanager
def simulating(
    arch: str | None = None, *, kernel: Callable[[CompiledKernel], CompiledKernel] | None = None, **options: Any
) -> Iterator[list[SimulatedLaunch]]:
    """Within it, ``backend="auto"`` runs CPU tensors in the simulator, and every simulated launch is kept.

    For example::

        with cute_nvfp4.simulating("sm_100a", counters=True) as runs:
            gemm(a, b)
        runs[0].result.instructions

    Args:
        arch: what kernels are compiled for; None is that of the ``simulating`` around this one, of the environment
            variable ``CUTE_NVFP4_ARCH``, or sm_100a.
        kernel: what is to run instead of a compiled kernel: a function from one ``CompiledKernel`` to another.
        options: those of ``sim.run``: ``checks``, ``counters``, ``schedule``, ``trace`` (a ``sim.Trace``, or True for
            one for each launch), ``step_limit``, ``instruction_limit``, ``warps_per_wave``, ``sm_count``, ``allow``,
            ``on_hazard``, ``strict``, ``others`` (clients that hear the events). Blocks nest: what is not given is
            as it is outside.

    Yields:
        A list, to which each launch is added when it has ended. A hazard raises, and its launch is not in the list.

    Raises:
        TargetError: an unknown architecture or option.
        LaunchError: an unknown class of hazards to ``allow``.
    """
    if arch is not None:
        architecture(arch)
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise TargetError.of("option of simulating", got=unknown[0], expected=f"one of {', '.join(OPTIONS)}")
    if "allow" in options:
        from ..sim.checks.findings import known

        known(options["allow"])
    outer = _active.get() or Simulation()
    runs: list[SimulatedLaunch] = []
    token = _active.set(
        Simulation(arch or outer.arch, kernel or outer.kernel, {**outer.options, **options}, (*outer.runs, runs))
    )
    try:
        yield runs
    finally:
        _active.reset(token)

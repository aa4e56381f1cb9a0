"""``simulating``: runs the calls within a block in the simulator, and keeps what each simulated launch did."""

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
"""The module of simulated GPUs; it is loaded only if somebody opened one."""
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

    kernel: the compiled kernel, with its PTX. launch: grid, block, cluster, parameters. result: what was counted
    (``sim.Result``). trace: which warp did what, if ``simulating(trace=…)`` asked for it.
    """

    kernel: CompiledKernel
    launch: Launch
    result: Result
    trace: Trace | None = None

    @property
    def name(self) -> str:
        """The name of the operation's kernel, such as "gemv"."""
        return self.kernel.name

    @property
    def ptx(self) -> str:
        return self.kernel.ptx

    def __repr__(self) -> str:
        """The kernel, its grid and a summary of the result, in one line."""
        return f"<{self.name}, grid {self.launch.grid}, block {self.launch.block}: {self.result}>"

    def profile(self) -> Profile:
        """The launch as on Nsight Compute's details page: ``print(runs[0].profile().text())``.

        It has all values if the simulation ran with ``counters=True`` and a ``clock`` (docs/how-to/profiling.md).
        """
        from ..sim import Program
        from ..sim.profile import profile

        return profile(Program.parse(self.ptx), self.launch, self.result)


@dataclass(frozen=True)
class Simulation:
    """The state of the innermost ``simulating``: its options, and the lists that receive every launch, its own last.

    replaced: for each launcher that asked, what ``kernel`` returned in the place of its kernel (:mod:`.launch`).
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
    """The innermost ``simulating`` that is active, or None."""
    return _active.get()


def current_session() -> Any:
    """The simulated GPU that stands in for torch's "cuda" (``sim.session``), or None."""
    session = sys.modules.get(SESSIONS)
    return None if session is None else session.current_session()


def surroundings(on_cpu: bool) -> Any:
    """The part of a cache key that says where a call runs, besides tensors and ``backend``: simulation or session."""
    if not on_cpu:
        return session_number()
    active = _active.get()
    return os.environ.get(ARCH_VARIABLE) if active is None else (active.arch, os.environ.get(ARCH_VARIABLE))


def session_number() -> int:
    """The number of the current session in this process, from 1; 0 if there is none."""
    session = current_session()
    return 0 if session is None else session.number


@contextlib.contextmanager
def simulating(
    arch: str | None = None, *, kernel: Callable[[CompiledKernel], CompiledKernel] | None = None, **options: Any
) -> Iterator[list[SimulatedLaunch]]:
    """A block in which ``backend="auto"`` runs CPU tensors in the simulator, and every simulated launch is kept.

    For example::

        with cute_nvfp4.simulating("sm_100a", counters=True) as runs:
            gemm(a, b)
        runs[0].result.instructions

    Args:
        arch: the architecture that kernels are compiled for; None: that of the surrounding ``simulating``, else of the
            environment variable ``CUTE_NVFP4_ARCH``, else sm_100a.
        kernel: a function from one ``CompiledKernel`` to another, which runs in its place.
        options: those of ``sim.run``: ``checks``, ``counters``, ``schedule``, ``trace`` (a ``sim.Trace``, or True for
            one for each launch), ``step_limit``, ``instruction_limit``, ``warps_per_wave``, ``sm_count``, ``allow``,
            ``on_hazard``, ``strict``, ``others`` (clients that receive the events). Blocks nest: options that are not
            given are those of the block outside.

    Yields:
        A list, which receives each launch when it ends. A hazard raises, and its launch is not in the list.

    Raises:
        TargetError: an architecture or an option is unknown.
        LaunchError: ``allow`` names an unknown class of hazards.
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

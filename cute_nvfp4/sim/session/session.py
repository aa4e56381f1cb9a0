"""``simulated_gpu``: a simulated GPU for the length of a ``with`` block, and its state."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.checks.findings import Finding
from cute_nvfp4.sim.execution import Execution, Here, Issued
from cute_nvfp4.sim.host.device import DEFAULT_ARCH, Device
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.observe.result import Result
from cute_nvfp4.sim.program import Program
from cute_nvfp4.sim.session import driver, extensions
from cute_nvfp4.sim.session.children import install as install_children
from cute_nvfp4.sim.session.dsl import DslHooks
from cute_nvfp4.sim.session.memory import DeviceMemory, Heap
from cute_nvfp4.sim.session.order import Timeline
from cute_nvfp4.sim.session.patches import Patches
from cute_nvfp4.sim.session.runtime import Runtime
from cute_nvfp4.sim.session.streams import place
from cute_nvfp4.sim.session.torch_cuda import TorchCuda
from cute_nvfp4.sim.session.torch_device import CudaMode
from cute_nvfp4.sim.session.torch_dispatch import CudaDispatch
from cute_nvfp4.sim.session.torch_ops import host_operators
from cute_nvfp4.sim.session.torch_python import install as install_python


@dataclass
class LaunchRecord:
    """One launch of a session."""

    number: int  #: the position of the launch in the session, from 0
    launch: Launch
    program: Program  #: the PTX module of the launched kernel
    seconds: float = 0.0  #: host time that the simulation took
    result: Result | None = None  #: None before the launch has run, if an error stopped it, and with ``execute=False``
    ended: bool = False  #: whether the launch is over without an error

    @property
    def instructions(self) -> int:
        """The number of executed warp instructions."""
        return self.result.instructions if self.result else 0


@dataclass
class Session:
    """The state of a simulated GPU, made by ``simulated_gpu``, which explains the fields that are its arguments.

    ``launches`` has the launches in the order in which they began. ``failure`` is the first launch with a hazard or
    another error, and that error, even if the program caught it or hazards are collected. The launch is None for a
    hazard between streams outside any launch. ``between`` maps the texts of hazards between streams to their findings.
    ``active`` says whether the session is open. ``number`` counts the sessions of this process from 1.
    """

    device: Device
    benchmarks: str = "once"
    execute: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    observe: Callable[[LaunchRecord], None] | None = None
    host_operators: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    execution: Execution = field(default_factory=Here)
    heap: Heap = field(default_factory=Heap)
    launches: list[LaunchRecord] = field(default_factory=list)
    failure: tuple[LaunchRecord | None, Exception] | None = None
    between: dict[str, Finding] = field(default_factory=dict)
    active: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)
    _running: LaunchRecord | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.memory = DeviceMemory(self.heap)
        self.runtime = Runtime(self.device, self.memory)
        self.streams = self.runtime.streams
        self.streams.report, self.streams.on = self._unordered, lambda: bool(self.options.get("checks", True))
        self.dispatch = CudaDispatch(self.streams, {**host_operators(), **self.host_operators})
        self.mode = CudaMode(self.memory, self.dispatch)
        self.dispatch.inside, self.dispatch.direct = self.modes, lambda: self.mode.on
        self.dispatch.count = self.runtime.count_operator
        self.cuda = TorchCuda(self.runtime, self.mode)

    @property
    def instructions(self) -> int:
        """The number of warp instructions of all launches so far."""
        return sum(record.instructions for record in self.launches)

    def findings(self) -> list[Finding]:
        """Returns all findings, also between streams: one with a count for each class at an instruction of a kernel."""
        lists = [tuple(self.between.values())]
        lists += [record.result.findings for record in self.launches if record.result is not None]
        if self.failure is not None:
            lists.append(getattr(self.failure[1], "findings", ()))
        merged: dict[tuple[str, str, str, int, str], Finding] = {}
        for finding in (f for found in lists for f in found):
            key = (finding.severity, finding.rule, finding.kernel, finding.line, finding.instruction)
            before = merged.get(key)
            merged[key] = finding if before is None else dataclasses.replace(before, count=before.count + finding.count)
        return list(merged.values())

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Gives torch's calls and operators in the block to the session, also where torch has disabled its modes."""
        with contextlib.ExitStack() as stack:
            for mode in (self.mode, self.dispatch):
                if self.active and not mode.on:
                    stack.enter_context(mode)
            yield

    def current_stream(self) -> int:
        """Returns the handle of torch's current stream."""
        return self.cuda.streams[-1].cuda_stream

    def submit(self, program: Program | None, launch: Launch) -> None:
        """Runs a launch, or records it if its stream is being captured; raises ``TargetError`` without a program."""
        if program is None:
            raise TargetError(f"a launch of {launch.kernel} by a function without device code")
        frame = sys._getframe(1)
        self.runtime.submit(launch.stream, lambda at: self._run(program, launch, frame, at))

    def _unordered(self, text: str, what: str, where: str) -> None:
        """Notes a hazard between streams, and raises it unless it is allowed or ``on_hazard`` is "collect"."""
        launch = self._running
        rule, kernel = "stream-order", "" if launch is None else launch.launch.kernel
        finding = Finding("hazard", rule, kernel, what, 0, where, text)
        if rule in self.options.get("allow", ()):
            finding = dataclasses.replace(finding, severity="warning")
        before = self.between.get(text)
        self.between[text] = dataclasses.replace(before, count=before.count + 1) if before else finding
        if finding.severity == "hazard":
            self.failure = self.failure or (launch, finding.error())
            if self.options.get("on_hazard") != "collect":
                raise finding.error()

    def _run(self, program: Program, launch: Launch, frame: Any, stream: Timeline) -> None:
        record = LaunchRecord(len(self.launches), launch, program)
        self.launches.append(record)
        if self.observe:
            self.observe(record)
        if self.execute:
            memory, self._running = self.memory.snapshot(frame), record
            begin, issued = time.perf_counter(), self.runtime.order.issue(stream)
            what = f"launch {record.number} ({launch.title})"
            try:
                options = {"sm_count": self.device.sm_count, **self.options}
                how = Issued(what, *issued[:2]), self.streams.on(), options
                record.result, touched = self.execution(program, launch, memory, *how)
                if touched is not None:
                    self.streams.launched(what, place(frame), touched, issued)
            except Exception as error:
                self.failure = self.failure or (record, error)
                raise
            else:
                found = next((f for f in record.result.findings if f.severity == "hazard"), None)
                if found is not None:
                    self.failure = self.failure or (record, found.error())
            finally:
                record.seconds, self._running = time.perf_counter() - begin, None
        self.runtime.count_launch(record.instructions)
        record.ended = True
        if self.observe:
            self.observe(record)


_current: Session | None = None


def current_session() -> Session | None:
    """Returns the session that is active in this process, or None."""
    return _current


@contextlib.contextmanager
def simulated_gpu(
    arch: str = DEFAULT_ARCH,
    *,
    lineinfo: bool = True,
    benchmarks: str = "once",
    execute: bool = True,
    observe: Callable[[LaunchRecord], None] | None = None,
    host_operators: Mapping[Any, Callable[..., Any]] | None = None,
    opener: str = "cute_nvfp4.sim.session",
    execution: Execution | None = None,
    heap: Heap | None = None,
    **options: Any,
) -> Iterator[Session]:
    """Gives torch and CuTe DSL programs a GPU of ``arch`` inside a ``with`` block; the simulator runs their kernels.

    Host memory serves torch's device "cuda", ``cuda.bindings`` answers as a GPU would, and launches of compiled DSL
    functions are executed from their PTX, one after another. The end of the block restores everything.

    lineinfo: whether to put source lines into the PTX, so that hazards can name them.
    benchmarks: "once" makes the DSL's benchmark helpers call their function once; "full" leaves them as they are.
        Triton's need a driver, so that they always call their function once.
    execute: whether to run launches; if not, they are only recorded.
    observe: called with a launch's record before it runs, and again when it has ended without an error.
    host_operators: maps torch operators that only a GPU has to functions that compute them on host tensors.
    opener: the module whose ``simulated_gpu`` opens the sessions of Python processes that the program starts.
    execution: runs the launches, by default in this process. Another process has to share the memory of ``heap``.
    heap: allocates the memory that serves as device memory.
    options: keyword arguments of ``sim.run`` for every launch (counters, step_limit, …).

    Raises:
        TargetError: an unknown architecture or value of ``benchmarks``, another release of the DSL, or a session
            inside another.
    """
    global _current
    if _current is not None:
        raise TargetError("a simulated session is already active")
    if benchmarks not in ("once", "full"):
        raise TargetError(f"benchmarks: got {benchmarks!r}, expected 'once' or 'full'")
    session = Session(
        Device.of(arch),
        benchmarks,
        execute,
        options,
        observe,
        host_operators or {},
        execution or Here(),
        heap or Heap(),
    )
    hooks, patches = DslHooks(session, lineinfo), Patches()
    try:
        hooks.install(patches)
        driver.install(patches, session.runtime)
        session.cuda.install(patches)
        install_python(patches, session)
        install_children(patches, opener, arch, options)
        extensions.install(patches, hooks.work)
        session.active, _current = True, session
        with session.modes():
            yield session
    finally:
        session.active, _current = False, None
        patches.restore()
        hooks.close()

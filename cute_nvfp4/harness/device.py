"""The simulated GPU of a submission: a process of the judge that executes launches and records findings.

``gpu`` starts ``python -m cute_nvfp4.harness.device CONTROL_FD LAUNCHES_FD ARENA_FD ARENA_BYTES CALLS_BYTES``. Like a
driver's client, the submission's process compiles kernels and sends launches. Checks, counters, clock and findings are
here, out of its reach. Memory is the arena's, mapped at the same address in both processes.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from ..errors import CuteNvfp4Error
from ..sim import GlobalMemory, Program, Result, Schedule, Trace
from ..sim import Launch as Captured
from ..sim.checks.findings import Finding, grouped
from ..sim.execution import Here, Issued
from ..sim.host.device import Device as Model
from ..sim.observe.heartbeat import Heartbeat
from ..sim.observe.touched import Runs, Touched
from ..sim.outcome import outcome_of
from ..sim.profile import Profile, profile
from . import sandbox
from .counters import Extent, Launch
from .mapped import BASE, Mapped
from .work import Work

MAX_LAUNCHES = 256
"""Most launches of a call that are reported one by one."""
_MOST_BYTES = 256 << 20
"""Most bytes of a message from the submission's process."""


class Asked(BaseModel):
    """A launch, as the submission's process requests it."""

    model_config = ConfigDict(extra="forbid")

    program: str
    kernel: str
    grid: Extent
    block: Extent
    params: list[str]
    cluster: Extent
    dynamic_smem: int
    cooperative: bool
    programmatic: bool
    stream: int
    attributes: list[tuple[int, str]]
    registers: int
    regions: list[tuple[int, int, str]]
    what: str
    timeline: str
    number: int
    compare: bool

    def launch(self, cubin: bytes) -> Captured:
        own = {name: getattr(self, name) for name in ("kernel", "grid", "block", "cluster", "dynamic_smem", "stream")}
        own |= {name: getattr(self, name) for name in ("cooperative", "programmatic", "registers")}
        params = tuple(bytes.fromhex(text) for text in self.params)
        attributes = tuple((number, bytes.fromhex(text)) for number, text in self.attributes)
        return Captured(params=params, attributes=attributes, cubin=cubin, **own)


@dataclass
class Ran:
    """A launch and its result (``counters.Launch.of``)."""

    number: int
    launch: Captured
    program: Program
    seconds: float = 0.0
    result: Result | None = None

    def profile(self) -> Profile | None:
        """The profile; None if the launch was stopped."""
        return None if self.result is None else profile(self.program, self.launch, self.result)


@dataclass
class Call:
    """What one request of the judge runs, and its findings. parts: the tensors that kernels may touch, as offset in the
    arena, size, name, and whether kernels may write to them. profiled: the first half of the launches warms up, and the
    second half is profiled."""

    options: dict[str, Any]
    parts: list[tuple[int, int, str, bool]]
    launches: list[Ran] = field(default_factory=list)
    failure: tuple[Ran, Exception] | None = None
    work: Work = field(default_factory=Work)
    profiled: bool = False

    def told(self, inspect: bool) -> list[Launch]:
        """The launches to report, at most ``MAX_LAUNCHES``."""
        first = len(self.launches) // 2 if self.profiled else len(self.launches)
        return [
            Launch.of(ran, inspect=inspect, profile=ran.profile() if ran.number >= first else None)
            for ran in self.launches[:MAX_LAUNCHES]
        ]

    def findings(self) -> Iterator[Finding]:
        for ran in self.launches:
            yield from ran.result.findings if ran.result is not None else ()
        if self.failure is not None:
            yield from getattr(self.failure[1], "findings", ())

    def stopped(self, schedule: str) -> str:
        """The reason why a launch was stopped, in the user's words; "" if none was."""
        if self.failure is None:
            return ""
        ran, error = self.failure
        where = f"in launch {ran.number} of the call, grid {ran.launch.grid} block {ran.launch.block}"
        how = f"; repeat it with --schedule {schedule}" if schedule else ""
        said, rest = str(error), []
        for text in grouped(self.findings(), "hazard"):
            if said.rpartition(" [")[0] in text:  # the same finding, at how many more instructions
                said = text.removeprefix("hazard: ")
            else:
                rest.append(text)
        return "\n".join([f"{outcome_of(error)}: {type(error).__name__}: {said}\n{where}{how}", *rest])


class Device:
    """Serves the judge and one submission's process."""

    def __init__(self, memory: Mapped, calls: int, tell: Callable[[str], None]) -> None:
        self._heartbeat = Heartbeat(tell)
        self._memory, self._calls = memory, calls
        self._programs: dict[str, tuple[Program, bytes]] = {}
        self._here, self._call, self._late = Here(), None, 0
        self._numbers = itertools.count()

    # the judge's requests

    def configure(self, *, arch: str, inspect: bool, allow: list[str], collect: bool, strict: bool, clock: str) -> dict:
        """Sets the options of ``sim.run`` for all later launches. inspect: whether they report registers and spills."""
        self._inspect, self._clock = inspect, clock
        self._options = {"allow": tuple(allow), "on_hazard": "collect" if collect else "raise", "strict": strict}
        self._options |= {"counters": True, "sm_count": Model.of(arch).sm_count}
        return {}

    def begin(self, *, schedule: str, trace: str, clocked: bool, profiled: bool, parts: list) -> dict:
        """Starts a call, to which later launches belong."""
        self._schedule, self._trace, self._traced = schedule, trace, Trace() if trace else None
        options = self._options | {"schedule": Schedule.parse(schedule), "trace": self._traced}
        options |= {"others": (self._heartbeat,)}
        options |= {"clock": self._clock} if self._clock and (clocked or profiled) else {}
        self._call = Call(options, parts, work=Work(self._memory if clocked else None), profiled=profiled)
        late, self._late = self._late, 0
        return {"late": late}

    def end(self, *, outputs: list[tuple[int, int]] | None = None) -> dict:
        """Ends the call and returns its findings; later launches are refused. outputs: offsets and sizes that launches
        should have written; None for all tensors that kernels may write."""
        call, self._call = self._call, None
        if self._traced is not None:
            self._traced.write(self._trace)
        launches = call.told(self._inspect)
        if outputs is None:
            outputs = [(offset, size) for offset, size, _, writable in call.parts if writable]
        told = {"stopped": call.stopped(self._schedule), "work": call.work.told(outputs)}
        return told | {"launches": [launch.model_dump() for launch in launches]}

    # the submission's requests

    def program(self, *, name: str, ptx: str, cubin: str) -> dict:
        """Registers the program of later launches."""
        self._programs[name] = Program.parse(ptx), bytes.fromhex(cubin)
        return {}

    def launch(self, **asked: Any) -> tuple[dict, list[np.ndarray]]:
        """Runs a launch. The answer includes the memory that it touched, for the order between streams."""
        call = self._call
        if call is None:
            self._late += 1
            raise CuteNvfp4Error("a launch after custom_kernel had returned: no call is under way")
        asked = Asked.model_validate(asked)
        program, cubin = self._programs[asked.program]
        ran = Ran(len(call.launches), asked.launch(cubin), program)
        call.launches.append(ran)
        begin = time.perf_counter()
        try:
            memory = self._global_memory(asked.regions, call)
            call.work.before(memory)
            issued = Issued(asked.what, asked.timeline, asked.number)
            ran.result, touched = self._here(program, ran.launch, memory, issued, True, call.options)
            call.work.after(ran.result, touched)
        except Exception as error:
            call.failure = call.failure or (ran, error)
            raise
        finally:
            sys.stdout.flush()
            ran.seconds = time.perf_counter() - begin
        found = next((f for f in ran.result.findings if f.severity == "hazard"), None)
        if found is not None:
            call.failure = call.failure or (ran, found.error())
        return self._told(ran, touched if asked.compare else None)

    def _told(self, ran: Ran, touched: Touched | None) -> tuple[dict, list[np.ndarray]]:
        runs: list[tuple[Any, bool, Runs]] = [] if touched is None else list(touched.runs())
        described = [(region.base, write, len(part.first)) for region, write, part in runs]
        arrays = [np.concatenate([part.first, part.last]).astype(np.int64) for _, _, part in runs]
        return {"instructions": ran.result.instructions, "touched": described}, arrays

    def _global_memory(self, regions: list[tuple[int, int, str]], call: Call) -> GlobalMemory:
        """The memory that kernels may touch: the judge's tensors, and the submission's allocations on the heap."""
        memory, heap, end = GlobalMemory(), BASE + self._calls, BASE + self._memory.nbytes
        for base, size, name in regions:
            if heap <= base and base + size <= end:
                memory.add_span(base, size, name)
        for offset, size, name, writable in call.parts:
            memory.add_span(BASE + offset, size, name, writable)
        return memory


_OF_JUDGE, _OF_WORKER = ("configure", "begin", "end"), ("program", "launch")


def answer(device: Device, connection: Connection, known: tuple[str, ...]) -> None:
    """Receives one request and answers it; a simulator's error is sent as name and text."""
    request = json.loads(connection.recv_bytes(_MOST_BYTES))
    operation, arrays = request.pop("op"), []
    try:
        if operation not in known:
            raise CuteNvfp4Error(f"no operation {operation!r}")
        told = getattr(device, operation)(**request)
        told, arrays = told if isinstance(told, tuple) else (told, [])
    except Exception as error:  # the submission's process raises it again
        told = {"error": type(error).__name__, "text": str(error)}
    connection.send_bytes(json.dumps(told).encode())
    for array in arrays:
        connection.send_bytes(array)


def main() -> None:
    """Serves the launches of one submission until its process or the judge closes the connection."""
    control, launches, arena, nbytes, calls = (int(argument) for argument in sys.argv[1:6])
    sandbox.shield()
    judge, worker = Connection(control), Connection(launches)
    device = Device(
        Mapped(arena, nbytes), calls, lambda line: judge.send_bytes(json.dumps({"progress": line}).encode())
    )
    served = {judge: _OF_JUDGE, worker: _OF_WORKER}
    while judge in served:
        for connection in wait(list(served)):
            try:
                answer(device, connection, served[connection])
            except (EOFError, OSError, ValueError):  # the process ended, or sent an invalid request
                connection.close()
                served.pop(connection)


if __name__ == "__main__":
    main()

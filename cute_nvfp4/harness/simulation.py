"""The simulated GPU that a submission's process finds on a machine without one (``--backend sim``).

Device "cuda" of torch is served from host memory, and every kernel that is launched there runs from its PTX, the
submission's own too, with the simulator's checks on.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence

from ..sim import Schedule, Trace
from ..sim.checks.findings import grouped
from ..sim.session import Part, Session, outcome_of
from .counters import Launch
from .errors import StoppedLaunch
from .workspace import Workspace

GAP = 1 << 16
"""Bytes between two tensors of the workspace: an access that runs past the end of one does not reach the next."""
MAX_LAUNCHES = 256
"""Launches of a call that are reported one by one."""
NO_TRITON = (
    "Triton asked for the driver of a GPU to launch a kernel: the simulated GPU runs kernels of the CuTe DSL and work "
    "of torch, and has no driver for Triton. Run this submission with --backend cuda on a machine with a GPU."
)
"""What is said of a submission that launches a kernel of Triton in the simulated GPU."""


class Simulation:
    """One simulated GPU for the life of the process; ``inspect``: launches tell what their machine code uses.

    Hazards of the classes ``allow`` are warnings; with ``collect``, no hazard of a check stops a launch, and all are
    told at the end; ``strict`` adds warnings (``sim.run``). ``clock`` is the machine whose modelled times ``launches``
    gives where it is asked for them.
    """

    def __init__(
        self,
        arch: str,
        *,
        inspect: bool = False,
        allow: Sequence[str] = (),
        collect: bool = False,
        strict: bool = False,
        clock: str = "",
    ) -> None:
        from ..runtime.session import simulated_gpu

        self._inspect, self._clock = inspect, clock
        self._hazards = {"allow": tuple(allow), "on_hazard": "collect" if collect else "raise", "strict": strict}
        self._open = contextlib.ExitStack()
        self._session: Session = self._open.enter_context(simulated_gpu(arch))

    @contextlib.contextmanager
    def launches(self, schedule: str = "", trace: str = "", clocked: bool = False) -> Iterator[None]:
        """Within it, kernels run under ``schedule`` and, if there is a file to write, are traced; with their modelled
        times if they are to be ``clocked``.

        Raises:
            StoppedLaunch: one was stopped, whatever the submission made of the error.
        """
        session, traced = self._session, Trace() if trace else None
        session.launches.clear()
        session.between.clear()
        session.failure = None
        # set anew for every request: what a submission changes here does not last
        how = Schedule.parse(schedule)
        session.options = {"checks": True, "counters": True, "schedule": how, "trace": traced} | self._hazards
        session.options |= {"clock": self._clock} if self._clock and clocked else {}
        session.execute = True
        try:
            yield
        except Exception as error:
            if session.failure is not None:
                raise self._stopped(schedule) from error
            if _is_of_tritons_driver(error):
                raise StoppedLaunch(NO_TRITON) from error
            raise
        finally:
            if traced is not None:
                traced.write(trace)
        if session.failure is not None:
            raise self._stopped(schedule) from session.failure[1]

    def _stopped(self, schedule: str) -> StoppedLaunch:
        record, error = self._session.failure
        where = "in torch's own work"
        if record is not None:
            launch = record.launch
            where = f"in launch {record.number} of the call, grid {launch.grid} block {launch.block}"
        how = f"; repeat it with --schedule {schedule}" if schedule else ""
        said, rest = str(error), []
        for text in grouped(self._session.findings(), "hazard"):
            if said.rpartition(" [")[0] in text:  # the same, and at how many more instructions
                said = text.removeprefix("hazard: ")
            else:
                rest.append(text)
        return StoppedLaunch("\n".join([f"{outcome_of(error)}: {type(error).__name__}: {said}\n{where}{how}", *rest]))

    def synchronize(self) -> None:
        """The host waits for all that was issued."""
        self._session.runtime.order.synchronize()

    def forget(self) -> None:
        """Drops the launches so far."""
        self._session.launches.clear()

    def report(self) -> list[Launch]:
        """The launches since ``launches`` was entered or ``forget`` called, the first of them if there were many."""
        return [Launch.of(record, inspect=self._inspect) for record in self._session.launches[:MAX_LAUNCHES]]

    def protect(self, workspace: Workspace) -> None:
        """Lets kernels touch only the tensors of ``workspace``, and write only its outputs."""
        many = len({number for number, _, _ in workspace.tensors()}) > 1
        self._session.memory.divide(
            workspace.memory,
            [
                Part(tensor.data_ptr(), slot.nbytes, _name(slot.buffer.name, number, many), slot.buffer.output)
                for number, slot, tensor in workspace.tensors()
            ],
        )


def _is_of_tritons_driver(error: BaseException) -> bool:
    """Whether the error comes from Triton's search for a driver, which its every launch begins with."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "triton.runtime.driver" for frame in frames)


def _name(buffer: str, number: int, many: bool) -> str:
    return f"{buffer} of place {number} in the batch" if many else buffer

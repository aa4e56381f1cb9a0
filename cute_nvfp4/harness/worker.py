"""The process of one submission: it loads the submission, calls it, and times it on a GPU; it never judges it.

``process`` starts ``python -m cute_nvfp4.harness.worker CONTROL_FD DEVICE_FD ARENA_FD ARENA_BYTES CALLS_BYTES FOLDER
JUDGE``. Requests and answers are JSON messages; tensors lie in the arena. Before it loads a submission, the process
gives up the rights by which it could reach the judge (``sandbox``). The judge finds out by itself whether the answer is
right, whether the inputs were changed, and what was launched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import dsl_compat, provided, sandbox, timing
from .folder.described import DESCRIBED, Described
from .folder.structure import flattened
from .integrity import Hooks, Snapshot
from .mapped import Mapped
from .problem import Problem, get_problem
from .workspace import Workspace

if TYPE_CHECKING:
    from .remote import SimulatedGpu

_clock = time.perf_counter_ns
_event = torch.cuda.Event
_synchronize = torch.cuda.synchronize
_fill = torch.Tensor.fill_
_copy = torch.Tensor.copy_
_clone = torch.Tensor.clone
_Tensor = torch.Tensor
_frames = sys._current_frames
_most_queueing = timing.most_queueing_ns


class Refused(Exception):
    """An act of the submission that ends the request; the text is for the user."""


class Worker:
    """Serves the requests of one runner, for one submission.

    Calls are numbered by the place of their inputs in the workspace. On a GPU the runner has the inputs of each call of
    a batch staged, then the calls made together, then the outputs of each collected; elsewhere the inputs are in place.
    """

    def __init__(self, memory: Mapped, device: Connection, calls: int) -> None:
        self._memory, self._connection, self._calls = memory, device, calls
        self._problem: Problem | Described | None = None
        self._kernel: Any = None
        self._snapshot: Snapshot | None = None
        self._hooks: Hooks | None = None
        self._device = torch.device("cpu")
        self._simulated: SimulatedGpu | None = None
        self._gpu = False
        self._workspace: Workspace | None = None
        self._outputs: dict[int, tuple[list, list]] = {}  # on a GPU: the returned values of each call, and their copies
        self._returned: list[torch.Tensor] = []
        self._structures: list[Any] = []  # of returned values, for a folder's problem, which leaves them to the call
        self._clear: timing.ColdL2 | None = None
        self._hazards: dict[str, Any] = {}
        self._queueing: dict[int, int] = {}  # nanoseconds to queue the last timed batch, by its number of calls

    # requests

    def load(self, *, problem: str, path: str, device: str, simulate: str, hazards: dict, aliases: bool) -> dict:
        """Imports the submission. simulate: the architecture of the simulated GPU, "" for none; hazards: how hazards
        between streams are treated; aliases: whether names that the DSL has dropped exist."""
        self._problem = DESCRIBED if problem == DESCRIBED.name else get_problem(problem)
        self._device, self._hazards = torch.device(device), hazards
        adopt = (lambda tensor: tensor) if device == "cpu" else None
        if simulate:
            from .remote import SimulatedGpu

            self._simulated = SimulatedGpu(simulate, self._connection, self._memory, self._calls)
            adopt = self._simulated.adopt
        self._workspace = Workspace(self._problem, self._memory, adopt)
        self._gpu = self._device.type == "cuda" and not simulate
        if self._gpu:
            self._clear = timing.ColdL2(self._device)
            self._clear.measure()
        self._hooks = Hooks()
        self._snapshot = Snapshot(*filter(None, (self, self._workspace, self._clear)))
        file = Path(path).resolve()
        provided.install(file.parent, aliases, bool(simulate))
        sys.path.insert(0, str(file.parent))
        specification = importlib.util.spec_from_file_location("submission", file)
        module = importlib.util.module_from_spec(specification)
        sys.modules["submission"] = module
        self._begin()
        specification.loader.exec_module(module)
        self._kernel = getattr(module, "custom_kernel", None)
        if not callable(self._kernel):
            raise Refused(f"{file.name} defines no function custom_kernel(data)")
        return self._told()

    def stage(self, *, case: dict, index: int, batch: int) -> dict:
        """Takes the arena's contents as the inputs of call ``index`` of at most ``batch``."""
        self._workspace.lay_out(case, batch)
        self._workspace.take_inputs(index)
        self._synchronize()
        return {}

    def call(self, *, case: dict, batch: int, order: list[int], timed: bool) -> dict:
        """Makes the calls of ``order``, one after the other. Times are of all; timed: whether a GPU measures them."""
        self._workspace.lay_out(case, batch)
        inputs, threads = self._prepare(order), set(_frames())
        gpu_ns, described = None, []
        # bound before the submission runs
        close, refuse, keep, release = self._hooks.close, self._refuse, self._keep, self._hooks.open
        begin = _clock()
        try:
            if timed and self._gpu:
                gpu_ns = self._timed_calls(order, inputs)
            else:
                outs = []
                for data in inputs:
                    outs.append(self._kernel(data))
                traced, wall = close(), _clock() - begin
                refuse(traced)
                described = keep(order, outs)
        finally:
            release()
        self._synchronize()
        wall = _clock() - begin if self._gpu else wall
        left = len(set(_frames()) - threads)
        told = {"wall_ns": wall, "gpu_ns": gpu_ns, "outputs": described, "threads": left}
        return told | {"structures": self._structures} | self._told()

    def collect(self, *, index: int, inputs: bool) -> dict:
        """Describes the outputs of call ``index`` and hands them over; with ``inputs`` its inputs as they are, too."""
        described = self._describe(index, *self._outputs.pop(index))
        if inputs:
            self._workspace.give_inputs(index)
        self._synchronize()
        return {"outputs": [described]}

    def profile(self, *, case: dict, order: list[int]) -> dict:
        """Makes one warm-up call, then one under torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        self._workspace.lay_out(case, 1)
        (data,) = self._prepare(order)
        self._kernel(data)
        self._synchronize()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
        with profile(activities=activities) as recorded:
            self._kernel(data)
            self._synchronize()
        key = "device_time_total" if self._gpu else "cpu_time_total"
        return {"table": recorded.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=60)}

    # parts of the requests

    def _begin(self) -> None:
        if self._simulated:
            self._simulated.forget(**self._hazards)

    def _told(self) -> dict:
        """What only this process knows: hazards between streams with torch's work, and the names of an older DSL that
        the submission used."""
        notes = [f"{old} is {new} in this DSL (--dsl-compat)" for old, new in dsl_compat.USED.items()]
        return {"unordered": self._simulated.unordered() if self._simulated else "", "notes": notes}

    def _prepare(self, order: list[int]) -> list[tuple]:
        """The ``data`` tuples of the calls, once every output is NaN and all results of earlier calls are cleared."""
        self._begin()
        self._workspace.poison()
        for tensor in self._returned:
            _fill(tensor, float("nan") if tensor.is_floating_point() else 85)
        self._returned, self._outputs, self._structures = [], {}, []
        self._synchronize()
        return [self._workspace.data(index) for index in order]

    def _timed_calls(self, order: list[int], batch: list[tuple]) -> float:
        """Times the calls together, in nanoseconds, and keeps what they return.

        The GPU reads L2 away while the host queues everything, with the copies of outputs directly after the last call.
        Some elements of the inputs are wrong until the clock starts. Work on a stream that does not wait for the
        caller's, or that the caller's does not wait for, therefore gives wrong results, and gains no time.
        """
        start, end = _event(enable_timing=True), _event(enable_timing=True)
        kernel, close, refuse, keep = self._kernel, self._hooks.close, self._refuse, self._keep
        mend = self._workspace.spoil(order).mend
        most = _most_queueing(len(order))
        self._clear.busy(min(self._queueing.get(len(order), most) * 3 // 2, most))
        begin = _clock()
        mend()
        start.record()
        outs = [kernel(data) for data in batch]
        traced = close()
        end.record()
        refuse(traced)
        keep(order, outs)
        self._queueing[len(order)] = _clock() - begin
        end.synchronize()
        return start.elapsed_time(end) * 1e6

    def _refuse(self, traced: str) -> None:
        """Raises ``Refused`` for anything that would run the submission's code after the clock has stopped: ``traced``,
        a hook left in Python or torch, or a function replaced here."""
        if left := traced or self._hooks.left():
            raise Refused(f"custom_kernel left {left}, which can run when the clock has stopped")
        self._refuse_replaced()

    def _refuse_replaced(self) -> None:
        if replaced := self._snapshot.changed():
            raise Refused(f"the submission replaced {', '.join(replaced)}")

    def _keep(self, order: list[int], outs: list) -> list[list[dict]]:
        """Describes what the calls returned, and copies what the judge cannot read, after the last call.

        By then a tensor that serves two calls holds one answer. On a GPU the copies are queued in stream order before
        the host waits, so that work hidden on another stream comes too late; they are described when collected.
        """
        described = []
        for index, out in zip(order, outs):
            returned = self._outputs_of(out)
            copies = [_clone(item) if type(item) is _Tensor else item for item in returned]
            if self._gpu:
                self._outputs[index] = returned, copies
            else:
                described.append(self._describe(index, returned, copies))
            self._remember(returned)
        return described

    def _outputs_of(self, out: Any) -> list:
        """The outputs of a call; for a folder's problem all tensors in the returned value, which get places."""
        if self._problem is not DESCRIBED:
            # neither the iteration nor the class that an object of the submission's claims
            sequence = next((kind for kind in (list, tuple) if issubclass(type(out), kind)), None)
            return [out] if sequence is None else list(sequence.__iter__(out))
        structure, tensors = flattened(out)
        self._structures.append(structure)
        self._workspace.expect([(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors])
        return tensors

    def _remember(self, returned: list) -> None:
        """Records the submission's own tensors, to fill them with NaN before the next calls."""
        for tensor in returned:
            # the workspace is poisoned as a whole, and may hold another case's inputs by then
            if type(tensor) is _Tensor and self._is_output(tensor) and not self._workspace.holds(tensor):
                self._returned.append(tensor.detach())

    def _is_output(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor can be one of the case's outputs, with every element in a place of its own."""
        kinds = {(slot.buffer.shape, slot.buffer.dtype) for slot in self._workspace.layout.results}
        kind = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        return kind in kinds and tensor.layout is torch.strided and not _is_broadcast(tensor)

    def _describe(self, index: int, returned: list, copies: list) -> list[dict]:
        """Describes each output of a call, with its place in the arena; it copies outputs that lie elsewhere there."""
        described, results = [], self._workspace.layout.results
        for number, (tensor, content) in enumerate(zip(returned, copies)):
            if type(tensor) is not _Tensor:
                described.append({"type": type(tensor).__name__})
                continue
            entry = {
                "type": "Tensor",
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "device": tensor.device.type,
                "strided": tensor.layout is torch.strided,
            }
            described.append(entry)
            elsewhere = tensor.device.type != self._device.type and self._problem is not DESCRIBED
            if not entry["strided"] or elsewhere or number >= len(results):
                continue
            entry |= {"broadcast": _is_broadcast(tensor), "aliases": self._workspace.aliases(tensor)}
            at, slot = self._workspace.offset(tensor), results[number]
            if at is not None:
                entry |= {"at": at, "stride": list(tensor.stride())}
            elif tuple(tensor.shape) == slot.buffer.shape and entry["dtype"] == slot.buffer.dtype:
                place, entry["at"] = self._workspace.result(index, number)
                _copy(place, content.detach())
        return described

    def _synchronize(self) -> None:
        if self._gpu:
            _synchronize()
        elif self._simulated:
            self._simulated.synchronize()

    def answer(self, request: dict) -> dict:
        """Runs one request, and turns whatever the submission raises into an answer."""
        arguments = dict(request)
        operations = (self.load, self.stage, self.call, self.collect, self.profile)
        try:
            result = {operation.__name__: operation for operation in operations}[arguments.pop("op")](**arguments)
            self._refuse_replaced()
        except Refused as error:
            return {"error": str(error), "traceback": ""}
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the submission caused all of these
            return self._raised(error)
        failure = self._simulated.failure() if self._simulated else None
        return result | {"traceback": launched_at(failure) if failure else ""}

    def _raised(self, error: BaseException) -> dict:
        text, where = f"{type(error).__name__}: {error}{dsl_compat.hint(error)}", own_traceback(error)
        if self._simulated:
            from .remote import NO_TRITON, is_of_tritons_driver

            failure = self._simulated.failure()
            if failure is not None:
                where = launched_at(failure)
            elif is_of_tritons_driver(error):
                text, where = NO_TRITON, launched_at(error)
        return {"error": text, "traceback": where} | self._told()


def _is_broadcast(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))


def own_traceback(error: BaseException) -> str:
    """The traceback from the submission's first frame on; the harness's frames above it say nothing."""
    trace = traceback.TracebackException.from_exception(error)
    here, package = str(Path(__file__).parent / "worker.py"), "importlib"
    kept = [frame for frame in trace.stack if frame.filename != here and package not in frame.filename]
    trace.stack = traceback.StackSummary.from_list(kept)
    return "".join(trace.format()).rstrip()


def launched_at(error: BaseException) -> str:
    """The submission's frames that led to a launch that was stopped, without those of DSL, Triton and simulator."""
    libraries = str(Path(__file__).parents[1]), "nvidia_cutlass_dsl", "/triton/", "<"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in libraries)]
    return "launched at\n" + "".join(traceback.format_list(frames)).rstrip() if frames else ""


def main() -> None:
    """Runs one submission for the judge, in the folder that it may write to."""
    control, device, arena, nbytes, calls = (int(argument) for argument in sys.argv[1:6])
    folder, judge = Path(sys.argv[6]), int(sys.argv[7])
    for descriptor in (control, device, arena):
        os.set_inheritable(descriptor, False)
    sys.argv = ["submission.py"]
    os.chdir(folder)
    connection = Connection(control)
    worker = Worker(Mapped(arena, nbytes), Connection(device), calls)
    layers = sandbox.enter(folder, judge)
    connection.send_bytes(json.dumps({"layers": layers}).encode())
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # the runner is done; no code of the submission runs at exit
        answer = worker.answer(request)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()

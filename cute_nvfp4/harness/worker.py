"""The process of one submission: loads it, calls it, times it; it never judges it.

Started by :mod:`cute_nvfp4.harness.runner` as ``python -m cute_nvfp4.harness.worker CONTROL_FD ARENA_FD BYTES``.
Requests and answers are JSON messages; tensors travel through the arena. Anything else the harness wants to know (is
the answer right, were the inputs changed) it finds out by itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import timing
from .arena import Arena
from .errors import StoppedLaunch
from .integrity import Snapshot
from .problem import Problem, get_problem
from .workspace import Workspace

if TYPE_CHECKING:
    from .simulation import Simulation

_clock = time.perf_counter_ns
_event = torch.cuda.Event
_synchronize = torch.cuda.synchronize
_fill = torch.Tensor.fill_
_copy = torch.Tensor.copy_
_clone = torch.Tensor.clone
_Tensor = torch.Tensor


class Refused(Exception):
    """The submission did something that ends the request; the text is for the user."""


def _task_module() -> types.ModuleType:
    """The ``task`` module that public submissions import their type names from."""
    module = types.ModuleType("task", "Type names of the problem, provided by the harness.")
    module.input_t = tuple
    module.output_t = torch.Tensor | list
    module.TestSpec = dict
    return module


class Worker:
    """Serves the requests of one runner, for one submission.

    The runner stages the inputs of each call of a batch, has the calls made together, and collects what each of them
    returned. Calls are numbered by the place of their inputs in the workspace.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._problem: Problem | None = None
        self._kernel: Any = None
        self._snapshot: Snapshot | None = None
        self._device = torch.device("cpu")
        self._simulation: Simulation | None = None
        self._gpu = False
        self._workspace: Workspace | None = None
        self._outputs: dict[int, tuple[list, list]] = {}  # what each call returned, and copies of it
        self._returned: list[torch.Tensor] = []
        self._clear: timing.ColdL2 | None = None

    # requests

    def load(self, *, problem: str, path: str, device: str, simulate: str, options: dict[str, Any]) -> dict:
        """Imports the submission. simulate: the architecture of the GPU to simulate, "" for none; options: those of
        ``Simulation``."""
        self._problem, self._device = get_problem(problem), torch.device(device)
        gap = 0
        if simulate:
            from .simulation import GAP, Simulation

            self._simulation, gap = Simulation(simulate, **options), GAP
        self._workspace = Workspace(self._problem, self._device, self._arena, gap)
        self._gpu = self._device.type == "cuda" and not simulate
        if self._gpu:
            self._clear = timing.ColdL2(self._device)
        self._snapshot = Snapshot()
        sys.modules["task"] = _task_module()
        file = Path(path).resolve()
        sys.path.insert(0, str(file.parent))
        specification = importlib.util.spec_from_file_location("submission", file)
        module = importlib.util.module_from_spec(specification)
        sys.modules["submission"] = module
        with self._launches():
            specification.loader.exec_module(module)
        self._kernel = getattr(module, "custom_kernel", None)
        if not callable(self._kernel):
            raise Refused(f"{file.name} defines no function custom_kernel(data)")
        return {}

    def stage(self, *, case: dict, index: int, batch: int) -> dict:
        """Takes what the arena holds as the inputs of call ``index`` of at most ``batch``."""
        if self._workspace.lay_out(case, batch) and self._simulation:
            self._simulation.protect(self._workspace)
        self._workspace.take_inputs(index)
        self._synchronize()
        return {}

    def call(self, *, order: list[int], timed: bool, schedule: str = "", trace: str = "") -> dict:
        """The calls of ``order``, one after the other; times are of all of them, launches of the last. ``timed``: on
        CUDA their time is measured, on a simulated GPU that of their launches is modelled."""
        batch = self._prepare(order)
        gpu_ns = None
        begin = _clock()
        if timed and self._gpu:
            gpu_ns = self._timed_calls(order, batch)
        else:
            outs = []
            with self._launches(schedule, trace, timed):
                for data in batch:
                    if self._simulation:
                        self._simulation.forget()
                    outs.append(self._kernel(data))
                self._keep(order, outs)
        self._synchronize()
        return {"wall_ns": _clock() - begin, "gpu_ns": gpu_ns, "launches": self._reported()}

    def measure(self, *, order: list[int], repeats: int, relative_error: float, seconds: float) -> dict:
        """Repeats the calls of ``order``; GPU times on CUDA, wall times otherwise, of all of them together.

        What is left to collect is of the last repeat; on CUDA, of one more that is not reported.
        """
        batch = self._prepare(order)
        rule = timing.StopRule(repeats, relative_error, seconds)
        kernel, last = self._kernel, []

        def calls() -> None:
            nonlocal last
            last = [kernel(data) for data in batch]

        def clear() -> None:
            self._remember(last)
            self._poison()
            if self._clear is not None:
                self._clear()

        if self._gpu:
            samples = timing.time_cuda(calls, rule=rule, clear=clear)
            clear()
            self._timed_calls(order, batch)
        else:
            with self._launches():
                samples = timing.time_wall(calls, rule=rule, clear=clear)
                self._keep(order, last)
        self._synchronize()
        return {"samples": samples}

    def collect(self, *, index: int) -> dict:
        """Describes what call ``index`` returned; hands it over with that call's inputs as they are now."""
        described = self._store(*self._outputs.pop(index))
        self._workspace.give_inputs(index)
        self._synchronize()
        return {"outputs": described}

    def profile(self, *, order: list[int]) -> dict:
        """One warm call, then one under torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        (data,) = self._prepare(order)
        with self._launches():
            self._kernel(data)
        self._synchronize()
        activities = [ProfilerActivity.CPU]
        if self._gpu:
            activities.append(ProfilerActivity.CUDA)
        with self._launches(), profile(activities=activities) as recorded:
            self._kernel(data)
            self._synchronize()
        key = "device_time_total" if self._gpu else "cpu_time_total"
        table = recorded.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=60)
        return {"table": table, "launches": self._reported()}

    # parts of the requests

    def _launches(
        self, schedule: str = "", trace: str = "", clocked: bool = False
    ) -> contextlib.AbstractContextManager[object]:
        """Within it, kernels of a simulated GPU run as asked, and one that is stopped ends the request."""
        return self._simulation.launches(schedule, trace, clocked) if self._simulation else contextlib.nullcontext()

    def _reported(self) -> list[dict]:
        """The simulated launches of the last call."""
        return [launch.model_dump() for launch in self._simulation.report()] if self._simulation else []

    def _prepare(self, order: list[int]) -> list[tuple]:
        """The ``data`` tuples of the calls; every output is NaN, and nothing of earlier calls is left."""
        self._poison()
        self._outputs = {}
        self._synchronize()
        return [self._workspace.data(index) for index in order]

    def _poison(self) -> None:
        """Fills with NaN what the problem or the submission last returned: it must be written again."""
        self._workspace.poison()
        for tensor in self._returned:
            _fill(tensor, float("nan"))
        self._returned = []

    def _timed_calls(self, order: list[int], batch: list[tuple]) -> float:
        """Times the calls together, in nanoseconds, and keeps what they returned."""
        start, end = _event(enable_timing=True), _event(enable_timing=True)
        kernel = self._kernel
        self._clear()
        start.record()
        outs = [kernel(data) for data in batch]
        end.record()
        self._keep(order, outs)
        end.synchronize()
        return start.elapsed_time(end) * 1e6

    def _keep(self, order: list[int], outs: list) -> None:
        """Keeps what the calls returned, with copies taken only after the last of them.

        A tensor that serves two calls holds one answer by then. On a GPU the copies are queued in stream order before
        the host waits, so that work hidden on another stream comes too late.
        """
        for index, out in zip(order, outs):
            returned = list(out) if isinstance(out, (list, tuple)) else [out]
            copies = [_clone(item) if type(item) is _Tensor else item for item in returned]
            self._outputs[index] = returned, copies
        self._remember(outs)

    def _remember(self, outs: list) -> None:
        """Notes which tensors of the submission's own to fill with NaN before the next calls."""
        for out in outs:
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                # the workspace is poisoned as a whole, and may hold another case's inputs by then
                if type(tensor) is _Tensor and self._is_output(tensor) and not self._workspace.holds(tensor):
                    self._returned.append(tensor.detach())

    def _is_output(self, tensor: torch.Tensor) -> bool:
        """Whether it can be one of the case's outputs, every element in a place of its own."""
        kinds = {(slot.buffer.shape, slot.buffer.dtype) for slot in self._workspace.layout.results}
        kind = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        return kind in kinds and tensor.layout is torch.strided and not _is_broadcast(tensor)

    def _store(self, returned: list, copies: list) -> list[dict]:
        """Describes a call's outputs and copies their contents to the result slots where shapes match."""
        described, results = [], self._workspace.layout.results
        for index, (tensor, content) in enumerate(zip(returned, copies)):
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
            if not entry["strided"] or tensor.device.type != self._device.type or index >= len(results):
                continue
            entry["broadcast"] = _is_broadcast(tensor)
            entry["aliases"] = self._workspace.aliases(tensor)
            slot = results[index]
            if tuple(tensor.shape) == slot.buffer.shape and entry["dtype"] == slot.buffer.dtype:
                _copy(self._arena.tensor(slot), content.detach())
        return described

    def _synchronize(self) -> None:
        if self._gpu:
            _synchronize()
        elif self._simulation:
            self._simulation.synchronize()

    def answer(self, request: dict) -> dict:
        """Runs one request and turns whatever the submission raises into an answer."""
        arguments = dict(request)
        operations = (self.load, self.stage, self.call, self.measure, self.collect, self.profile)
        try:
            result = {operation.__name__: operation for operation in operations}[arguments.pop("op")](**arguments)
        except Refused as error:
            return {"error": str(error), "traceback": ""}
        except StoppedLaunch as error:
            return {"error": str(error), "traceback": _launched_at(error.__cause__)}
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # all of it is the submission's doing
            return {"error": f"{type(error).__name__}: {error}", "traceback": _own_traceback(error)}
        replaced = self._snapshot.changed()
        if replaced:
            return {"error": f"the submission replaced {', '.join(replaced)}", "traceback": ""}
        return result


def _is_broadcast(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))


def _own_traceback(error: BaseException) -> str:
    """The traceback from the submission's first frame on (ours above it say nothing)."""
    trace = traceback.TracebackException.from_exception(error)
    here, package = str(Path(__file__).parent / "worker.py"), "importlib"
    kept = [frame for frame in trace.stack if frame.filename != here and package not in frame.filename]
    trace.stack = traceback.StackSummary.from_list(kept)
    return "".join(trace.format()).rstrip()


def _launched_at(error: BaseException) -> str:
    """Where the submission launched what was stopped: its frames without those of DSL, Triton and simulator."""
    libraries = str(Path(__file__).parents[1]), "nvidia_cutlass_dsl", "/triton/", "<"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in libraries)]
    return "launched at\n" + "".join(traceback.format_list(frames)).rstrip() if frames else ""


def main() -> None:
    control, arena, nbytes = (int(argument) for argument in sys.argv[1:4])
    for descriptor in (control, arena):
        os.set_inheritable(descriptor, False)
    sys.argv = ["submission.py"]
    connection = Connection(control)
    worker = Worker(Arena(nbytes, arena))
    connection.send_bytes(b'{"ready": true}')
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # the runner is done, and the submission gets no last word
        answer = worker.answer(request)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()

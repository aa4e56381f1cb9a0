"""The process of one submission: loads it, calls it, times it; it never judges it.

Started by :mod:`cute_nvfp4.harness.runner` as ``python -m cute_nvfp4.harness.worker CONTROL_FD ARENA_FD BYTES``.
Requests and answers are JSON messages; tensors travel through the arena. Anything else the harness wants to know (is
the answer right, were the inputs changed) it finds out by itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..launch import counting_memory
from . import counters, timing
from .arena import Arena, Layout
from .integrity import Snapshot
from .problem import Problem, get_problem

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
    """Serves the requests of one runner, for one submission."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._problem: Problem | None = None
        self._kernel: Any = None
        self._snapshot: Snapshot | None = None
        self._device = torch.device("cpu")
        self._case: dict | None = None
        self._layout: Layout | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._returned: list[torch.Tensor] = []
        self._clear: timing.ColdL2 | None = None

    # requests

    def load(self, *, problem: str, path: str, device: str) -> dict:
        """Imports the submission."""
        self._problem, self._device = get_problem(problem), torch.device(device)
        if self._device.type == "cuda":
            self._clear = timing.ColdL2(self._device)
        self._snapshot = Snapshot()
        sys.modules["task"] = _task_module()
        file = Path(path).resolve()
        sys.path.insert(0, str(file.parent))
        specification = importlib.util.spec_from_file_location("submission", file)
        module = importlib.util.module_from_spec(specification)
        sys.modules["submission"] = module
        specification.loader.exec_module(module)
        self._kernel = getattr(module, "custom_kernel", None)
        if not callable(self._kernel):
            raise Refused(f"{file.name} defines no function custom_kernel(data)")
        return {}

    def call(self, *, case: dict, timed: bool) -> dict:
        """One call on what the arena holds now; the outputs go to the arena's result slots."""
        data = self._prepare(case)
        counters.reset()
        begin = _clock()
        gpu_ns = None
        if timed and self._device.type == "cuda":
            out, written, gpu_ns = self._timed_call(data)
        else:
            with counting_memory():
                out = written = self._kernel(data)
        described = self._store(out, written)
        self._synchronize()
        wall_ns = _clock() - begin
        self._write_back()
        return {"outputs": described, "wall_ns": wall_ns, "gpu_ns": gpu_ns, "counters": counters.collect()}

    def measure(self, *, case: dict, repeats: int, relative_error: float, seconds: float) -> dict:
        """Repeated calls, of which the harness checks the last; GPU times on CUDA, wall times otherwise."""
        data = self._prepare(case)
        rule = timing.StopRule(repeats, relative_error, seconds)
        kernel, last = self._kernel, None

        def call() -> None:
            nonlocal last
            last = kernel(data)

        def clear() -> None:
            self._poison()
            if self._clear is not None:
                self._clear()

        if self._device.type == "cuda":
            samples = timing.time_cuda(call, rule=rule, clear=clear)
        else:
            samples = timing.time_wall(call, rule=rule, clear=clear)
        described = self._store(last, last)
        self._synchronize()
        self._write_back()
        return {"samples": samples, "outputs": described}

    def profile(self, *, case: dict) -> dict:
        """One warm call, then one under torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        data = self._prepare(case)
        self._kernel(data)
        self._synchronize()
        counters.reset()
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded:
            self._kernel(data)
            self._synchronize()
        key = "device_time_total" if self._device.type == "cuda" else "cpu_time_total"
        table = recorded.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=60)
        return {"table": table, "counters": counters.collect()}

    # pieces

    def _prepare(self, case: dict) -> tuple:
        """The ``data`` tuple over the arena, or over device tensors that keep their addresses and get new contents."""
        if case != self._case:
            self._layout = Layout.of(self._problem, case)
            shared = {slot.buffer.name: self._arena.tensor(slot) for slot in self._layout.buffers}
            on_cpu = self._device.type == "cpu"
            self._tensors = (
                shared if on_cpu else {n: torch.empty_like(t, device=self._device) for n, t in shared.items()}
            )
            self._case = case
        if self._device.type == "cuda":
            for slot in self._layout.buffers:
                _copy(self._tensors[slot.buffer.name], self._arena.tensor(slot))
        self._poison()
        self._returned = []
        self._synchronize()
        return self._problem.views(self._tensors)

    def _poison(self) -> None:
        """Fills with NaN what the problem or the submission last returned: it must be written again."""
        for slot in self._layout.buffers:
            if slot.buffer.output:
                _fill(self._tensors[slot.buffer.name], float("nan"))
        for tensor in self._returned:
            _fill(tensor, float("nan"))

    def _timed_call(self, data: tuple) -> tuple[Any, Any, float]:
        start, end = _event(enable_timing=True), _event(enable_timing=True)
        self._clear()
        start.record()
        out = self._kernel(data)
        end.record()
        # copied in stream order, before the host waits: work hidden on another stream comes too late
        written = [_clone(item) if type(item) is _Tensor else item for item in _as_list(out)]
        end.synchronize()
        return out, written, start.elapsed_time(end) * 1e6

    def _store(self, out: Any, written: Any) -> list[dict]:
        """Describes the outputs and copies ``written``, their contents, to the result slots where shapes match."""
        described = []
        for index, (tensor, content) in enumerate(zip(_as_list(out), _as_list(written))):
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
            if not entry["strided"] or tensor.device.type != self._device.type or index >= len(self._layout.results):
                continue
            entry["broadcast"] = any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape))
            entry["aliases"] = self._aliases(tensor)
            slot = self._layout.results[index]
            if tuple(tensor.shape) == slot.buffer.shape and entry["dtype"] == slot.buffer.dtype:
                _copy(self._arena.tensor(slot), content.detach())
                # memory of the arena is the runner's to fill: another case's buffers may lie there by then
                if not entry["broadcast"] and not self._arena.holds(tensor):
                    self._returned.append(tensor.detach())
        return described

    def _aliases(self, tensor: torch.Tensor) -> list[str]:
        """Names of the inputs whose memory ``tensor`` overlaps."""
        if tensor.numel() == 0:
            return []
        first = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1
        last = first + reach * tensor.element_size()
        found = []
        for slot in self._layout.buffers:
            begin = self._tensors[slot.buffer.name].data_ptr()
            if not slot.buffer.output and first < begin + slot.nbytes and begin < last:
                found.append(slot.buffer.name)
        return found

    def _write_back(self) -> None:
        """Lets the harness see the inputs as the call left them."""
        if self._device.type == "cuda":
            for slot in self._layout.buffers:
                if not slot.buffer.output:
                    _copy(self._arena.tensor(slot), self._tensors[slot.buffer.name])

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            _synchronize()

    def answer(self, request: dict) -> dict:
        """Runs one request and turns whatever the submission raises into an answer."""
        arguments = dict(request)
        operation = {"load": self.load, "call": self.call, "measure": self.measure, "profile": self.profile}
        try:
            result = operation[arguments.pop("op")](**arguments)
        except Refused as error:
            return {"error": str(error), "traceback": ""}
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # all of it is the submission's doing
            return {"error": f"{type(error).__name__}: {error}", "traceback": _own_traceback(error)}
        replaced = self._snapshot.changed()
        if replaced:
            return {"error": f"the submission replaced {', '.join(replaced)}", "traceback": ""}
        return result


def _as_list(out: Any) -> list:
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _own_traceback(error: BaseException) -> str:
    """The traceback from the submission's first frame on (ours above it say nothing)."""
    trace = traceback.TracebackException.from_exception(error)
    here, package = str(Path(__file__).parent / "worker.py"), "importlib"
    kept = [frame for frame in trace.stack if frame.filename != here and package not in frame.filename]
    trace.stack = traceback.StackSummary.from_list(kept)
    return "".join(trace.format()).rstrip()


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

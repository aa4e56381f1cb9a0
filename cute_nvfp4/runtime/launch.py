"""Launching a planned kernel: on a GPU, in the simulator, or on the simulated GPU of a session.

A launcher is made once for a plan, from the launches that the host function makes (:mod:`.template`). A call gives it
what varies (addresses and a few numbers, in the order of the kernel's :class:`~.signature.Signature`) and the objects
that own the memory. Nothing above this file asks which backend runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch

from . import driver
from .backend import raw_stream
from .cache import CompiledKernel
from .simulating import SimulatedLaunch, Simulation, simulation
from .template import Patch, Template

Tensors = Mapping[str, tuple[torch.Tensor, bool]]
"""Every tensor that a kernel may touch, by name, and whether it may write it."""
Touched = Callable[..., Tensors]
"""From the owners of a call's memory to its tensors; only the simulator asks."""


class Launcher(Protocol):
    """Launches one kernel as planned."""

    def __call__(self, values: tuple, owners: tuple) -> None:
        """``values``: what varies, in order. ``owners``: what ``touched`` takes, kept alive by the caller."""


class CudaLauncher:
    """``cuLaunchKernelEx`` on parameters that are kept: a call writes the varying values in place, and launches.

    On torch's current stream of ``device``, whatever device is current. Threads take turns.
    """

    def __init__(self, kernel: CompiledKernel, template: Template, device: int) -> None:
        names = [launch.kernel for launch in template.launches]
        if device not in kernel.loaded:
            kernel.loaded[device] = driver.load(kernel.cubin, names, device, kernel.name)
        self._kernel, self._device, self._stream = kernel, device, 0
        self._function, self._several = driver.launch_function(), torch.cuda.device_count() > 1
        self._configs = [driver.config_of(launch) for launch in template.launches]
        self._writes: list[Callable[[tuple], None]] = []
        self._launches, self._buffers = [], []
        for number, (launch, config) in enumerate(zip(template.launches, self._configs)):
            places, buffer = _laid_out(launch.params)
            patches = [p for p in template.patches if p.launch == number]
            self._writes += _writes(buffer, [(places[p.param] + p.offset, p) for p in patches], template.values)
            base = ctypes.addressof(buffer)
            pointers = (ctypes.c_void_p * max(1, len(places)))(*[base + place for place in places])
            self._buffers.append((buffer, pointers))
            handle = kernel.loaded[device][launch.kernel]
            self._launches.append((ctypes.addressof(config), handle, ctypes.addressof(pointers)))
        self._lock = threading.Lock()

    def __call__(self, values: tuple, owners: tuple) -> None:
        if self._several and torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(values, owners)
        stream, launch = raw_stream(self._device), self._function
        with self._lock:
            if stream != self._stream:
                for config in self._configs:
                    config.stream = stream
                self._stream = stream
            for write in self._writes:
                write(values)
            for config, function, params in self._launches:
                status = launch(config, function, params, None)
                if status:
                    self._retry(status, config, function, params)

    def _retry(self, status: int, *arguments: int) -> None:
        """A thread that torch has not used yet has no context; all else is an error."""
        if status == driver.INVALID_CONTEXT:
            driver.bind_context(self._device)
            status = self._function(*arguments, None)
        driver.check(status, f"launch of kernel {self._kernel.name}")


def _laid_out(params: Sequence[bytes]) -> tuple[list[int], ctypes.Array]:
    """Where each parameter starts in one buffer, and the buffer with their bytes."""
    places, end = [], 0
    for param in params:
        end = -(-end // 64) * 64 if len(param) >= 64 else -(-end // 8) * 8 if len(param) >= 8 else -(-end // 4) * 4
        places.append(end)
        end += len(param)
    room = ctypes.create_string_buffer(end + 64)
    start = -ctypes.addressof(room) % 64
    buffer = (ctypes.c_char * max(1, end)).from_buffer(room, start)
    for place, param in zip(places, params):
        buffer[place : place + len(param)] = param
    return places, buffer


def _writes(buffer: Any, places: Sequence[tuple[int, Patch]], count: int) -> list[Callable[[tuple], None]]:
    """Functions that write the varying values: one for each run of neighbours in ``buffer``."""
    runs: list[list[tuple[int, Patch]]] = []
    end = -1
    for at, patch in sorted(places, key=itemgetter(0)):
        if at != end:
            runs.append([])
        runs[-1].append((at, patch))
        end = at + struct.calcsize("<" + patch.code)
    return [_write(buffer, run[0][0], [patch for _, patch in run], count) for run in runs]


def _write(buffer: Any, at: int, patches: Sequence[Patch], count: int) -> Callable[[tuple], None]:
    pack = struct.Struct("<" + "".join(p.code for p in patches)).pack_into
    if any(p.added for p in patches):
        takes = [(p.value, p.added) for p in patches]
        return lambda values: pack(buffer, at, *[values[i] + added for i, added in takes])
    indexes = [p.value for p in patches]
    if indexes == list(range(count)):
        return lambda values: pack(buffer, at, *values)
    if len(indexes) == 1:
        index = indexes[0]
        return lambda values: pack(buffer, at, values[index])
    take = itemgetter(*indexes)
    return lambda values: pack(buffer, at, *take(values))


class SimLauncher:
    """Executes the launches from the kernel's PTX, as the ``simulating`` around the call says."""

    def __init__(self, kernel: CompiledKernel, template: Template, plan: Callable, touched: Touched) -> None:
        self._kernel, self._template, self._plan, self._touched = kernel, template, plan, touched

    def __call__(self, values: tuple, owners: tuple) -> None:
        from ..sim import GlobalMemory, Trace, run

        memory = GlobalMemory()
        for name, (tensor, writable) in self._touched(*owners).items():
            memory.add(tensor, name=name, writable=writable)
        active = simulation()
        kernel, template = self._what_runs(active)
        options = dict(active.options) if active else {}
        traced = options.pop("trace", None)
        for launch in template.filled(values):
            trace = Trace() if traced is True else traced or None
            result = run(kernel.program, launch, memory, trace=trace, **options)
            if active:
                active.record(SimulatedLaunch(kernel, launch, result, trace))

    def _what_runs(self, active: Simulation | None) -> tuple[CompiledKernel, Template]:
        """The kernel, or what ``simulating(kernel=…)`` wants instead: asked for once in its block."""
        if active is None or active.kernel is None:
            return self._kernel, self._template
        found = active.replaced.get(id(self))
        if found is None:
            other = active.kernel(self._kernel)
            template = self._template if other.host_ir == self._kernel.host_ir else self._plan(other)
            # this launcher is kept beside them so that its id stays its own
            found = active.replaced[id(self)] = other, template, self
        return found[:2]


class SessionLauncher:
    """Submits the launches to the simulated GPU of a session (``sim.session``)."""

    def __init__(self, kernel: CompiledKernel, template: Template, device: int, session: Any) -> None:
        self._kernel, self._template, self._device, self._session = kernel, template, device, session

    def __call__(self, values: tuple, owners: tuple) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for launch in self._template.filled(values):
            self._session.submit(self._kernel.program, dataclasses.replace(launch, stream=stream))

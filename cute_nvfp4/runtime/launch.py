"""Launching a planned kernel: on a GPU, in the simulator, or on the simulated GPU of a session.

A launcher is made once for a plan, from the launches that the host function makes (:mod:`.template`). A call gives it
what varies (addresses and a few numbers, in the order of the kernel's :class:`~.signature.Signature`) and the objects
that own the memory. Nothing above this file asks which backend runs.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch

from ..target import architecture
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
    """Launches one kernel as planned. kernel, template: what it was made from."""

    kernel: CompiledKernel
    template: Template

    def __call__(self, values: tuple, owners: tuple) -> None:
        """``values``: what varies, in order. ``owners``: what ``touched`` takes, kept alive by the caller."""

    def fixed(self, values: tuple, owners: tuple) -> Callable[[], None]:
        """The call with these values, for a call that is made again and again."""


class CudaLauncher:
    """``cuLaunchKernelEx`` on parameters that are kept: a call writes the varying values in place, and launches.

    On torch's current stream of ``device``, whatever device is current. Threads take turns.
    """

    def __init__(self, kernel: CompiledKernel, template: Template, device: int) -> None:
        if device not in kernel.loaded:
            names = [launch.kernel for launch in template.launches]
            kernel.loaded[device] = driver.load(kernel.cubin, names, device, kernel.name)
        self.kernel, self.template, self._device = kernel, template, device
        self._write, self._launch = self._parts()
        self._lock = threading.Lock()

    def __call__(self, values: tuple, owners: tuple) -> None:
        with self._lock:
            self._write(*values)
            self._launch()

    def fixed(self, values: tuple, owners: tuple) -> Callable[[], None]:
        """The call with these values, in memory of its own: nothing is written any more."""
        write, launch = self._parts()
        write(*values)
        lock = threading.Lock()

        def call() -> None:
            # the stream is written
            with lock:
                launch()

        return call

    def _parts(self) -> tuple[Callable[..., None], Callable[[], None]]:
        """What writes the varying values, and what launches."""
        loaded, device, name = self.kernel.loaded[self._device], self._device, self.kernel.name
        writes, prepared = [], []
        for number, launch in enumerate(self.template.launches):
            function = loaded[launch.kernel]
            packed = driver.PackedLaunch(launch, function)
            patches = [p for p in self.template.patches if p.launch == number]
            places = [(function.offsets[p.param] + p.offset, p) for p in patches]
            if places:
                writes.append(_write(packed.buffer, places, self.template.values))
            prepared.append(packed)
        write = writes[0] if len(writes) == 1 else _in_turn(writes)
        entry, stream_before, stream_of = driver.launch_function(), 0, raw_stream
        first = prepared[0].arguments
        several, configs = len(prepared) > 1, [packed.config for packed in prepared]

        def launch_here() -> None:
            nonlocal stream_before
            stream = stream_of(device)
            if stream != stream_before:
                for config in configs:
                    config.stream = stream
                stream_before = stream
            status = entry(*first)
            if status:
                driver.retry(status, first, device, name)
            if several:
                for packed in prepared[1:]:
                    driver.retry(entry(*packed.arguments), packed.arguments, device, name)

        def launch_there() -> None:
            with torch.cuda.device(device):
                launch_here()

        def launch_anywhere() -> None:
            (launch_here if torch.cuda.current_device() == device else launch_there)()

        return write, launch_anywhere if torch.cuda.device_count() > 1 else launch_here


def _in_turn(functions: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*values: Any) -> None:
        for function in functions:
            function(*values)

    return call


def _write(buffer: Any, places: Sequence[tuple[int, Patch]], count: int) -> Callable[..., None]:
    """What writes the varying values of a launch to ``buffer`` at once, and between them the bytes that are there."""
    places = sorted(places, key=itemgetter(0))
    start = end = places[0][0]
    code, taken, added, between = "<", [], [], []
    for at, patch in places:
        if at != end:
            code += f"{at - end}s"
            taken.append(count + len(between))
            added.append(0)
            between.append(buffer[end:at])
        code += patch.code
        taken.append(patch.value)
        added.append(patch.added)
        end = start + struct.calcsize(code)
    pack, rest = struct.Struct(code).pack_into, tuple(between)
    if len(taken) == 1:
        index, more = taken[0], added[0]
        return lambda *values: pack(buffer, start, values[index] + more)
    take = itemgetter(*taken)
    if any(added):
        return lambda *values: pack(
            buffer, start, *[x + more if more else x for x, more in zip(take(values + rest), added)]
        )
    if taken == list(range(count)):
        # no frame of Python's
        return functools.partial(pack, buffer, start)
    return lambda *values: pack(buffer, start, *take(values + rest))


class SimLauncher:
    """Executes the launches from the kernel's PTX, as the ``simulating`` around the call says."""

    def __init__(self, kernel: CompiledKernel, template: Template, plan: Callable, touched: Touched) -> None:
        self.kernel, self.template, self._plan, self._touched = kernel, template, plan, touched

    def __call__(self, values: tuple, owners: tuple) -> None:
        from ..sim import GlobalMemory, Trace, run

        memory = GlobalMemory()
        for name, (tensor, writable) in self._touched(*owners).items():
            memory.add(tensor, name=name, writable=writable)
        active = simulation()
        kernel, template = self._what_runs(active)
        options = {"sm_count": architecture(kernel.arch).sm_count} | (active.options if active else {})
        traced = options.pop("trace", None)
        for launch in template.filled(values):
            trace = Trace() if traced is True else traced or None
            result = run(kernel.program, launch, memory, trace=trace, **options)
            if active:
                active.record(SimulatedLaunch(kernel, launch, result, trace))

    def fixed(self, values: tuple, owners: tuple) -> Callable[[], None]:
        """The call with these values."""
        return functools.partial(self, values, owners)

    def _what_runs(self, active: Simulation | None) -> tuple[CompiledKernel, Template]:
        """The kernel, or what ``simulating(kernel=…)`` wants instead: asked for once in its block."""
        if active is None or active.kernel is None:
            return self.kernel, self.template
        found = active.replaced.get(id(self))
        if found is None:
            other = active.kernel(self.kernel)
            template = self.template if other.host_ir == self.kernel.host_ir else self._plan(other)
            # this launcher is kept beside them so that its id stays its own
            found = active.replaced[id(self)] = other, template, self
        return found[:2]


class SessionLauncher:
    """Submits the launches to the simulated GPU of a session (``sim.session``)."""

    def __init__(self, kernel: CompiledKernel, template: Template, device: int, session: Any) -> None:
        self.kernel, self.template, self._device, self._session = kernel, template, device, session

    def __call__(self, values: tuple, owners: tuple) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for launch in self.template.filled(values):
            self._session.submit(self.kernel.program, dataclasses.replace(launch, stream=stream))

    def fixed(self, values: tuple, owners: tuple) -> Callable[[], None]:
        """The call with these values."""
        return functools.partial(self, values, owners)

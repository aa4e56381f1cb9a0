"""Launchers of a planned kernel: on a GPU, in the simulator, or on the simulated GPU of a session.

A launcher is made once for a plan, from the launches that the host function makes (:mod:`.template`). A call passes the
values that vary (addresses and a few numbers, in the order of the kernel's :class:`~.signature.Signature`) and the
objects that own the memory. Nothing above this file asks which backend runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from ..target import architecture
from . import driver
from .cache import CompiledKernel
from .simulating import SimulatedLaunch, Simulation, simulation
from .template import Patch, Template
from .torch_private import raw_stream

Tensors = Mapping[str, tuple[torch.Tensor, bool]]
"""Every tensor that a kernel may touch, by name, and whether it may write it."""
Touched = Callable[..., Tensors]
"""A function from the owners of a call's memory to its tensors; only the simulator calls it."""


class Launcher(Protocol):
    """Launches one planned kernel. kernel, template: what the launcher was made from."""

    kernel: CompiledKernel
    template: Template

    def __call__(self, values: tuple, owners: tuple) -> None:
        """Launches. values: the values that vary, in order. owners: the arguments of ``touched``; the caller keeps them
        alive."""

    def fixed(self, values: tuple, owners: tuple) -> Callable[[], None]:
        """A function that makes the call with these values, for a call that is repeated."""
        return functools.partial(self, values, owners)


class Slot(NamedTuple):
    """A place that a launch writes: element ``index`` of ``words`` becomes varying value ``value`` plus ``added``."""

    words: ctypes.Array
    index: int
    value: int
    added: int

    @classmethod
    def of(cls, buffer: ctypes.Array, at: int, patch: Patch) -> Slot:
        """The slot of ``patch``, at byte ``at`` of ``buffer``; parameters are aligned."""
        kind = {"Q": ctypes.c_uint64, "f": ctypes.c_float, "i": ctypes.c_int32}[patch.code]
        size = ctypes.sizeof(kind)
        return cls((kind * (len(buffer) // size)).from_buffer(buffer), at // size, patch.value, patch.added)

    def write(self, values: tuple) -> None:
        value = values[self.value]
        self.words[self.index] = value + self.added if self.added else value


class CudaLauncher(Launcher):
    """Launches by ``cuLaunchKernelEx``. It keeps the parameters; a call writes the varying values into them.

    It launches on torch's current stream of ``device``, whatever device is current. Threads take turns. of_values: the
    call without owners, for the fast path.
    """

    def __init__(self, kernel: CompiledKernel, template: Template, device: int) -> None:
        if device not in kernel.loaded:
            names = [launch.kernel for launch in template.launches]
            kernel.loaded[device] = driver.load(kernel.cubin, names, device, kernel.name)
        self.kernel, self.template, self._device = kernel, template, device
        slots, launch = self._parts()
        plain = [(slot.words, slot.index, slot.value) for slot in slots if not slot.added]
        moved = [slot for slot in slots if slot.added]
        lock = threading.Lock()
        # a with statement takes twice the time
        acquire, release = lock.acquire, lock.release
        written: tuple | None = None

        def call(values: tuple) -> None:
            nonlocal written
            acquire()
            try:
                if values is not written:
                    for words, index, value in plain:
                        words[index] = values[value]
                    for slot in moved:
                        slot.write(values)
                    written = values
                launch()
            finally:
                release()

        self.of_values = call

    def __call__(self, values: tuple, owners: tuple) -> None:
        self.of_values(values)

    def fixed(self, values: tuple, owners: tuple) -> Callable[[], None]:
        """The call with these values, with parameters of its own; later calls write only the stream."""
        slots, launch = self._parts()
        for slot in slots:
            slot.write(values)
        lock = threading.Lock()
        acquire, release = lock.acquire, lock.release

        def call() -> None:
            acquire()
            try:
                launch()
            finally:
                release()

        return call

    def _parts(self) -> tuple[list[Slot], Callable[[], None]]:
        """The slots of the varying values, and the function that launches."""
        loaded, device, name = self.kernel.loaded[self._device], self._device, self.kernel.name
        slots, prepared = [], []
        for number, launch in enumerate(self.template.launches):
            function = loaded[launch.kernel]
            packed = driver.PackedLaunch(launch, function)
            patches = [p for p in self.template.patches if p.launch == number]
            slots += [Slot.of(packed.buffer, function.offsets[p.param] + p.offset, p) for p in patches]
            prepared.append(packed)
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

        return slots, launch_anywhere if torch.cuda.device_count() > 1 else launch_here


class SimLauncher(Launcher):
    """Executes the launches from the kernel's PTX, as the surrounding ``simulating`` says."""

    def __init__(self, kernel: CompiledKernel, template: Template, plan: Callable, touched: Touched) -> None:
        self.kernel, self.template, self._plan, self._touched = kernel, template, plan, touched

    def __call__(self, values: tuple, owners: tuple) -> None:
        from ..sim import GlobalMemory, Trace, run
        from ..sim.observe.overlap import Overlap

        memory = GlobalMemory()
        for name, (tensor, writable) in self._touched(*owners).items():
            memory.add(tensor, name=name, writable=writable)
        active = simulation()
        kernel, template = self._what_runs(active)
        options = {"sm_count": architecture(kernel.arch).sm_count} | (active.options if active else {})
        traced = options.pop("trace", None)
        launches, others, overlap = list(template.filled(values)), options.pop("others", ()), Overlap()
        overlapping = any(launch.programmatic for launch in launches)
        for launch in launches:
            trace = Trace() if traced is True else traced or None
            if overlapping:
                earlier, touched = overlap.begin(launch, launch.title, memory)
                options |= {"earlier": earlier, "others": [*others, touched]}
            else:
                options["others"] = others
            result = run(kernel.program, launch, memory, trace=trace, **options)
            if active:
                active.record(SimulatedLaunch(kernel, launch, result, trace))

    def _what_runs(self, active: Simulation | None) -> tuple[CompiledKernel, Template]:
        """The kernel to run: this one, or the one that ``simulating(kernel=…)`` gives, which is asked once a block."""
        if active is None or active.kernel is None:
            return self.kernel, self.template
        found = active.replaced.get(id(self))
        if found is None:
            other = active.kernel(self.kernel)
            template = self.template if other.host_ir == self.kernel.host_ir else self._plan(other)
            # keep this launcher, too, so that no other object gets its id
            found = active.replaced[id(self)] = other, template, self
        return found[:2]


class SessionLauncher(Launcher):
    """Submits the launches to the simulated GPU of a session (``sim.session``)."""

    def __init__(self, kernel: CompiledKernel, template: Template, device: int, session: Any) -> None:
        self.kernel, self.template, self._device, self._session = kernel, template, device, session

    def __call__(self, values: tuple, owners: tuple) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for launch in self.template.filled(values):
            self._session.submit(self.kernel.program, dataclasses.replace(launch, stream=stream))

"""Running a compiled kernel: the same host code on a GPU or, with the launch captured, in the simulator.

``launcher(kernel, target)`` gives a callable that takes the host function's arguments as plain Python numbers
(pointers as addresses) in the order of its signature, described by ``ctypes`` types. Nothing above this file
asks which backend runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import CompileError
from ..target import Target
from .cache import CompiledKernel


class Launcher(Protocol):
    """Launches one compiled kernel."""

    def __call__(self, values: Sequence[Any], tensors: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
        """Runs the host function on ``values``; ``tensors`` names every tensor it may touch and whether it writes."""


def packed_arguments(types: Sequence[type], values: Sequence[Any]) -> tuple[ctypes.Structure, ctypes.Array]:
    """Lays out ``values`` and an array of pointers to them, as the DSL's packed host entry takes them."""
    struct, offsets = _layout(tuple(types))
    storage = struct(*values)
    base = ctypes.addressof(storage)
    return storage, (ctypes.c_void_p * len(offsets))(*[base + offset for offset in offsets])


_layouts: dict[tuple, tuple[type[ctypes.Structure], list[int]]] = {}


def _layout(types: tuple) -> tuple[type[ctypes.Structure], list[int]]:
    found = _layouts.get(types)
    if found is None:
        # the last slot is where the entry writes its cudaError_t
        fields = [(f"a{i}", t) for i, t in enumerate((*types, ctypes.c_int32))]
        struct = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
        found = _layouts[types] = struct, [getattr(struct, name).offset for name, _ in fields]
    return found


class CudaLauncher:
    """Runs the host code through the CUDA runtime, on the current device and the stream given as an argument."""

    def __init__(self, kernel: CompiledKernel, types: Sequence[type]) -> None:
        from cutlass._mlir import ir
        from cutlass._mlir.execution_engine import ExecutionEngine
        from cutlass.cutlass_dsl import CuTeDSL

        self._kernel, self._types = kernel, tuple(types)
        with ir.Context(), ir.Location.unknown():
            module = ir.Module.parse(kernel.host_ir)
            self._engine = ExecutionEngine(module, opt_level=2, shared_libs=CuTeDSL._get_dsl().get_shared_libs())
        self._library = ctypes.c_void_p()
        self._loaded: set[int] = set()
        self._call_host("cuda_init")
        address = self._engine.raw_lookup(kernel.entry)
        if not address:
            raise CompileError(f"kernel {kernel.name}: host function {kernel.entry} is missing from its module")
        self._entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def _call_host(self, symbol: str, *extra: int) -> None:
        """Calls ``symbol(cudaLibrary_t *library, int32 …extra)`` of the host module."""
        address = self._engine.raw_lookup(symbol)
        if not address:
            raise CompileError(f"kernel {self._kernel.name}: {symbol} is missing from its host module")
        types = [ctypes.c_void_p, *[ctypes.c_int32] * len(extra)]
        storage, pointers = packed_arguments(types, [ctypes.addressof(self._library), *extra])
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(pointers)
        _check(getattr(storage, f"a{len(types)}"), f"{symbol} of kernel {self._kernel.name}")

    def __call__(self, values: Sequence[Any], tensors: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
        device = torch.cuda.current_device()
        if device not in self._loaded:
            self._call_host("cuda_load_to_device", device)
            self._loaded.add(device)
        storage, pointers = packed_arguments(self._types, values)
        self._entry(pointers)
        status = getattr(storage, f"a{len(self._types)}")
        if status:
            _check(status, f"launch of kernel {self._kernel.name}")


def _check(status: int, what: str) -> None:
    if status:
        from cuda.bindings import runtime

        name = runtime.cudaGetErrorName(runtime.cudaError_t(status))[1]
        raise CompileError(f"{what} failed: {name.decode() if isinstance(name, bytes) else name} ({status})")


_options: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("options", default=None)


@contextlib.contextmanager
def simulating(**options: Any) -> Iterator[None]:
    """Within it, simulated launches run with these ``options`` of ``sim.run`` (schedule, checks, counters, …)."""
    token = _options.set({**(_options.get() or {}), **options})
    try:
        yield
    finally:
        _options.reset(token)


def counting_memory() -> contextlib.AbstractContextManager[None]:
    """Within it, simulated launches also count requests and sectors of memory (see ``SimLauncher.last_results``)."""
    return simulating(counters=True)


class SimLauncher:
    """Runs the host code with its launches captured, and executes the captured launches from the kernel's PTX."""

    def __init__(self, kernel: CompiledKernel, types: Sequence[type]) -> None:
        from ..sim import Program
        from ..sim.frontend.host import HostModule

        self._types = tuple(types)
        self._host = HostModule(kernel.host_ir, kernel.entry)
        self._program = Program.parse(kernel.ptx)
        self.last_results: list = []

    def __call__(self, values: Sequence[Any], tensors: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
        from ..sim import GlobalMemory, run

        memory = GlobalMemory()
        for name, (tensor, writable) in tensors.items():
            memory.add(tensor, name=name, writable=writable)
        launches = self._host.call([kind(value) for kind, value in zip(self._types, values)])
        options = _options.get() or {}
        self.last_results = [run(self._program, launch, memory, **options) for launch in launches]


_launchers: dict[tuple[int, str], tuple[CompiledKernel, Launcher]] = {}
_lock = threading.Lock()


def launcher(kernel: CompiledKernel, target: Target, types: Sequence[type]) -> Launcher:
    """The launcher of ``kernel`` on ``target.backend``, made once; ``types`` are the ctypes of the arguments."""
    key = (id(kernel), target.backend)
    found = _launchers.get(key)
    if found is None:
        with _lock:
            found = _launchers.get(key)
            if found is None:
                make = CudaLauncher if target.backend == "cuda" else SimLauncher
                # the kernel is kept beside its launcher so that its id stays its own
                found = _launchers[key] = kernel, make(kernel, types)
    return found[1]

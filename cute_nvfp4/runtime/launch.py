"""Running a compiled kernel: the same host code on a GPU or, with the launch captured, in the simulator.

A launcher takes the arguments of the host function as plain numbers, pointers as addresses, in the order of the
kernel's :class:`~.signature.Signature`. Nothing above this file asks which backend runs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import CompileError
from ..target import Target
from .cache import CompiledKernel
from .simulating import SimulatedLaunch, current_session, simulation

Tensors = Mapping[str, tuple[torch.Tensor, bool]]
"""Every tensor that a kernel may touch, by name, and whether it may write it."""


class Launcher(Protocol):
    """Launches one compiled kernel."""

    def __call__(self, values: Sequence[Any], tensors: Callable[[], Tensors]) -> None:
        """Runs the host function on ``values``; only the simulator asks for ``tensors``."""


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

    def __call__(self, values: Sequence[Any], tensors: Callable[[], Tensors]) -> None:
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


class SimLauncher:
    """Runs the host code with its launches captured, and executes the captured launches from the kernel's PTX."""

    def __init__(self, kernel: CompiledKernel, types: Sequence[type]) -> None:
        from ..sim import HostModule, Program

        self._kernel, self._types = kernel, tuple(types)
        self._host = HostModule(kernel.host_ir, kernel.entry)
        self._program = Program.parse(kernel.ptx)

    def __call__(self, values: Sequence[Any], tensors: Callable[[], Tensors]) -> None:
        from ..sim import GlobalMemory, Trace, run

        memory = GlobalMemory()
        for name, (tensor, writable) in tensors().items():
            memory.add(tensor, name=name, writable=writable)
        active = simulation()
        options = dict(active.options) if active else {}
        traced = options.pop("trace", None)
        for launch in self._host.call([kind(value) for kind, value in zip(self._types, values)]):
            trace = Trace() if traced is True else traced or None
            result = run(self._program, launch, memory, trace=trace, **options)
            if active:
                active.record(SimulatedLaunch(self._kernel, launch, result, trace))


class SessionLauncher:
    """Runs the host code as ``CudaLauncher`` does, on the simulated GPU of a session (``sim.session``)."""

    def __init__(self, kernel: CompiledKernel, types: Sequence[type], session: Any) -> None:
        from ..sim import HostModule, Program

        self._types, self._session = tuple(types), session
        self._host = HostModule(kernel.host_ir, kernel.entry, session.device)
        self._program = Program.parse(kernel.ptx)

    def __call__(self, values: Sequence[Any], tensors: Callable[[], Tensors]) -> None:
        arguments = [kind(value) for kind, value in zip(self._types, values)]
        submit = self._session.submit
        self._host.call_at([ctypes.addressof(a) for a in arguments], lambda launch: submit(self._program, launch))


_launchers: dict[tuple[int, str], tuple[CompiledKernel, Launcher]] = {}
_lock = threading.Lock()


def launcher(kernel: CompiledKernel, target: Target, types: Sequence[type]) -> Launcher:
    """The launcher of ``kernel`` on ``target.backend``, made once; ``types`` are the ctypes of the arguments."""
    active = simulation()
    if target.backend == "sim" and active is not None and active.kernel is not None:
        kernel = active.kernel(kernel)
    session = current_session() if target.backend == "cuda" else None
    # what belongs to a session goes with it
    kept = _launchers if session is None else session.kept
    key = (id(kernel), target.backend)
    found = kept.get(key)
    if found is None:
        with _lock:
            found = kept.get(key)
            if found is None:
                # the kernel is kept beside its launcher so that its id stays its own
                found = kept[key] = kernel, _make(kernel, target, types, session)
    return found[1]


def _make(kernel: CompiledKernel, target: Target, types: Sequence[type], session: Any) -> Launcher:
    if session is not None:
        return SessionLauncher(kernel, types, session)
    return CudaLauncher(kernel, types) if target.backend == "cuda" else SimLauncher(kernel, types)

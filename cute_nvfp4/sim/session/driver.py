"""The functions of ``cuda.bindings.driver`` and ``cuda.bindings.runtime`` in a session.

Every modelled function returns ``(status, value, …)`` as the real one does. The others raise ``TargetError`` with their
name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from cuda.bindings import driver, runtime

from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.host.device import DRIVER_VERSION
from cute_nvfp4.sim.session.order import Timeline
from cute_nvfp4.sim.session.patches import Patches
from cute_nvfp4.sim.session.runtime import Runtime

_OK, _BAD = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
_RUNTIME_OK, _RUNTIME_BAD = runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorInvalidValue
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
_CLUSTER = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


def install(patches: Patches, gpu: Runtime) -> None:
    """Replaces every function of both modules, by a model of it or by a function that raises."""
    _install(patches, driver, "cu", _driver(gpu))
    _install(patches, runtime, "cuda", _runtime(gpu))


def _install(patches: Patches, module: ModuleType, prefix: str, known: dict[str, Callable[..., Any]]) -> None:
    for name in dir(module):
        if not name.startswith(prefix) or isinstance(value := getattr(module, name), type) or not callable(value):
            continue
        patches.set(module, name, known.get(name) or _refusal(f"{module.__name__}.{name}"))


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise TargetError(f"{name} is not modelled in a simulated session")

    return refuse


def _driver(gpu: Runtime) -> dict[str, Callable[..., Any]]:
    return {
        **_devices(gpu),
        **_occupancy(gpu),
        **_streams(gpu, driver, "cu", _OK, ("CUstream", "CUevent", "CUgraph", "CUgraphExec")),
        **_blocks(gpu, "cu", _OK, _BAD, driver.CUdeviceptr),
        **{f"cuMemsetD{8 * n}{end}": _fill(gpu, f"u{n}", _OK) for n in (1, 2, 4) for end in ("", "Async")},
        **{f"cuMemcpy{way}{end}": _copy(gpu, _OK) for way in ("", "DtoD", "HtoD", "DtoH") for end in ("", "Async")},
        **_errors("cu", _OK, driver.CUresult),
    }


def _errors(p: str, ok: Any, kind: Callable[[int], Any]) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys((f"{p}GetErrorName", f"{p}GetErrorString"), lambda e: (ok, kind(int(e)).name.encode()))


def _done(ok: Any, *names: str) -> dict[str, Callable[..., Any]]:
    """Returns functions that do nothing and report success."""
    return dict.fromkeys(names, lambda *_: (ok,))


def _devices(gpu: Runtime) -> dict[str, Callable[..., Any]]:
    context = gpu.handle()

    def attribute(number: Any, device: Any) -> tuple:
        value = gpu.device.attribute(int(number))
        if value is None:
            raise TargetError(f"device attribute {number!r} is not modelled in a simulated session")
        return _OK, value

    def get(ordinal: int) -> tuple:
        found = 0 <= ordinal < gpu.count
        return (_OK, driver.CUdevice(ordinal)) if found else (driver.CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    return {
        **_done(_OK, "cuInit", "cuDevicePrimaryCtxRelease", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxDestroy"),
        "cuCtxSynchronize": lambda: (_OK, gpu.order.synchronize())[:1],
        "cuDriverGetVersion": lambda: (_OK, DRIVER_VERSION),
        "cuDeviceGet": get,
        "cuDeviceGetCount": lambda: (_OK, gpu.count),
        "cuDeviceGetName": lambda length, device: (_OK, gpu.device.name.encode()[: length - 1]),
        "cuDeviceGetAttribute": attribute,
        "cuDeviceTotalMem": lambda device: (_OK, gpu.device.memory_bytes),
        **dict.fromkeys(
            ("cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPopCurrent", "cuCtxCreate"),
            lambda *_: (_OK, driver.CUcontext(context)),
        ),
        "cuCtxGetDevice": lambda *a: (_OK, driver.CUdevice(gpu.current)),
    }


def _occupancy(gpu: Runtime) -> dict[str, Callable[..., Any]]:
    """Returns the functions for kernels and occupancy; every kernel is assumed to fill an SM with one CTA."""

    def clusters(kernel: Any, config: Any) -> tuple:
        dims = [a.value.clusterDim for a in config.attrs if a.id == _CLUSTER]
        size = dims[0].x * dims[0].y * dims[0].z if dims else 1
        gpu.say("max active clusters are modelled as multiprocessors // CTAs of a cluster")
        return _OK, gpu.device.max_active_clusters(size)

    return {
        "cuLibraryLoadData": lambda *a: (_OK, driver.CUlibrary(gpu.handle())),
        **_done(_OK, "cuLibraryUnload", "cuFuncSetAttribute", "cuKernelSetAttribute"),
        "cuLibraryEnumerateKernels": lambda n, library: (_OK, [driver.CUkernel(gpu.handle()) for _ in range(n)]),
        "cuKernelGetFunction": lambda kernel: (_OK, driver.CUfunction(int(kernel))),
        "cuOccupancyAvailableDynamicSMemPerBlock": lambda f, blocks, size: (_OK, gpu.device.shared_bytes),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda f, size, smem: (_OK, 1),
        "cuOccupancyMaxActiveClusters": clusters,
    }


def _streams(gpu: Runtime, module: ModuleType, p: str, ok: Any, types: tuple[str, ...]) -> dict[str, Callable]:
    """Returns the functions for streams, events, captures and graphs, with prefix ``p`` and handles of ``types``."""
    stream, event, graph, executable = (getattr(module, t) for t in types)

    def begin(s: Any, mode: Any = None) -> tuple:
        gpu.begin_capture(int(s))
        return (ok,)

    def launch(g: Any, s: Any) -> tuple:
        gpu.submit(int(s), lambda at: gpu.replay(int(g), at))
        return (ok,)

    def record(e: Any, s: Any = 0, *_: Any) -> tuple:
        gpu.record(int(e), int(s))
        return (ok,)

    def wait(s: Any, e: Any, *_: Any) -> tuple:
        gpu.wait(int(s), int(e))
        return (ok,)

    def synchronize(s: Any) -> tuple:
        gpu.order.synchronize(int(s))
        return (ok,)

    def synchronize_event(e: Any) -> tuple:
        gpu.order.synchronize_event(int(e))
        return (ok,)

    def create(flags: Any = 0, *_: Any) -> tuple:
        handle = gpu.handle()
        if not int(flags) & _NON_BLOCKING:
            gpu.order.blocking.add(handle)
        return ok, stream(handle)

    def nodes(g: Any, n: int = 0) -> tuple:
        return ok, [], len(gpu.graphs[int(g)])

    made = ("Create", "CreateWithPriority", "CreateWithFlags")
    return {
        **_done(ok, f"{p}StreamDestroy", f"{p}EventDestroy"),
        # a query answers that the work is done, so it orders what follows as a synchronize does
        **{f"{p}Stream{n}": synchronize for n in ("Synchronize", "Query")},
        **{f"{p}Event{n}": synchronize_event for n in ("Synchronize", "Query")},
        f"{p}StreamWaitEvent": wait,
        **{f"{p}Event{n}": record for n in ("Record", "RecordWithFlags")},
        **_done(ok, *(f"{p}Graph{n}" for n in ("Upload", "Destroy", "ExecDestroy"))),
        **{f"{p}Stream{n}": create for n in made},
        **{f"{p}Event{n}": lambda *a: (ok, event(gpu.handle())) for n in ("Create", "CreateWithFlags")},
        f"{p}EventElapsedTime": lambda a, b: (ok, gpu.elapsed(int(a), int(b))),
        f"{p}StreamBeginCapture": begin,
        f"{p}StreamEndCapture": lambda s: (ok, graph(gpu.end_capture(int(s)))),
        f"{p}GraphGetNodes": nodes,
        f"{p}GraphInstantiate": lambda g, *a: (ok, executable(int(g))),
        f"{p}GraphLaunch": launch,
    }


def _blocks(gpu: Runtime, p: str, ok: Any, bad: Any, pointer: Callable[[int], Any]) -> dict[str, Callable]:
    def allocate(size: int, *_: Any) -> tuple:
        return ok, pointer(gpu.memory.allocate(int(size), f"{p}Mem allocation of {int(size)} bytes"))

    def free(address: Any, *_: Any) -> tuple:
        return (ok,) if int(address) == 0 or gpu.memory.free(int(address)) else (bad,)

    names = ("MemAlloc", "MemAllocAsync") if p == "cu" else ("Malloc", "MallocAsync", "MallocManaged")
    frees = ("MemFree", "MemFreeAsync") if p == "cu" else ("Free", "FreeAsync")
    return {p + n: allocate for n in names} | {p + n: free for n in frees}


def _fill(gpu: Runtime, dtype: str, ok: Any) -> Callable[..., tuple]:
    """Returns a memset of elements of ``dtype``, which ignores the high bits of its value that do not fit."""
    size = np.dtype(dtype).itemsize

    def fill(address: Any, value: int, count: int, stream: Any = 0) -> tuple:
        def work(at: Timeline) -> None:
            gpu.streams.copied("a memset", at, 0, int(address), size * int(count))
            data = (ctypes.c_uint8 * (size * int(count))).from_address(int(address))
            np.frombuffer(data, dtype)[:] = int(value) & (1 << 8 * size) - 1

        gpu.submit(int(stream), work)
        return (ok,)

    return fill


def _address(value: Any) -> int:
    """Returns the address of a device pointer, an integer, or an object with the buffer protocol."""
    try:
        return int(value)
    except TypeError:
        return ctypes.addressof(ctypes.c_char.from_buffer(value))


def _copy(gpu: Runtime, ok: Any, kinds: int = 0) -> Callable[..., tuple]:
    """Returns a memcpy that has ``kinds`` (0 or 1) arguments between the size and the stream."""

    def copy(to: Any, source: Any, size: int, *rest: Any) -> tuple:
        stream = int(rest[kinds] if len(rest) > kinds else 0)

        def work(at: Timeline) -> None:
            read, written = _address(source), _address(to)
            gpu.streams.copied("a memcpy", at, read, written, int(size))
            ctypes.memmove(written, read, int(size))

        gpu.submit(stream, work)
        known = [gpu.memory.uses_at(_address(at)) is not None for at in (to, source)]
        if not all(known) and stream not in gpu.captures:  # the host waits for pageable memory
            gpu.order.synchronize(stream)
        return (ok,)

    return copy


def _runtime(gpu: Runtime) -> dict[str, Callable[..., Any]]:
    def attribute(number: Any, device: int) -> tuple:
        return _RUNTIME_OK, _devices(gpu)["cuDeviceGetAttribute"](number, device)[1]

    def set_device(ordinal: int) -> tuple:
        if not 0 <= ordinal < gpu.count:
            return (runtime.cudaError_t.cudaErrorInvalidDevice,)
        gpu.current = ordinal
        return (_RUNTIME_OK,)

    return {
        **_streams(
            gpu, runtime, "cuda", _RUNTIME_OK, ("cudaStream_t", "cudaEvent_t", "cudaGraph_t", "cudaGraphExec_t")
        ),
        **_blocks(gpu, "cuda", _RUNTIME_OK, _RUNTIME_BAD, int),
        **dict.fromkeys(("cudaMemset", "cudaMemsetAsync"), _fill(gpu, "u1", _RUNTIME_OK)),
        **dict.fromkeys(("cudaMemcpy", "cudaMemcpyAsync"), _copy(gpu, _RUNTIME_OK, 1)),
        "cudaDeviceGetAttribute": attribute,
        "cudaGetDeviceCount": lambda: (_RUNTIME_OK, gpu.count),
        "cudaGetDevice": lambda: (_RUNTIME_OK, gpu.current),
        "cudaSetDevice": set_device,
        **_done(_RUNTIME_OK, "cudaGetLastError", "cudaPeekAtLastError"),
        "cudaDeviceSynchronize": lambda: (_RUNTIME_OK, gpu.order.synchronize())[:1],
        **_done(_RUNTIME_OK, "cudaProfilerStart", "cudaProfilerStop"),
        **dict.fromkeys(("cudaDriverGetVersion", "cudaRuntimeGetVersion"), lambda: (_RUNTIME_OK, DRIVER_VERSION)),
        **_errors("cuda", _RUNTIME_OK, runtime.cudaError_t),
    }

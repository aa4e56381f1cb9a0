"""The CUDA driver, as far as a launch needs it: the kernels of a cubin, and ``cuLaunchKernelEx``.

Work that is done once goes through ``cuda.bindings``. A launch goes through ctypes, with arguments that are laid out
once: on the host of an H200 that takes a third of the time of building a ``CUlaunchConfig`` in each call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import CompileError

if TYPE_CHECKING:
    from ..sim.machine.launch import Launch

_INVALID_CONTEXT = 201
# CU_LAUNCH_PARAM_BUFFER_POINTER and so on: a buffer of all parameters costs less than a pointer to each
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0


class Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = [("id", ctypes.c_int32), ("pad", ctypes.c_int32), ("value", ctypes.c_uint8 * 64)]


class Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint32),
    ]


class Function(NamedTuple):
    """A kernel that is loaded on a device: the driver's handle, and the offset of each parameter in their buffer."""

    handle: int
    offsets: tuple[int, ...]


class PackedLaunch:
    """A launch, laid out for ``cuLaunchKernelEx``.

    buffer: the parameters. config: the configuration; each call writes its stream. arguments: those of the function.
    """

    def __init__(self, launch: Launch, function: Function) -> None:
        size = max([offset + len(param) for offset, param in zip(function.offsets, launch.params)], default=0)
        self.buffer = ctypes.create_string_buffer(max(1, size))
        for offset, param in zip(function.offsets, launch.params):
            self.buffer[offset : offset + len(param)] = param
        # an attribute whose bytes are 0 asks for nothing
        wanted = [(number, value) for number, value in launch.attributes if any(value)]
        attributes = (Attribute * max(1, len(wanted)))()
        for attribute, (number, value) in zip(attributes, wanted):
            attribute.id, attribute.value = number, (ctypes.c_uint8 * 64)(*value)
        sizes = (ctypes.c_uint32 * 3)(*launch.grid), (ctypes.c_uint32 * 3)(*launch.block)
        self.config = Config(*sizes, launch.dynamic_smem, None, attributes, len(wanted))
        self._size = ctypes.c_size_t(size)
        extra = (_BUFFER_POINTER, ctypes.addressof(self.buffer), _BUFFER_SIZE, ctypes.addressof(self._size), _END)
        self._extra = (ctypes.c_void_p * 5)(*extra)
        self.arguments = ctypes.addressof(self.config), function.handle, None, ctypes.addressof(self._extra)


@functools.lru_cache(maxsize=1)
def launch_function() -> Any:
    """``cuLaunchKernelEx(config, function, parameters, extra)``, with addresses as numbers; releases the GIL."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes, function.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
    return function


def check(status: Any, what: str) -> None:
    """Raises ``CompileError`` for a ``CUresult`` other than success."""
    from cuda.bindings import driver

    if int(status):
        name = driver.cuGetErrorName(driver.CUresult(int(status)))[1]
        raise CompileError(f"{what} failed: {name.decode() if isinstance(name, bytes) else name} ({int(status)})")


def retry(status: int, arguments: tuple, device: int, name: str) -> None:
    """Handles a failed launch: makes a context on a thread that torch has not used yet; other failures are errors."""
    if status == _INVALID_CONTEXT:
        with context_of(device):
            status = launch_function()(*arguments)
    check(status, f"launch of kernel {name}")


@contextmanager
def context_of(device: int) -> Iterator[None]:
    """Makes the primary context of ``device`` current on this thread, even if torch has made none yet."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()
        yield


def load(cubin: bytes, names: Iterable[str], device: int, title: str) -> dict[str, Function]:
    """Loads the kernels ``names`` of ``cubin`` on ``device``, and allows them all shared memory and large clusters.

    Raises:
        CompileError: the driver refuses the cubin, or a stream is being captured, which loading would break.
    """
    if torch.cuda.is_current_stream_capturing():
        raise CompileError(
            f"kernel {title} is not loaded on cuda:{device} yet, and loading it would break the CUDA graph that is "
            "being captured. Make the same call once before the capture (warm up)."
        )
    # the driver gives a function's handle for the context that is current at that time
    with context_of(device):
        return _loaded(cubin, names, device, title)


def _loaded(cubin: bytes, names: Iterable[str], device: int, title: str) -> dict[str, Function]:
    """Does what ``load`` does, with the context of ``device`` current."""
    from cuda.bindings import driver

    status, library = driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
    check(status, f"loading kernel {title} on cuda:{device}")
    status, most = driver.cuDeviceGetAttribute(
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device
    )
    check(status, "asking for the shared memory of a CTA")
    attribute, found = driver.CUfunction_attribute, {}
    for name in names:
        status, kernel = driver.cuLibraryGetKernel(library, name.encode())
        check(status, f"finding {name}")
        status, static = driver.cuKernelGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, device)
        check(status, f"asking for the shared memory of {name}")
        wanted = {
            attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: most - static,
            attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: 1,
        }
        for what, value in wanted.items():
            check(driver.cuKernelSetAttribute(what, value, kernel, device)[0], f"setting {what.name} of {name}")
        # this loads the code now, because the first launch might be captured
        status, function = driver.cuKernelGetFunction(kernel)
        check(status, f"loading {name} on cuda:{device}")
        found[name] = Function(int(function), _offsets(kernel))
    return found


def _offsets(kernel: Any) -> tuple[int, ...]:
    """The offset of each of the kernel's parameters in a buffer of them."""
    from cuda.bindings import driver

    found: list[int] = []
    while True:
        # the driver returns an error for the index after the last
        status, offset, _ = driver.cuKernelGetParamInfo(kernel, len(found))
        if int(status):
            return tuple(found)
        found.append(int(offset))

"""The CUDA driver, as a launch needs it: a cubin's kernels, and ``cuLaunchKernelEx``.

Everything that happens once goes through ``cuda.bindings``. The launch goes through ctypes, with arguments that are
laid out once: on an H200's host that takes a third of the time of building a ``CUlaunchConfig`` for each call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CompileError

if TYPE_CHECKING:
    from ..sim.machine.launch import Launch

INVALID_CONTEXT = 201


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


def config_of(launch: Launch) -> Config:
    """The configuration of ``launch``; its stream is written by each call."""
    attributes = (Attribute * max(1, len(launch.attributes)))()
    for place, (number, value) in zip(attributes, launch.attributes):
        place.id, place.value = number, (ctypes.c_uint8 * 64)(*value)
    sizes = (ctypes.c_uint32 * 3)(*launch.grid), (ctypes.c_uint32 * 3)(*launch.block)
    return Config(*sizes, launch.dynamic_smem, None, attributes, len(launch.attributes))


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


def bind_context(device: int) -> None:
    """Makes the primary context of ``device`` current on this thread, where torch has not done so yet."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()


def load(cubin: bytes, names: Iterable[str], device: int, title: str) -> dict[str, int]:
    """The kernels ``names`` of ``cubin``, loaded on ``device`` and allowed its shared memory and large clusters.

    Raises:
        CompileError: the driver does not take the cubin, or a stream is being captured, which loading would break.
    """
    from cuda.bindings import driver

    if torch.cuda.is_current_stream_capturing():
        raise CompileError(
            f"kernel {title} is not loaded on cuda:{device} yet, and loading it would break the CUDA graph that is "
            "being captured. Make the same call once before the capture (warm up)."
        )
    bind_context(device)
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
        # loads the code now: the first launch might be captured
        status, _ = driver.cuKernelGetFunction(kernel)
        check(status, f"loading {name} on cuda:{device}")
        found[name] = int(kernel)
    return found

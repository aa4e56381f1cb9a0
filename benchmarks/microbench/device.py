"""Compiles CUDA C++ by NVRTC, loads it, and launches its kernels, beside torch in the same context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from cuda.bindings import driver, nvrtc

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", f"--include-path={Path(__file__).resolve().parent}")


def checked(answer: tuple) -> object:
    """The results of a call of cuda.bindings; raises RuntimeError with the name of what went wrong."""
    error, *results = answer
    if int(error) != 0:
        raise RuntimeError(f"{error}")
    return results[0] if len(results) == 1 else results


def compile_ptx(source: str) -> str:
    """The PTX of ``source``; needs no GPU."""
    program = _compiled(source, (OPTIONS[0].replace("sm_", "compute_"), *OPTIONS[1:]))
    ptx = b" " * checked(nvrtc.nvrtcGetPTXSize(program))
    checked(nvrtc.nvrtcGetPTX(program, ptx))
    return ptx.decode().rstrip("\0")


def compile_source(source: str) -> bytes:
    """The cubin of ``source``."""
    program = _compiled(source, OPTIONS)
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _compiled(source: str, options: Sequence[str]) -> object:
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"microbench.cu", 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(status) != 0:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    return program


class Module:
    """The kernels of one source."""

    def __init__(self, source: str) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self._image = compile_source(source)
        self._module = checked(driver.cuModuleLoadData(self._image))
        self._functions: dict[str, object] = {}

    def function(self, name: str, shared: int = 0) -> object:
        if name not in self._functions:
            self._functions[name] = checked(driver.cuModuleGetFunction(self._module, name.encode()))
        function = self._functions[name]
        if shared > 48 << 10:
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, most, shared))
        return function

    def launch(
        self, name: str, grid: int, block: int, arguments: Sequence[object], shared: int = 0, cluster: int = 1
    ) -> None:
        """Launches on torch's stream. An argument is a tensor (its address), an int (32 bits), or bytes (by value,
        64-byte aligned, such as a tensor map)."""
        function = self.function(name, shared)
        kept, addresses = [], []
        for value in arguments:
            if isinstance(value, torch.Tensor):
                kept.append(ctypes.c_void_p(value.data_ptr()))
            elif isinstance(value, bytes):
                kept.append(aligned(value))
            else:
                kept.append(ctypes.c_int(value))
            addresses.append(ctypes.addressof(kept[-1]))
        table = (ctypes.c_void_p * len(addresses))(*addresses)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = shared, torch.cuda.current_stream().cuda_stream
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
            config.attrs, config.numAttrs = [attribute], 1
        checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(table), 0))


def aligned(value: bytes) -> ctypes.Array:
    """``value`` in memory that starts at a multiple of 64."""
    room = (ctypes.c_char * (len(value) + 64))()
    at = -ctypes.addressof(room) % 64
    part = (ctypes.c_char * len(value)).from_buffer(room, at)
    part.raw = value
    return part


def tensor_map(tensor: torch.Tensor, box: tuple[int, int], promotion: int = 0) -> bytes:
    """The tensor map of a 2-D row-major 16-bit ``tensor`` for boxes of ``box`` (rows, columns), in 128-byte swizzle; L2
    fetches ``promotion`` bytes (0, 64, 128, 256) at least."""
    rows, columns = tensor.shape
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    made = checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            tensor.data_ptr(),
            [u64(columns), u64(rows)],
            [u64(tensor.stride(0) * 2)],
            [u32(box[1]), u32(box[0])],
            [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion((0, 64, 128, 256).index(promotion)),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(made.getPtr(), 128)

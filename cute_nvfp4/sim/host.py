"""Runs the DSL's compiled host code for real, and captures the launches it makes.

The host side of a ``cute.compile`` result is an MLIR module in the LLVM dialect. It is compiled again here with no
CUDA runtime library; the dozen runtime entry points it calls are Python callbacks. What user code does on the host
(grid arithmetic, packing of parameters, building of TMA descriptors) is thus executed, not modelled.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cute_nvfp4.sim.cubin import elf_at, parameter_sizes
from cute_nvfp4.sim.errors import LaunchError

_I, _P, _U64 = ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64
_SIGNATURES: dict[str, tuple] = {
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": (_P, _P, _I, _U64),
    "_cudaLaunchKernelEx": (_P, _P, _P),
    "_cudaLaunchKernel": (_P, _I, _I, _I, _I, _I, _I, _P, _U64, _P),
    "_cudaLibraryLoadData": (_P, _P, _P, _P, _I, _P, _P, _I),
    "_cuKernelGetAttribute": (_P, _I, _P, _I),
    "_cudaDeviceGetAttribute": (_P, _I, _I),
    "_cudaGetDevice": (_P,),
    "_cudaKernelSetAttributeForDevice": (_P, _I, _I, _I),
    "_cudaFuncSetAttribute": (_P, _I, _I),
    "_cudaLibraryGetKernel": (_P, _P, _P),
}
#: cudaDeviceAttr -> value: shared memory a block may opt in to, SM count, capability (of a B200, or a stand-in for any)
_DEVICE_ATTRIBUTES = {
    97: 232448,
    16: 148,
    75: 10,
    76: 0,
    1: 1024,
    10: 32,
    8: 49152,
    81: 233472,
    39: 2048,
    106: 32,
    95: 1,
}
_CLUSTER, _COOPERATIVE, _PROGRAMMATIC = 4, 2, 6


@dataclass(frozen=True)
class Launch:
    """One captured launch.

    ``grid``, ``block`` and ``cluster`` are (x, y, z); ``dynamic_smem`` is in bytes; ``params`` holds a copy of the
    bytes of each kernel parameter as they were when the launch was made.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: tuple[bytes, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_smem: int = 0
    cooperative: bool = False
    programmatic: bool = False
    stream: int = 0


class HostModule:
    """The host half of a compiled DSL function.

    ``host_ir`` is ``str(compiled.ir_module)``, ``entry`` is ``compiled.function_name``. Building one costs some 10
    ms; keep it. Raises ``LaunchError`` when the module does not have the shape that nvidia-cutlass-dsl 4.8 gives it.
    """

    def __init__(self, host_ir: str, entry: str) -> None:
        from cutlass._mlir import ir
        from cutlass._mlir.execution_engine import ExecutionEngine

        self.entry = entry
        self._error: BaseException | None = None
        self._launches: list[Launch] = []
        self._sizes: dict[str, list[int]] = {}
        self._kernels: dict[int, str] = {}
        self._names: list[ctypes.Array] = []
        with ir.Context():
            self._module = ir.Module.parse(host_ir)
            self._engine = ExecutionEngine(self._module, opt_level=2, shared_libs=[])
        self._callbacks = []
        for name, types in _SIGNATURES.items():
            callback = ctypes.CFUNCTYPE(_I, *types)(self._guarded(getattr(self, "_on" + name)))
            self._callbacks.append(callback)
            self._engine.raw_register_runtime(name, ctypes.cast(callback, _P))
        self._library = _P()
        if "@cuda_init(" in host_ir:
            self._invoke("cuda_init", [ctypes.pointer(self._library)])
            self._invoke("cuda_load_to_device", [ctypes.pointer(self._library), _I(0)])

    def call(self, args: Sequence[Any]) -> list[Launch]:
        """Runs the host entry with ``args`` (ctypes objects, one an argument of the compiled function) and returns
        its launches."""
        self._launches = []
        self._invoke(self.entry, list(args))
        return self._launches

    def _invoke(self, name: str, args: list[Any]) -> None:
        function = self._engine.raw_lookup(name) or self._engine.raw_lookup("_mlir_ciface_" + name)
        if not function:
            raise LaunchError(f"the host module has no function {name!r}")
        result = _I(0)
        pointers = (_P * (len(args) + 1))(*[ctypes.addressof(a) for a in args], ctypes.addressof(result))
        self._error = None
        ctypes.CFUNCTYPE(None, _P)(function)(ctypes.cast(pointers, _P))
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if result.value:
            raise LaunchError(f"the host function {name!r} returned CUDA error {result.value}")

    def _guarded(self, method: Callable[..., None]) -> Callable[..., int]:
        """A ctypes callback must not raise: the first exception is kept and raised again by ``_invoke``."""

        def callback(*args: Any) -> int:
            try:
                method(*args)
            except BaseException as error:
                self._error = self._error or error
                return 1
            return 0

        return callback

    def _on_cudaLibraryLoadData(self, library, code, *_: Any) -> None:
        self._sizes.update(parameter_sizes(elf_at(code)))
        _write(_P, library, 1)

    def _on_cudaLibraryGetKernel(self, kernel, library, name) -> None:
        text = ctypes.string_at(name).decode()
        handle = ctypes.create_string_buffer(text.encode())
        self._names.append(handle)
        self._kernels[ctypes.addressof(handle)] = text
        _write(_P, kernel, ctypes.addressof(handle))

    def _on_cudaDeviceGetAttribute(self, out, attribute, device) -> None:
        if attribute not in _DEVICE_ATTRIBUTES:
            raise LaunchError(f"the host code asks for device attribute {attribute}, which is not modelled")
        _write(_I, out, _DEVICE_ATTRIBUTES[attribute])

    def _on_cuKernelGetAttribute(self, out, attribute, kernel, device) -> None:
        _write(_I, out, 0)

    def _on_cudaGetDevice(self, out) -> None:
        _write(_I, out, 0)

    def _on_cudaKernelSetAttributeForDevice(self, *_: Any) -> None:
        """Shared-memory and cluster limits: nothing to do."""

    def _on_cudaFuncSetAttribute(self, *_: Any) -> None:
        """Shared-memory and cluster limits: nothing to do."""

    def _on_cudaOccupancyMaxActiveBlocksPerMultiprocessor(self, out, *_: Any) -> None:
        _write(_I, out, 1)

    def _on_cudaLaunchKernel(self, kernel, gx, gy, gz, bx, by, bz, params, smem, stream) -> None:
        self._capture(kernel, (gx, gy, gz), (bx, by, bz), smem, stream, params, {})

    def _on_cudaLaunchKernelEx(self, config, kernel, params) -> None:
        # cudaLaunchConfig_t: u32 grid[3], u32 block[3], u64 smem, stream, attributes, i32 count
        gx, gy, gz, bx, by, bz, smem, stream, attrs, count = struct.unpack("<6IQQQi", ctypes.string_at(config, 52))
        attributes = {}
        for i in range(count):
            raw = ctypes.string_at(attrs + 72 * i, 72)
            attributes[struct.unpack_from("<i", raw)[0]] = raw[8:]
        self._capture(kernel, (gx, gy, gz), (bx, by, bz), smem, stream, params, attributes)

    def _capture(self, kernel, grid, block, smem, stream, params, attributes) -> None:
        if kernel not in self._kernels:
            raise LaunchError(f"a launch of an unknown kernel handle {kernel!r}")
        name = self._kernels[kernel]
        if min(*grid, *block) < 1 or block[0] * block[1] * block[2] > 1024:
            raise LaunchError(
                f"{name}: grid {grid} and block {block}: every extent must be at least 1, a block at most 1024 threads"
            )
        sizes = self._sizes.get(name, [])
        pointers = (_P * len(sizes)).from_address(params) if sizes else ()
        copies = tuple(ctypes.string_at(p, n) for p, n in zip(pointers, sizes))
        cluster = struct.unpack_from("<3I", attributes[_CLUSTER]) if _CLUSTER in attributes else (1, 1, 1)
        flag = {k: bool(struct.unpack_from("<i", attributes[k])[0]) if k in attributes else False for k in (2, 6)}
        self._launches.append(
            Launch(name, grid, block, copies, cluster, smem, flag[_COOPERATIVE], flag[_PROGRAMMATIC], stream or 0)
        )


def _write(kind: Any, address: int, value: int) -> None:
    kind.from_address(address).value = value

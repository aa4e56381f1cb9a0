"""Runs the DSL's compiled host code, and captures the launches that it makes.

The host side of a ``cute.compile`` result is an MLIR module in the LLVM dialect. It is compiled here again without a
CUDA runtime library; the runtime functions that it calls are Python callbacks. So user code on the host (grid
arithmetic, packing of parameters, building of TMA descriptors) is executed, not modelled.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

from cute_nvfp4.sim.errors import LaunchError
from cute_nvfp4.sim.frontend.model import clipped
from cute_nvfp4.sim.host.cubin import elf_at, parameter_sizes, register_counts
from cute_nvfp4.sim.host.device import DEFAULT_ARCH, DEVICES, Device
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.tma.encode import encode_im2col, encode_tiled

_I, _P, _U64 = ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64
_TYPES = {"!llvm.ptr": _P, "i32": _I, "i64": _U64, "f32": ctypes.c_float}
_DECLARATION = re.compile(
    r"^ *llvm\.func (?:\w+ )?@(_cu\w+|cuda_dialect_\w+)\(([^()]*)\)(?: -> (\S+))?(?!.*\{$)", re.MULTILINE
)
_LONG = 1100
"""The lines above which host code is optimized before it is compiled. It runs a few times for each plan, so that short
code is not worth it; but the time to compile grows with the cube of the length: that of a list of sixteen groups, of
6000 lines, takes 17 s without optimization, and half a second with it."""
_CLUSTER, _COOPERATIVE, _PROGRAMMATIC = 4, 2, 6
#: the cudaLaunchAttributeIDs that change no result here: policies of access, synchronization and cluster scheduling,
#: events, priority, memory domains, carve-out, and the preferred cluster (a wish beside the cluster that is granted)
_HARMLESS = {0, 1, 3, 5, 7, 8, 9, 10, 11, 12, 14, 16, 17}

#: the number of meaningful bytes of an attribute's value, if not four: the DSL does not initialise the others
_ATTRIBUTE_BYTES = {_CLUSTER: 12, 11: 12, 1: 32, 7: 16, 12: 16}


def _symbol(operation: Any) -> str:
    """The name that an operation of a module defines; "" if it defines none."""
    attributes = operation.attributes
    return attributes["sym_name"].value if "sym_name" in attributes else ""


class HostModule:
    """The host half of a compiled DSL function.

    ``host_ir`` is ``str(compiled.ir_module)``, ``entry`` is ``compiled.function_name``, and ``device`` is the GPU whose
    properties the code sees, by default that of ``DEFAULT_ARCH``. Building a module takes about 10 ms, so keep it.
    Raises ``LaunchError`` if the module does not have the form that nvidia-cutlass-dsl 4.8 gives it.
    """

    def __init__(self, host_ir: str, entry: str, device: Device | None = None) -> None:
        from cutlass._mlir import ir
        from cutlass._mlir.execution_engine import ExecutionEngine

        self.entry, self.device = entry, device or DEVICES[DEFAULT_ARCH]
        self._error: BaseException | None = None
        self._take: Callable[[Launch], None] = lambda launch: None
        self._cubin = b""
        self._registers: dict[str, int] = {}
        self._sizes: dict[str, list[int]] = {}
        self._kernels: dict[int, str] = {}
        self._names: list[ctypes.Array] = []
        with ir.Context() as context:
            # one thread pool for each context, as long as its module lives, would exhaust the threads of a machine
            context.enable_multithreading(False)
            self._module = ir.Module.parse(host_ir)
            for operation in list(self._module.body.operations):
                if _symbol(operation) == "cuda_load":  # of all devices: nobody calls it, and to compile it takes long
                    operation.operation.erase()
            level = int(host_ir.count("\n") > _LONG)
            self._engine = ExecutionEngine(self._module, opt_level=level, shared_libs=[])
        self._callbacks = [self._register(*found) for found in set(_DECLARATION.findall(host_ir))]
        self._library = _P()
        if "@cuda_init(" in host_ir:
            pointer, ordinal = ctypes.pointer(self._library), _I(0)
            self._invoke("cuda_init", [ctypes.addressof(pointer)])
            self._invoke("cuda_load_to_device", [ctypes.addressof(pointer), ctypes.addressof(ordinal)])

    def _register(self, name: str, parameters: str, result: str) -> Any:
        """Gives the host code a callback for a runtime function that it declares. A function that is not modelled
        raises ``LaunchError`` when it is called."""
        given = [t for t in parameters.split(", ") if t]
        if result not in ("i32", "") or any(t not in _TYPES for t in given):
            raise LaunchError(f"the host code declares {name}({parameters}) -> {result or 'nothing'}: not understood")
        method = getattr(self, "_on" + name, None) or self._not_modelled(name)
        callback = ctypes.CFUNCTYPE(_I if result else None, *[_TYPES[t] for t in given])(self._guarded(method))
        self._engine.raw_register_runtime(name, ctypes.cast(callback, _P))
        return callback

    def _not_modelled(self, name: str) -> Callable[..., None]:
        def refuse(*args: Any) -> None:
            raise LaunchError(f"the host code calls {name.removeprefix('_')}, which is not modelled")

        return refuse

    def call(self, args: Sequence[Any]) -> list[Launch]:
        """Runs the host entry with ``args`` (a ctypes object for each argument of the compiled function), and returns
        its launches."""
        launches: list[Launch] = []
        self.call_at([ctypes.addressof(a) for a in args], launches.append)
        return launches

    def call_at(self, addresses: Sequence[int], take: Callable[[Launch], None]) -> None:
        """Runs the host entry on the arguments at ``addresses``, and calls ``take`` with each launch when the host code
        makes it. What ``take`` raises is raised here."""
        before, self._take = self._take, take
        try:
            self._invoke(self.entry, addresses)
        finally:
            self._take = before

    def _invoke(self, name: str, addresses: Sequence[int]) -> None:
        function = self._engine.raw_lookup(name) or self._engine.raw_lookup("_mlir_ciface_" + name)
        if not function:
            raise LaunchError(f"the host module has no function {name!r}")
        result = _I(0)
        pointers = (_P * (len(addresses) + 1))(*addresses, ctypes.addressof(result))
        self._error = None
        ctypes.CFUNCTYPE(None, _P)(function)(ctypes.cast(pointers, _P))
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if result.value:
            raise LaunchError(f"the host function {name!r} returned CUDA error {result.value}")

    def _guarded(self, method: Callable[..., None]) -> Callable[..., int]:
        """Returns a callback that never raises, because ctypes callbacks must not. ``_invoke`` raises the first
        exception again; later callbacks do nothing, because not all host code tests the returned error."""

        def callback(*args: Any) -> int:
            if self._error is not None:
                return 1
            try:
                method(*args)
            except BaseException as error:
                self._error = error
                return 1
            return 0

        return callback

    def _on_cudaLibraryLoadData(self, library, code, *_: Any) -> None:
        self._cubin = elf_at(code)
        self._sizes.update(parameter_sizes(self._cubin))
        self._registers.update(register_counts(self._cubin))
        _write(_P, library, 1)

    def _on_cudaLibraryGetKernel(self, kernel, library, name) -> None:
        text = ctypes.string_at(name).decode()
        handle = ctypes.create_string_buffer(text.encode())
        self._names.append(handle)
        self._kernels[ctypes.addressof(handle)] = text
        _write(_P, kernel, ctypes.addressof(handle))

    def _on_cudaDeviceGetAttribute(self, out, attribute, device) -> None:
        value = self.device.attribute(attribute)
        if value is None:
            raise LaunchError(f"the host code asks for device attribute {attribute}, which is not modelled")
        _write(_I, out, value)

    def _on_cudaGetDevice(self, out, *_: Any) -> None:
        _write(_I, out, 0)

    _on_cuKernelGetAttribute = _on_cudaGetDevice

    def _nothing_to_do(self, *_: Any) -> None:
        """Ignores limits of shared memory and clusters, and waits: a launch has ended before other host code runs."""

    _on_cudaKernelSetAttributeForDevice = _on_cudaFuncSetAttribute = _nothing_to_do
    _on_cudaDeviceSynchronize = _on_cudaStreamSynchronize = _nothing_to_do

    def _on_cudaMemset(self, address, value, size, stream=None) -> None:
        ctypes.memset(address, value, size)

    _on_cudaMemsetAsync = _on_cudaMemset

    def _oncuda_dialect_assert_success(self, status) -> None:
        if status:
            raise LaunchError(f"the host code stops because of CUDA error {status}")

    def _on_cuTensorMapEncodeTiled(self, out, *arguments) -> None:
        ctypes.memmove(out, encode_tiled(*arguments, sm=self.device.sm), 128)

    def _on_cuTensorMapEncodeIm2col(self, out, *arguments) -> None:
        ctypes.memmove(out, encode_im2col(*arguments, sm=self.device.sm), 128)

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
                f"{clipped(name)}: grid {grid} and block {block}: "
                "every extent must be at least 1, a block at most 1024 threads"
            )
        sizes = self._sizes.get(name, [])
        pointers = (_P * len(sizes)).from_address(params) if sizes else ()
        copies = tuple(ctypes.string_at(p, n) for p, n in zip(pointers, sizes))
        cluster = struct.unpack_from("<3I", attributes[_CLUSTER]) if _CLUSTER in attributes else (1, 1, 1)
        flag = {k: bool(struct.unpack_from("<i", attributes[k])[0]) if k in attributes else False for k in (2, 6)}
        unknown = sorted(attributes.keys() - _HARMLESS - {_CLUSTER, _COOPERATIVE, _PROGRAMMATIC})
        if unknown:
            raise LaunchError(f"{clipped(name)} is launched with attributes {unknown}, which are not modelled")
        how = flag[_COOPERATIVE], flag[_PROGRAMMATIC], stream or 0
        values = tuple((k, raw[: _ATTRIBUTE_BYTES.get(k, 4)]) for k, raw in attributes.items())
        compiled = self._cubin, self._registers.get(name, 0)
        self._take(Launch(name, grid, block, copies, cluster, smem, *how, values, *compiled))


def _write(kind: Any, address: int, value: int) -> None:
    kind.from_address(address).value = value

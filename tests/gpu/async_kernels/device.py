"""The CUDA driver, by ctypes: as much of it as launching PTX needs."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

import numpy as np

from .case import Case, Pointer, Scalar, TensorMap
from .descriptor import KINDS

_ALIGN = 512
_CLUSTER_DIMENSION, _PROGRAMMATIC = 4, 6


class DriverError(RuntimeError):
    """A call that the driver refused; ``code`` is its CUresult."""

    def __init__(self, call: str, code: int, log: str = "") -> None:
        super().__init__(f"{call}: CUDA error {code} {log}".strip())
        self.code = code


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("smem", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    ]


class Device:
    """Device 0, with an arena for the buffers of one launch at a time."""

    def __init__(self, arena: int = 1 << 22) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", c_uint(0))
        device, context, self.base = c_int(), c_void_p(), c_uint64()
        self.call("cuDeviceGet", byref(device), c_int(0))
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", byref(self.base), c_size_t(arena))
        self.arena = arena

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise DriverError(name, code)

    def about(self) -> dict:
        """What this machine is."""
        name, version, values = ctypes.create_string_buffer(100), c_int(), []
        self.call("cuDeviceGetName", name, c_int(100), c_int(0))
        self.call("cuDriverGetVersion", byref(version))
        for attribute in (75, 76, 16):
            value = c_int()
            self.call("cuDeviceGetAttribute", byref(value), c_int(attribute), c_int(0))
            values.append(value.value)
        facts = {"device": name.value.decode(), "cuda_driver": version.value}
        return facts | {"capability": values[:2], "sm_count": values[2]}

    def encode(self, spec: TensorMap, address: int) -> bytes:
        """The descriptor; raises ``DriverError`` where the driver refuses the parameters."""
        rank = len(spec.dims)
        raw = ctypes.create_string_buffer(256)
        place = -(-ctypes.addressof(raw) // 64) * 64
        first = [c_void_p(place), c_int(KINDS[spec.kind][0]), c_uint32(rank), c_void_p(address)]
        first += [(c_uint64 * rank)(*spec.dims), (c_uint64 * max(rank - 1, 1))(*spec.strides)]
        steps = (c_uint32 * rank)(*spec.steps)
        modes = [c_int(v) for v in (spec.interleave, spec.swizzle, spec.l2, spec.fill)]
        if spec.pixels:
            corners = [(c_int * (rank - 2))(*spec.lower), (c_int * (rank - 2))(*spec.upper)]
            sizes = [c_uint32(spec.box[0]), c_uint32(spec.pixels)]
            self.call("cuTensorMapEncodeIm2col", *first, *corners, *sizes, steps, *modes)
        else:
            self.call("cuTensorMapEncodeTiled", *first, (c_uint32 * rank)(*spec.box), steps, *modes)
        return ctypes.string_at(place, 128)

    def kernel(self, case: Case) -> c_void_p:
        """The kernel of the case, compiled by the driver."""
        log = ctypes.create_string_buffer(8192)
        module, function = c_void_p(), c_void_p()
        options = (c_int * 2)(5, 6)  # error log buffer and its size
        values = (c_void_p * 2)(ctypes.cast(log, c_void_p), c_void_p(len(log)))
        image = c_char_p(case.ptx.encode())
        code = self.cuda.cuModuleLoadDataEx(byref(module), image, c_uint(2), options, values)
        if code:
            raise DriverError("cuModuleLoadDataEx", code, log.value.decode())
        self.call("cuModuleGetFunction", byref(function), module, c_char_p(b"kernel"))
        self.call("cuFuncSetAttribute", function, c_int(8), c_int(case.smem))
        return function

    def place(self, case: Case, shift: int = 0) -> list[int]:
        """Addresses of the buffers."""
        addresses, at = [], self.base.value + shift
        for buffer in case.buffers:
            addresses.append(at)
            at += -(-(buffer.nbytes + 256) // _ALIGN) * _ALIGN
        if at > self.base.value + self.arena:
            raise ValueError(f"{case.name}: the buffers do not fit in the arena")
        return addresses

    def maps(self, case: Case, addresses: list[int]) -> list[tuple[bytes, int]]:
        """(descriptor, address of the tensor) of each tensor map: arguments, then those placed in memory."""
        specs = [a for a in case.arguments if isinstance(a, TensorMap)] + [p.map for p in case.placed]
        found = [addresses[s.buffer] + s.offset for s in specs]
        return [(self.encode(s, a), a) for s, a in zip(specs, found)]

    def run(self, case: Case, function: c_void_p, shift: int = 0) -> list[np.ndarray]:
        """The buffers afterwards."""
        addresses = self.place(case, shift)
        maps = self.maps(case, addresses)
        before = [b.copy() for b in case.buffers]
        for placed, (descriptor, _) in zip(case.placed, maps[len(maps) - len(case.placed) :]):
            before[placed.buffer][placed.offset : placed.offset + 128] = np.frombuffer(descriptor, np.uint8)
        for address, buffer in zip(addresses, before):
            self.call("cuMemcpyHtoD_v2", c_uint64(address), c_void_p(buffer.ctypes.data), c_size_t(buffer.nbytes))
        self._launch(case, function, addresses, [m for m, _ in maps])
        after = [np.empty_like(b) for b in before]
        for address, buffer in zip(addresses, after):
            self.call("cuMemcpyDtoH_v2", c_void_p(buffer.ctypes.data), c_uint64(address), c_size_t(buffer.nbytes))
        return after

    def _launch(self, case: Case, function: c_void_p, addresses: list[int], maps: list[bytes]) -> None:
        store, left = [], list(maps)
        for argument in case.arguments:
            if isinstance(argument, Pointer):
                store.append((addresses[argument.buffer] + argument.offset).to_bytes(8, "little"))
            elif isinstance(argument, Scalar):
                store.append(argument.value.to_bytes(4, "little"))
            else:
                store.append(left.pop(0))
        held = [ctypes.create_string_buffer(s, len(s)) for s in store]
        pointers = (c_void_p * len(held))(*[ctypes.addressof(h) for h in held])
        attributes = (_Attribute * 2)()
        count = 0
        if case.cluster > 1:
            attributes[0].id = _CLUSTER_DIMENSION
            attributes[0].value[:3] = [case.cluster, 1, 1]
            count = 1
        if case.programmatic:
            attributes[count].id = _PROGRAMMATIC
            attributes[count].value[0] = 1
            count += 1
        config = _Config((case.grid, 1, 1), (case.block, 1, 1), case.smem, None, attributes, count)
        self.call("cuLaunchKernelEx", byref(config), function, pointers, None)
        self.call("cuCtxSynchronize")

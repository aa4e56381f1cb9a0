"""The calling convention of functions compiled with ``--enable-tvm-ffi``, without TVM-FFI.

Such a function takes torch tensors, addresses and numbers where an ordinary one takes the DSL's wrappers, and checks
them against the examples it was compiled with. In a session the DSL compiles an ordinary function, and this module
checks and wraps the arguments.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver, runtime

from cute_nvfp4.sim.session.protocol import Session

Bound = dict[int, int]
"""Maps the ``id`` of a symbolic size to its value in a call."""


class Packed:
    """An argument of a host function: a ctypes value, passed by address."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __c_pointers__(self) -> list[int]:
        return [ctypes.addressof(self._value)]


class Convention:
    """Converts the arguments of a call into those of the compiled host function.

    ``examples`` and ``more`` are the positional and keyword arguments of the compilation.
    """

    def __init__(self, signature: inspect.Signature, examples: tuple, more: dict[str, Any], session: Session) -> None:
        self._session = session
        names = list(signature.parameters)
        given = dict(zip(names, examples)) | more
        defaults = {n: p.default for n, p in signature.parameters.items()}
        self._slots = [(n, self._slot(n, given.get(n, defaults[n]))) for n in names]
        self._implicit = {n for n in names if _is_ambient_stream(given.get(n))}
        explicit = [p for n, p in signature.parameters.items() if n not in self._implicit]
        self._signature = signature.replace(parameters=explicit, return_annotation=inspect.Signature.empty)

    def convert(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Returns the arguments in the signature's order; raises ``TypeError`` or ``ValueError`` if one is wrong."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        symbols: Bound = {}
        return [slot(bound.arguments.get(name), symbols) for name, slot in self._slots]

    def _slot(self, name: str, example: Any) -> Callable[[Any, Bound], Any]:
        from cutlass.base_dsl.typing import Numeric

        if hasattr(example, "dynamic_shapes_mask"):
            return TensorSlot(name, example)
        if _is_ambient_stream(example):
            return lambda value, symbols: driver.CUstream(self._session.current_stream())
        if type(example).__name__ == "_FakeStream" or isinstance(example, (driver.CUstream, runtime.cudaStream_t)):
            return lambda value, symbols: driver.CUstream(_stream_handle(value))
        if type(example).__name__ == "_Pointer":
            return lambda value, symbols: Packed(ctypes.c_void_p(_address(name, value)))
        if isinstance(example, Numeric):
            return lambda value, symbols: type(example)(value)
        if dataclasses.is_dataclass(example) and not isinstance(example, type):
            return self._dataclass(name, example)
        if isinstance(example, (tuple, list)):
            return self._sequence(name, example)
        return lambda value, symbols: value

    def _sequence(self, name: str, example: Any) -> Callable[[Any, Bound], Any]:
        slots = [self._slot(f"{name}[{i}]", part) for i, part in enumerate(example)]

        def convert(value: Any, symbols: Bound) -> Any:
            if len(value) != len(slots):
                raise ValueError(f"{name}: expected {len(slots)} elements, got {len(value)}")
            parts = [slot(part, symbols) for slot, part in zip(slots, value)]
            return type(example)(*parts) if hasattr(example, "_fields") else type(example)(parts)

        return convert

    def _dataclass(self, name: str, example: Any) -> Callable[[Any, Bound], Any]:
        fields = [f.name for f in dataclasses.fields(example)]
        slots = {f: self._slot(f"{name}.{f}", getattr(example, f)) for f in fields}

        def convert(value: Any, symbols: Bound) -> Any:
            return dataclasses.replace(value, **{f: slots[f](getattr(value, f), symbols) for f in fields})

        return convert


class TensorSlot:
    """A tensor parameter: checks a tensor against the example, and packs its address, dynamic shape and strides."""

    def __init__(self, name: str, example: Any) -> None:
        self.name = name
        self.shape, self.stride = tuple(example.shape), tuple(example.stride)
        self.dynamic = [bool(d) for d in example.dynamic_shapes_mask], [bool(d) for d in example.dynamic_strides_mask]
        self.element, self.align = example.element_type, example._assumed_align or 1
        narrow = bool(getattr(example, "_use_32bit_stride", False))
        shapes = [_integer(s, 32) for s, d in zip(self.shape, self.dynamic[0]) if d]
        strides = [_integer(s, 32 if narrow else 64) for s, d in zip(self.stride, self.dynamic[1]) if d]
        layout = _struct(_struct(*shapes), _struct(*strides))
        self._descriptor = _struct(ctypes.c_void_p, layout)

    def __call__(self, value: Any, symbols: Bound) -> Packed:
        address, shape, stride = self._view(value)
        if len(shape) != len(self.shape):
            raise ValueError(f"{self.name}: expected {len(self.shape)} dimensions, got {len(shape)}")
        sizes = [self._size("shape", i, v, e, d, symbols) for i, v, e, d in _zip(shape, self.shape, self.dynamic[0])]
        # a dimension of one element may have any stride
        steps = [
            self._size("stride", i, v, e, d, symbols) if d or shape[i] > 1 else v
            for i, v, e, d in _zip(stride, self.stride, self.dynamic[1])
        ]
        if address % self.align:
            raise ValueError(f"{self.name}: expected an address aligned to {self.align} bytes, got {address:#x}")
        filled = self._descriptor()
        filled.f0 = address
        for part, values, dynamic in ((filled.f1.f0, sizes, self.dynamic[0]), (filled.f1.f1, steps, self.dynamic[1])):
            for i, v in enumerate(v for v, d in zip(values, dynamic) if d):
                setattr(part, f"f{i}", v)
        return Packed(filled)

    def _view(self, value: Any) -> tuple[int, list[int], list[int]]:
        """Returns (address, shape, strides) of ``value``, which count elements of the DSL's type."""
        if isinstance(value, torch.Tensor):
            if not value.is_cuda:
                raise ValueError(f"{self.name}: expected a tensor on cuda, got one on {value.device}")
            shape, stride = list(value.shape), list(value.stride())
            if value.dtype == getattr(torch, "float4_e2m1fn_x2", None) and self.element.width == 4:
                inner = stride.index(1)
                stride = [s if i == inner else 2 * s for i, s in enumerate(stride)]
                shape[inner] *= 2
            elif value.element_size() * 8 != max(self.element.width, 8):
                raise TypeError(f"{self.name}: expected elements of {self.element.__name__}, got {value.dtype}")
            return value.data_ptr(), shape, stride
        if hasattr(value, "data_ptr") and hasattr(value, "element_type"):
            return int(value.data_ptr), list(value.shape), list(value.stride)
        raise TypeError(f"{self.name}: expected a tensor, got {type(value).__name__}")

    def _size(self, what: str, i: int, value: int, example: Any, dynamic: bool, symbols: Bound) -> int:
        symbol = hasattr(example, "divisibility")
        if not dynamic and value != example:
            raise ValueError(f"{self.name}: expected {what}[{i}] == {example}, got {value}")
        if dynamic and symbol:
            if value % (example.divisibility or 1):
                raise ValueError(f"{self.name}: expected {what}[{i}] divisible by {example.divisibility}, got {value}")
            if (before := symbols.setdefault(id(example), value)) != value:
                raise ValueError(f"{self.name}: expected {what}[{i}] == {before}, as elsewhere here, got {value}")
        return value


def _zip(values: list[int], examples: tuple, dynamic: list[bool]):
    return zip(range(len(values)), values, examples, dynamic)


def _struct(*fields: Any) -> type[ctypes.Structure]:
    return type("Struct", (ctypes.Structure,), {"_fields_": [(f"f{i}", t) for i, t in enumerate(fields)]})


def _integer(example: Any, default: int) -> Any:
    return ctypes.c_int64 if getattr(example, "width", default) == 64 else ctypes.c_int32


def _is_ambient_stream(example: Any) -> bool:
    return bool(getattr(example, "use_tvm_ffi_env_stream", False))


def _stream_handle(value: Any) -> int:
    if hasattr(value, "__cuda_stream__"):
        return int(value.__cuda_stream__()[1])
    return int(getattr(value, "cuda_stream", value) or 0)


def _address(name: str, value: Any) -> int:
    if isinstance(value, ctypes.c_void_p):
        return value.value or 0
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    found = getattr(value, "_pointer", value)
    if not isinstance(found, int):
        raise TypeError(f"{name}: expected an address, got {type(value).__name__}")
    return found

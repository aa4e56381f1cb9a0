"""A kernel's arguments, written once.

A kernel declares them as a record: a ``NamedTuple`` whose defaults say what each argument is. From that one declaration
come the example arguments for compiling, the C types for launching, and, in the kernel's host function, a record of the
same class whose fields are traced values::

    class ScaleArguments(NamedTuple):
        x: Pointer = Pointer("Float32", 4)                            # (N,)
        y: Pointer = Pointer(lambda config: config.out_dtype, 4)      # (N,)
        count: Scalar = INT32

    signature = Signature(ScaleArguments, config)
    build(host, signature, ...)                # traced as host(arguments: ScaleArguments, stream)
    launch(ScaleArguments(x=x.data_ptr(), y=y.data_ptr(), count=x.numel()), stream)

Records nest, as fields or in tuples. A declaration that depends on the configuration is a function of it. A field that
is None is no argument. The stream is not a field: every host function takes it as its second parameter, because the
DSL passes a stream only on its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scalar:
    """A number. dtype: the name of its DSL type. ctype: its C type. varies: whether it may change from call to call."""

    dtype: str
    ctype: type
    varies: bool = False


INT32 = Scalar("Int32", ctypes.c_int32)
INT64 = Scalar("Int64", ctypes.c_int64)
FLOAT32 = Scalar("Float32", ctypes.c_float)
VARYING_INT32 = Scalar("Int32", ctypes.c_int32, varies=True)
VARYING_FLOAT32 = Scalar("Float32", ctypes.c_float, varies=True)


@dataclass(frozen=True)
class Pointer:
    """An address in global memory. dtype: the name of the DSL type it points to. alignment: in bytes.

    Either may be a function of the kernel's configuration. Addresses vary from call to call.
    """

    dtype: str | Callable[[Any], str]
    alignment: int | Callable[[Any], int]

    ctype = ctypes.c_void_p
    varies = True


@dataclass(frozen=True)
class PerConfig:
    """A field whose declaration is a function of the configuration: a record, or a tuple of some length."""

    declaration: Callable[[Any], Any]


class Signature:
    """The arguments of one kernel's host function.

    Attributes:
        declared: the record, resolved for the configuration.
        names: the names of the arguments in the order in which the host function takes them, such as ``a.data``.
        types: their C types, and last that of the stream.
        varying: the positions in ``names`` of arguments that may change from call to call, in order.
    """

    def __init__(self, record: type, config: Any = None) -> None:
        self.declared = _resolved(record(), config)
        leaves = list(_leaves(self.declared, ""))
        self.names = tuple(name for name, _ in leaves)
        self.types = (*(leaf.ctype for _, leaf in leaves), ctypes.c_void_p)
        self.varying = tuple(i for i, (_, leaf) in enumerate(leaves) if leaf.varies)

    def examples(self) -> list[Any]:
        """The arguments to compile the host function with: a record of example values, and a stream. None is read."""
        import cuda.bindings.driver as driver

        return [_example(self.declared), driver.CUstream(0)]

    def values(self, arguments: Any, stream: int) -> list[Any]:
        """The plain numbers of a call, in the order of ``types``."""
        flat: list[Any] = []
        _flatten(arguments, flat)
        if len(flat) != len(self.names):
            raise TypeError(f"arguments of a kernel: got {len(flat)} numbers, expected {len(self.names)}")
        flat.append(stream)
        return flat


def _resolved(declared: Any, config: Any) -> Any:
    if isinstance(declared, PerConfig):
        return _resolved(declared.declaration(config), config)
    if isinstance(declared, Pointer):
        dtype, alignment = (x(config) if callable(x) else x for x in (declared.dtype, declared.alignment))
        return Pointer(dtype, alignment)
    if isinstance(declared, tuple):
        return _rebuilt(declared, [_resolved(x, config) for x in declared])
    return declared


def _rebuilt(like: tuple, fields: Sequence[Any]) -> tuple:
    """A tuple of the class of ``like``, which may be a record."""
    return type(like)(*fields) if hasattr(like, "_fields") else tuple(fields)


def _leaves(declared: Any, name: str) -> Iterator[tuple[str, Scalar | Pointer]]:
    if not isinstance(declared, tuple):
        if declared is not None:
            yield name, declared
        return
    for key, field in zip(getattr(declared, "_fields", range(len(declared))), declared):
        yield from _leaves(field, f"{name}.{key}" if name else str(key))


def _example(declared: Any) -> Any:
    import cutlass
    from cutlass.cute import AddressSpace
    from cutlass.cute.runtime import make_ptr

    if isinstance(declared, tuple):
        return _rebuilt(declared, [_example(x) for x in declared])
    if declared is None:
        return None
    dtype = getattr(cutlass, declared.dtype)
    if isinstance(declared, Pointer):
        return make_ptr(dtype, declared.alignment, AddressSpace.gmem, assumed_align=declared.alignment)
    return dtype(1)


def _flatten(arguments: Any, flat: list[Any]) -> None:
    for x in arguments:
        if isinstance(x, tuple):
            _flatten(x, flat)
        elif x is not None:
            flat.append(x)

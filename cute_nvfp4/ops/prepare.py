"""prepare: plans an operation for fixed shapes; a call then only writes addresses and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..errors import OperandError
from ..operand import BlockScaledTensor, OperandKey
from ..prepared_weight import PreparedWeight
from ..row_scaled import RowScaledTensor
from ..runtime.bounded import Bounded
from ..tensors import check_dense
from .list_launch import arranged
from .operation import PREPARED
from .planned import Preparation
from .tensor_guards import TensorGuards


def prepare(operation: Callable[..., Any], *operands: Any, vary: Sequence[str] = (), **options: Any) -> Prepared:
    """Plans ``operation(*operands, **options)`` once and returns a callable that only launches.

    ::

        step = prepare(gemv, weight, x, out=y, vary=("b", "out"))
        for x, y in activations:
            step(x, y)

    Args:
        operation: ``gemv``, ``gemm``, ``quantize``, or ``gated_gemm`` or ``grouped_gemm`` of prepared weights.
        operands, options: the operation's arguments, which the callable keeps. Without ``out``, ``prepare`` makes one
            output, and every call writes to it.
        vary: names of operands that each call gives, in this order: of products "a", "b" and "out"; of quantize
            "x" and "out". They may differ from those given here in values and addresses alone, and the addresses must
            be multiples of the same powers of two, up to 32 bytes. All other operands stay the same tensors. Operands
            of ``grouped_gemm`` are lists: all x, all weights, all results.

    A call returns what the operation returns, bit for bit. Preparing compiles and loads the kernel, and runs
    nothing. Threads may share the result.

    Raises:
        OperandError: the operation or a name cannot be prepared; the request needs more than one launch; an output
            overlaps an operand, here or at a call; an operand of a call is unlike the one given here.
        OperandTypeError, TargetError: those of the operation.
    """
    return Prepared(preparation(operation, *operands, **options), tuple(vary))


def preparation(operation: Callable[..., Any], *operands: Any, **options: Any) -> Preparation:
    """The one planned launch of ``operation``.

    Raises:
        OperandError: the operation cannot be prepared.
    """
    if operation not in PREPARED:
        known = ", ".join(sorted(x.__name__ for x in PREPARED))
        raise OperandError.of("operation to prepare", got=getattr(operation, "__name__", operation), expected=known)
    return PREPARED[operation](*operands, **options)


class Prepared:
    """A prepared operation; calling it with the operands that vary runs it."""

    def __init__(self, made: Preparation, vary: tuple[str, ...]) -> None:
        for name in vary:
            if name not in made.slots or vary.count(name) > 1:
                expected = f"one of {', '.join(made.slots)}, each once"
                raise OperandError.of("operand that varies", got=repr(name), expected=expected)
        made.apart.check(made.values)
        self._made, self._launch, self._values, self._result = made, made.launch, made.values, made.operands["out"]
        self._owners = made.owners(made.operands)
        self._fixed = made.launch.fixed(made.values, self._owners)
        self._vary = [(name, _key(made.operands[name]), made.slots[name]) for name in vary]
        self._out = vary.index("out") if "out" in vary else None
        self._known = _Known.of([made.operands[name] for name in vary])

    def __call__(self, *operands: Any) -> Any:
        vary = self._vary
        if not (operands or vary):
            self._fixed()
            return self._result
        if len(operands) != len(vary):
            names = ", ".join(name for name, _, _ in vary) or "none"
            raise OperandError.of("operands of a prepared call", got=len(operands), expected=f"{len(vary)}: {names}")
        addresses = None if self._known is None else self._known.addresses(operands)
        values = None if addresses is None else self._known.values.get(addresses)
        if values is None:
            values = self._checked(operands)
            if addresses is not None:
                self._known.values[addresses] = values
        made, owners = self._made, self._owners
        if made.reads_owners:
            owners = made.owners(made.operands | {name: x for (name, _, _), x in zip(vary, operands)})
        self._launch(values, owners)
        return self._result if self._out is None else operands[self._out]

    def _checked(self, operands: Sequence[Any]) -> tuple:
        """The values of the launch, after checking the operands that vary."""
        values = list(self._values)
        for (name, key, slots), x in zip(self._vary, operands):
            if (found := _key(x)) != key:
                raise _unlike(name, found, key)
            for element, parts in zip(x, slots) if isinstance(key, _ListKey) else ((x, slots),):
                for part, index in parts:
                    values[index] = (element if part is None else getattr(element, part)).data_ptr()
        self._made.apart.check(values)
        return tuple(values)


_PARTS = ("class", "dtype", "shape", "strides", "device", "address modulo {}", "negation")
"""What the parts of a tensor's key describe."""
_HINT = "Prepare another call for such operands; .clone() has the alignment of new tensors."


def _unlike(name: str, found: Any, key: Any, alignment: int = 32) -> OperandError:
    """The error for an operand that differs from the prepared one; it names what differs."""
    if isinstance(key, _ListKey) and isinstance(found, _ListKey) and len(key.elements) == len(found.elements):
        for i, (x, y) in enumerate(zip(found.elements, key.elements)):
            if x != y:
                return _unlike(f"{name}[{i}]", x, y, 16)
        got, expected = "another arrangement", "that of the prepared call"
        return OperandError.of(f"global scales of {name}", got=got, expected=expected)
    if isinstance(key, OperandKey) and isinstance(found, OperandKey):
        pairs = [(x.name.replace("_", " "), getattr(found, x.name), getattr(key, x.name)) for x in fields(OperandKey)]
    elif isinstance(key, tuple) and isinstance(found, tuple) and len(key) == len(found) == len(_PARTS):
        pairs = list(zip((x.format(alignment) for x in _PARTS), found, key))
    else:
        got, expected = (f"a {x.__name__}" if isinstance(x, type) else "another one" for x in (found, key))
        return OperandError.of(name, got=got, expected=expected if expected != got else "the kind that was prepared")
    unlike = [x for x in pairs if x[1] != x[2]]
    got, expected = (", ".join(f"{x[0]} {x[i]}" for x in unlike) for i in (1, 2))
    return OperandError.of(f"{name} of a prepared call", got=got, expected=f"{expected}, as prepared", hint=_HINT)


class _Known:
    """Remembers lists of tensors, so that a call with the same ones needs no checks.

    torch's guards compare all tensors with the prepared ones at once. values: the values of a launch, by the addresses
    of tensors that an earlier call checked.
    """

    def __init__(self, tensors: list[Tensor], lengths: tuple[int, ...]) -> None:
        self._like, self._lengths, self.values = TensorGuards(tensors), lengths, Bounded()

    @classmethod
    def of(cls, operands: Sequence[Any]) -> _Known | None:
        """The record for operands that are lists of tensors; None for other operands."""
        if not operands or not all(isinstance(x, list) for x in operands):
            return None
        tensors = [y for x in operands for y in x]
        if not all(type(y) is Tensor for y in tensors):
            return None
        return cls(tensors, tuple(map(len, operands)))

    def addresses(self, operands: Sequence[Any]) -> tuple[int, ...] | None:
        """The addresses of all tensors; None if one is unlike the prepared one."""
        if is_dynamo_compiling() or any(type(x) is not list and type(x) is not tuple for x in operands):
            return None
        tensors = [y for x in operands for y in x]
        if tuple(map(len, operands)) != self._lengths or not self._like.check(tensors):
            return None
        return tuple(map(Tensor.data_ptr, tensors))


class _ListKey(NamedTuple):
    """The key of a list: that of each element, and how global scales and those of second gated weights are arranged."""

    elements: tuple
    scales: str
    up_scales: str


def _key(x: Any, alignment: int = 32) -> Any:
    """Everything that a plan depends on in an operand, with its address modulo ``alignment``; otherwise the type."""
    if isinstance(x, (BlockScaledTensor, PreparedWeight, RowScaledTensor)):
        return x.key
    if isinstance(x, (list, tuple)):
        parts = ([getattr(y, name, None) for y in x] for name in ("global_scale", "up_global_scale"))
        return _ListKey(tuple(_key(y, 16) for y in x), *map(arranged, parts))
    if not isinstance(x, torch.Tensor):
        return type(x)
    # quantize reads 32 bytes of x at once
    check_dense("an operand of a prepared call", x)
    return type(x), x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % alignment, x.is_neg()

"""prepare: an operation for fixed shapes, of which a call writes addresses and launches, and nothing else."""

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
    """Plans ``operation(*operands, **options)`` once; the callable that it gives only launches.

    ::

        step = prepare(gemv, weight, x, out=y, vary=("b", "out"))
        for x, y in activations:
            step(x, y)

    Args:
        operation: ``gemv``, ``gemm``, ``quantize``, or ``gated_gemm`` or ``grouped_gemm`` of prepared weights.
        operands, options: the operation's arguments, which are kept. Without ``out`` an output is made, which every
            call writes to.
        vary: names of operands that each call gives, in this order: of products "a", "b" and "out"; of quantize
            "x" and "out". They may differ from those given here in values and addresses alone, and the addresses are
            multiples of the same powers of two, up to 32 bytes. All other operands stay where they are. Those of
            ``grouped_gemm`` are lists: of all x, all weights, all results.

    A call returns what the operation returns, bit for bit. Preparing compiles and loads the kernel, and runs
    nothing. Threads may share the result.

    Raises:
        OperandError: an operation or a name that cannot be prepared; a request that needs more than one launch; an
            output that overlaps an operand, here or at a call; from a call: an operand that is not like the one given.
        OperandTypeError, TargetError: those of the operation.
    """
    return Prepared(preparation(operation, *operands, **options), tuple(vary))


def preparation(operation: Callable[..., Any], *operands: Any, **options: Any) -> Preparation:
    """One launch of ``operation``, planned.

    Raises:
        OperandError: an operation that has none.
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

    def __call__(self, *given: Any) -> Any:
        vary = self._vary
        if not (given or vary):
            self._fixed()
            return self._result
        if len(given) != len(vary):
            names = ", ".join(name for name, _, _ in vary) or "none"
            raise OperandError.of("operands of a prepared call", got=len(given), expected=f"{len(vary)}: {names}")
        places = None if self._known is None else self._known.places(given)
        values = None if places is None else self._known.values.get(places)
        if values is None:
            values = self._checked(given)
            if places is not None:
                self._known.values[places] = values
        made, owners = self._made, self._owners
        if made.reads_owners:
            owners = made.owners(made.operands | {name: x for (name, _, _), x in zip(vary, given)})
        self._launch(values, owners)
        return self._result if self._out is None else given[self._out]

    def _checked(self, given: Sequence[Any]) -> tuple:
        """What the launch varies, with operands that are checked."""
        values = list(self._values)
        for (name, key, slots), x in zip(self._vary, given):
            if (found := _key(x)) != key:
                raise _unlike(name, found, key)
            for element, places in zip(x, slots) if isinstance(key, _ListKey) else ((x, slots),):
                for part, place in places:
                    values[place] = (element if part is None else getattr(element, part)).data_ptr()
        self._made.apart.check(values)
        return tuple(values)


_PARTS = ("class", "dtype", "shape", "strides", "device", "address modulo {}", "negation")
"""What the key of a tensor has."""
_HINT = "Prepare another call for such operands; .clone() has the alignment of new tensors."


def _unlike(name: str, found: Any, key: Any, alignment: int = 32) -> OperandError:
    """The error about an operand that is not like the prepared one: what differs."""
    if isinstance(key, _ListKey) and isinstance(found, _ListKey) and len(key.elements) == len(found.elements):
        for i, (x, y) in enumerate(zip(found.elements, key.elements)):
            if x != y:
                return _unlike(f"{name}[{i}]", x, y, 16)
        return OperandError.of(f"global scales of {name}", got="other places", expected="as in the prepared call")
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
    """Lists of tensors of which torch's guards say at once that they are like those of the prepared call; values: what
    a launch varies, by the addresses of tensors that were checked in an earlier call."""

    def __init__(self, tensors: list[Tensor], lengths: tuple[int, ...]) -> None:
        self._like, self._lengths, self.values = TensorGuards(tensors), lengths, Bounded()

    @classmethod
    def of(cls, operands: Sequence[Any]) -> _Known | None:
        """The record of lists of tensors; None of others."""
        if not operands or not all(isinstance(x, list) for x in operands):
            return None
        tensors = [y for x in operands for y in x]
        if not all(type(y) is Tensor for y in tensors):
            return None
        return cls(tensors, tuple(map(len, operands)))

    def places(self, given: Sequence[Any]) -> tuple[int, ...] | None:
        """The addresses of all tensors; None unless they are like the prepared ones."""
        if is_dynamo_compiling() or any(type(x) is not list and type(x) is not tuple for x in given):
            return None
        tensors = [y for x in given for y in x]
        if tuple(map(len, given)) != self._lengths or not self._like.check(tensors):
            return None
        return tuple(map(Tensor.data_ptr, tensors))


class _ListKey(NamedTuple):
    """The key of each element, and how their global scales lie, and those of the second weights of gated products."""

    elements: tuple
    scales: str
    up_scales: str


def _key(x: Any, alignment: int = 32) -> Any:
    """All that a plan depends on of an operand, of its address what matters up to ``alignment``; of what is none, its
    type."""
    if isinstance(x, (BlockScaledTensor, PreparedWeight, RowScaledTensor)):
        return x.key
    if isinstance(x, (list, tuple)):
        parts = ([getattr(y, name, None) for y in x] for name in ("global_scale", "up_global_scale"))
        return _ListKey(tuple(_key(y, 16) for y in x), *map(arranged, parts))
    if not isinstance(x, torch.Tensor):
        return type(x)
    # of quantize's x, 32 bytes are read at once
    check_dense("an operand of a prepared call", x)
    return type(x), x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % alignment, x.is_neg()

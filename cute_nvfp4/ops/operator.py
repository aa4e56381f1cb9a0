"""Operators of ``torch.library`` for the operations, derived from their schemas.

An operator takes plain tensors. The names of its schema's arguments say how a request becomes them and back. An operand
``a`` becomes its data ``a``, its scales ``a_scale`` (blocked ones in one dimension, row-major ones as they are),
``a_global_scale`` or None, and ``a_format``. A prepared weight ``b`` becomes its bytes, its global scales, ``rows``,
``dtype`` and ``packing``. ``alpha`` is a number; a tensor alpha is ``alpha_tensor``. A list of operands becomes one
list for each part.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import OperandError
from ..formats import FORMATS
from ..grouped_rows import GroupedRows
from ..operand import BlockScaledTensor
from ..prepared_weight import PreparedWeight
from ..quantization.rules import resolve_format
from ..row_scaled import RowScaledTensor
from ..scale_layout import blocked_flat
from .checks import check_alpha, number, split_alpha
from .dispatch import requires_grad, written_to

NAMESPACE = "cute_nvfp4"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
# inductor must keep the traced strides: rows of an operand are contiguous
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
OF_WEIGHT = ("rows", "k", "dtype", "packing", "up_global_scale", "row_factor", "promoted")


def define(
    name: str,
    arguments: str,
    returns: str,
    written: Mapping[str, str],
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    differentiable: Sequence[str] = (),
) -> None:
    """Defines the operators ``name`` and ``name.out``; the out variant returns nothing.

    arguments, returns: their parts of the schema.
    written: the outputs of the out variant: their names, and their types with an alias.
    kernel: computes the operator on every device; the out variant passes it the outputs, too.
    fake: makes results of the right shapes and dtypes; it raises for arguments that do not fit.
    differentiable: the arguments that ``register_autograd`` has a formula for; the operator refuses any other argument
        that requires a gradient.
    """
    overload = f"{name}.out"
    LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=TAGS)
    outputs = "".join(f", {kind} {x}{'=None' if kind.endswith('?') else ''}" for x, kind in written.items())
    LIBRARY.define(f"{overload}({arguments}{outputs}) -> ()", tags=TAGS)
    names = [x.name for x in getattr(torch.ops, NAMESPACE).__getattr__(name).default._schema.arguments]

    def guarded(function: Callable[..., Any], allowed: Sequence[str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                refuse_gradients({k: v for k, v in [*zip(names, args), *kwargs.items()] if k not in allowed})
            return function(*args, **kwargs)

        return call

    def run_out(*args: Any, **kwargs: Any) -> None:
        kernel(*args, **kwargs)
        written_to(*(kwargs.get(x) for x in written))

    def fake_out(*args: Any, **kwargs: Any) -> None:
        fake(*args, **{k: v for k, v in kwargs.items() if k not in written})

    for which, allowed, real, made_up in ((name, differentiable, kernel, fake), (overload, (), run_out, fake_out)):
        LIBRARY.impl(which, guarded(real, allowed), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{which}", guarded(made_up, allowed), lib=LIBRARY)


def refuse_gradients(named: Mapping[str, Any]) -> None:
    """Raises if one of these requires a gradient."""
    for name, x in named.items():
        if requires_grad(x):
            raise OperandError.of(
                name,
                got="a tensor that requires a gradient",
                expected="one that does not: there is no formula for it here",
                hint=f"Give {name}.detach(), or call within torch.no_grad().",
            )


class Gradient(NamedTuple):
    """The gradients of an operator.

    of: the arguments that have a gradient. keep: stores in the context what the backward pass needs; it takes the
    context, the tensors by name, and the options. backward: computes the gradients of ``of``, in order, from the
    context and the gradients of the results.
    """

    of: tuple[str, ...]
    keep: Callable[[Any, dict[str, Any], dict[str, Any]], None]
    backward: Callable[..., Sequence[Any]]

    def register(self, name: str, tensors: Sequence[str]) -> None:
        """Registers the gradients for the operator ``name``, whose tensor arguments are ``tensors``."""

        def keep(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: Any) -> None:
            named = dict(zip(tensors, inputs))
            refuse_gradients({name: x for name, x in named.items() if name not in self.of})
            ctx.others = {x: [None] * len(y) if _is_tensors(y) else None for x, y in named.items()}
            if isinstance(output, tuple):
                ctx.mark_non_differentiable(*output[1:])
            self.keep(ctx, named, keyword_only_inputs)

        def backward(ctx: Any, *dys: Any) -> tuple:
            return tuple((ctx.others | dict(zip(self.of, self.backward(ctx, *dys)))).values())

        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=keep, lib=LIBRARY)


def _is_tensors(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(y, torch.Tensor) for y in x)


class Operator:
    """The operator ``name`` of ``operation``: a row of the table of ``library``.

    arguments, returns, written: as in ``define``. gradient: None if the operator has none. The methods below serve
    operations that return one tensor; subclasses override them for other results.
    """

    def __init__(
        self,
        name: str,
        operation: Any,
        arguments: str,
        returns: str = "Tensor",
        written: Mapping[str, str] | None = None,
        gradient: Gradient | None = None,
    ) -> None:
        self._operation = operation
        differentiable = () if gradient is None else gradient.of
        define(name, arguments, returns, written or {"out": "Tensor(a!)"}, self._run, self._fake, differentiable)
        self._packet = getattr(getattr(torch.ops, NAMESPACE), name)
        declared = self._packet.default._schema.arguments
        self.tensors = tuple(x.name for x in declared if not x.kwarg_only)
        self._options = tuple(x.name for x in declared if x.kwarg_only)
        self._defaults = {x.name: x.default_value for x in declared if x.has_default_value()}
        if gradient is not None:
            gradient.register(name, self.tensors)

    def serve(self) -> None:
        """Makes this the operator of its operation."""
        self._operation.operator = lambda request: self

    def call(self, request: Any) -> Any:
        """The result of a request, computed through torch's dispatcher, which records the call."""
        if getattr(request, "config", None) is not None:
            expected = "None where torch traces the call, or a gradient is asked for"
            raise OperandError.of("config", got=f"a {type(request.config).__name__}", expected=expected)
        request = self.adapted(request)
        alpha, alpha_tensor = 1.0, None
        if "alpha_tensor" in self.tensors:
            check_alpha(request.alpha, *self.alpha_of(request))
            alpha, alpha_tensor = split_alpha(request.alpha)
        elif "alpha" in self._options:
            alpha = number("alpha", request.alpha)
        tensors = [alpha_tensor if name == "alpha_tensor" else part(request, name) for name in self.tensors]
        options = {name: alpha if name == "alpha" else part(request, name) for name in self._options}
        # a schema may have another default than None, such as the format of an operand that is missing
        options = {name: value for name, value in options.items() if value is not None}
        written = self.written(request)
        if written is None:
            return self.result(request, self._packet.default(*tensors, **options))
        self._packet.out(*tensors, **options, **written)
        return self.result(request, tuple(written.values()) if len(written) > 1 else next(iter(written.values())))

    def _request(self, args: tuple, options: Mapping[str, Any]) -> Any:
        """The request that an operator's arguments describe."""
        values = {"alpha": 1.0} | self._operation.defaults | self._defaults
        values |= dict(zip(self.tensors, args)) | dict(options)
        if values.get("alpha_tensor") is not None:
            if values["alpha"] != 1.0:
                got = f"{values['alpha']} and alpha_tensor"
                raise OperandError.of("alpha", got=got, expected="one of the two")
            values["alpha"] = values["alpha_tensor"]
        self.restore(values)
        return self._operation.request(*(rebuilt(name, values) for name in self._operation.fields))

    def _run(self, *args: Any, **options: Any) -> Any:
        request = self._request(args, options)
        return self.returned(request, self._operation.run(*request))

    def _fake(self, *args: Any, **options: Any) -> Any:
        request = self._request(args, options)
        return self.returned(request, self._operation.checked(request))

    def adapted(self, request: Any) -> Any:
        """The request from which the operator's arguments are read; subclasses change fields here."""
        return request

    def alpha_of(self, request: Any) -> tuple[torch.device, int]:
        """The device that a tensor alpha must be on, and the number of groups it may have elements for."""
        return request[1].device, 1

    def written(self, request: Any) -> dict[str, Any] | None:
        """The outputs of the out variant, by name; None if new results are wanted."""
        return None if request.out is None else {"out": request.out}

    def result(self, request: Any, found: Any) -> Any:
        """The result of the public function, made from what the operator returned or wrote."""
        return found

    def returned(self, request: Any, made: Any) -> Any:
        """The result of the operator, made from what the operation returned."""
        return made

    def restore(self, values: dict[str, Any]) -> None:
        """Puts the arguments of the request into ``values`` where the operator's arguments differ from them."""


class RecordOutput(Operator):
    """An operator that returns the two tensors of a record. outs: the names of the outputs of its out variant."""

    def __init__(self, name: str, operation: Any, arguments: str, record: type, outs: tuple[str, str]) -> None:
        self._record, self._outs = record, outs
        self._fields = tuple(inspect.signature(record).parameters)
        super().__init__(name, operation, arguments, "(Tensor, Tensor)", dict(zip(outs, ("Tensor(a!)", "Tensor(b!)"))))

    def written(self, request: Any) -> dict[str, torch.Tensor] | None:
        return None if request.out is None else dict(zip(self._outs, self._parts(request.out)))

    def result(self, request: Any, found: Any) -> Any:
        return self._record(*found)

    def returned(self, request: Any, made: Any) -> tuple[torch.Tensor, ...] | None:
        return None if request.out is not None else self._parts(made)

    def restore(self, values: dict[str, Any]) -> None:
        parts = [values.get(name) for name in self._outs]
        values["out"] = None if parts[0] is None else self._record(*parts)

    def _parts(self, record: Any) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(record, name) for name in self._fields)


def part(request: Any, name: str) -> Any:
    """The operator's argument ``name``, taken from a request."""
    if name in request._fields:
        return _each(getattr(request, name), functools.partial(_main, name))
    if name in OF_WEIGHT:
        found = _each(request.b, lambda weight: getattr(weight, name))
        return found[0] if name in ("dtype", "packing", "promoted") and isinstance(found, list) else found
    for suffix in ("_global_scale", "_scale", "_format"):
        if name.endswith(suffix):
            owner = name.removesuffix(suffix)
            # weights of a gated product have one format
            x = getattr(request, owner if owner in request._fields else f"{owner}1")
            if suffix == "_format":
                return next((y.format.name for y in (x if isinstance(x, list) else [x]) if hasattr(y, "format")), None)
            return _each(x, flat_scale if suffix == "_scale" else lambda y: getattr(y, "global_scale", None))
    raise AttributeError(name)


def _each(x: Any, function: Callable[[Any], Any]) -> Any:
    return [function(y) for y in x] if isinstance(x, list) else function(x)


def _main(name: str, x: Any) -> Any:
    """The main tensor of an argument: a tensor itself, the data of an operand, or the bytes of a prepared weight."""
    if isinstance(x, PreparedWeight):
        return x.packed
    if isinstance(x, RowScaledTensor):
        return x.data
    if not hasattr(x, "scale_layout"):
        return x
    if FORMATS.get(x.format.name) != x.format:
        expected = f"one of {', '.join(FORMATS)}"
        raise OperandError.of(f"format of {name} in an operator", got=x.format.name, expected=expected)
    return x.data


def flat_scale(x: Any) -> torch.Tensor | None:
    """The scales of an operand, blocked ones in one dimension; None if it has no scales."""
    scale = getattr(x, "scale", None)
    return blocked_flat(scale) if scale is not None and scale.ndim == 6 else scale


def rebuilt(name: str, values: Mapping[str, Any]) -> Any:
    """The public function's argument ``name``, rebuilt from an operator's arguments."""
    x = values[name]
    if name == "b" and "rows" in values:
        k = elements(values["a"], values["a_scale"], values["a_format"])
        return weight_of(x, values["rows"], k, values["b_global_scale"], values["up_global_scale"], values)
    if not isinstance(x, torch.Tensor) or f"{name}_scale" not in values or values[f"{name}_scale"] is None:
        return x
    format = values.get(f"{name}_format") or values.get(f"{name[0]}_format", "nvfp4")
    scale, factor = values[f"{name}_scale"], values[f"{name}_global_scale"]
    if x.dtype is torch.float8_e4m3fn and scale.dtype is torch.float32:
        return RowScaledTensor(x, scale)
    if values.get("offsets") is not None:
        if name == "a":
            return GroupedRows(x, scale, values["offsets"], factor, resolve_format(format))
    return operand(x, scale, factor, format)


def operand(
    data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, format: str = "nvfp4"
) -> BlockScaledTensor:
    """The operand that an operator's arguments describe."""
    return BlockScaledTensor(data, scale, global_scale, resolve_format(format))


def weight_of(packed: Any, rows: int, k: int, factor: Any, up: Any, values: Mapping[str, Any]) -> PreparedWeight:
    """The prepared weight that an operator's arguments describe."""
    of_fp8 = values.get("row_factor"), values.get("promoted", False)
    return PreparedWeight(
        packed, rows, k, values["dtype"], factor, bool(values["gate"]), up, values["packing"], *of_fp8
    )


def elements(a: torch.Tensor, scale: torch.Tensor | None, format: str) -> int:
    """K of ``a``, whose last dimension counts values or bytes of elements; FP8 rows have float32 scales."""
    return a.shape[-1] * (1 if scale is None or scale.dtype is torch.float32 else FORMATS[format].elements_per_byte)

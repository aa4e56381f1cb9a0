"""An operation as an operator of ``torch.library``, derived from its schema.

An operator takes plain tensors: an operand ``a`` is its data ``a`` and its scales ``a_scale`` (blocked ones in one
dimension, row-major ones as they are), ``a_global_scale`` or None, and ``a_format``; a prepared weight ``b`` its bytes,
its global scales, ``rows``, ``dtype`` and ``packing``. ``alpha`` is a number, or ``alpha_tensor`` is one. Lists of
operands are lists of each part. The names of a schema's arguments say all of it: how a request becomes them, and how
they become a request.
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
from .checks import number, split_alpha
from .dispatch import requires_grad, written_to

NAMESPACE = "cute_nvfp4"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
# compilers keep the strides that were traced: rows of an operand are contiguous
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
    """Defines the operators ``name`` and ``name.out``, which returns nothing.

    arguments, returns: their part of the schema. written: what ``out`` writes, by name, and its type with an alias.
    kernel: runs on every device; ``out`` calls it with what it writes. fake: what the results are like; it raises for
    arguments that do not fit. differentiable: arguments whose gradient ``register_autograd`` knows; that of others is
    refused where the operator is called.
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

    of: the arguments that have one. keep: what the backward pass needs, from the tensors by name and the options.
    backward: from that, and the gradients of the results, to those of ``of``, in order.
    """

    of: tuple[str, ...]
    keep: Callable[[Any, dict[str, Any], dict[str, Any]], None]
    backward: Callable[..., Sequence[Any]]

    def register(self, name: str, tensors: Sequence[str]) -> None:
        """Registers them for the operator ``name`` of these tensors."""

        def keep(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: Any) -> None:
            given = dict(zip(tensors, inputs))
            refuse_gradients({name: x for name, x in given.items() if name not in self.of})
            ctx.others = {x: [None] * len(y) if _is_tensors(y) else None for x, y in given.items()}
            if isinstance(output, tuple):
                ctx.mark_non_differentiable(*output[1:])
            self.keep(ctx, given, keyword_only_inputs)

        def backward(ctx: Any, *dys: Any) -> tuple:
            return tuple((ctx.others | dict(zip(self.of, self.backward(ctx, *dys)))).values())

        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=keep, lib=LIBRARY)


def _is_tensors(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(y, torch.Tensor) for y in x)


class Operator:
    """The operator ``name`` of ``operation``: a row of the table of ``library``.

    arguments, returns, written: as in ``define``. gradient: None where there is no formula. The methods below are of
    an operation whose result is one tensor, and the subclasses say what is other where it is more.
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
        """Makes it the operator of its operation."""
        self._operation.operator = lambda request: self

    def call(self, request: Any) -> Any:
        """The result of a request, of which torch records that it was computed."""
        if getattr(request, "config", None) is not None:
            expected = "None where torch traces the call, or a gradient is asked for"
            raise OperandError.of("config", got=f"a {type(request.config).__name__}", expected=expected)
        request = self.adapted(request)
        alpha, alpha_tensor = 1.0, None
        if "alpha_tensor" in self.tensors:
            alpha, alpha_tensor = split_alpha(request.alpha, *self.alpha_of(request))
        elif "alpha" in self._options:
            alpha = number("alpha", request.alpha)
        tensors = [alpha_tensor if name == "alpha_tensor" else part(request, name) for name in self.tensors]
        options = {name: alpha if name == "alpha" else part(request, name) for name in self._options}
        # a default of a schema may be no None: a format where there is no operand
        options = {name: value for name, value in options.items() if value is not None}
        written = self.written(request)
        if written is None:
            return self.result(request, self._packet.default(*tensors, **options))
        self._packet.out(*tensors, **options, **written)
        return self.result(request, tuple(written.values()) if len(written) > 1 else next(iter(written.values())))

    def _request(self, args: tuple, options: Mapping[str, Any]) -> Any:
        """The request that the operator's arguments describe."""
        values = {"alpha": 1.0} | self._operation.defaults | self._defaults
        values |= dict(zip(self.tensors, args)) | dict(options)
        if values.get("alpha_tensor") is not None:
            if values["alpha"] != 1.0:
                got = f"{values['alpha']} and alpha_tensor"
                raise OperandError.of("alpha", got=got, expected="one of the two")
            values["alpha"] = values["alpha_tensor"]
        self.given(values)
        return self._operation.request(*(rebuilt(name, values) for name in self._operation.fields))

    def _run(self, *args: Any, **options: Any) -> Any:
        request = self._request(args, options)
        return self.returned(request, self._operation.run(*request))

    def _fake(self, *args: Any, **options: Any) -> Any:
        request = self._request(args, options)
        return self.returned(request, self._operation.checked(request))

    def adapted(self, request: Any) -> Any:
        """The request with what the operator's arguments are made of."""
        return request

    def alpha_of(self, request: Any) -> tuple[torch.device, int]:
        """Where a device scalar alpha is, and for how many groups."""
        return request[1].device, 1

    def written(self, request: Any) -> dict[str, Any] | None:
        """What ``out`` writes; None where new results are wanted."""
        return None if request.out is None else {"out": request.out}

    def result(self, request: Any, found: Any) -> Any:
        """What the public function gives, of what the operator returned or wrote."""
        return found

    def returned(self, request: Any, made: Any) -> Any:
        """What the operator returns, of what the operation gave."""
        return made

    def given(self, values: dict[str, Any]) -> None:
        """Makes of ``values`` what the request's own arguments are, where they are not those of the operator."""


class RecordOutput(Operator):
    """An operator whose results are two tensors, the fields of a record. outs: what the ``out`` variant calls them."""

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

    def given(self, values: dict[str, Any]) -> None:
        parts = [values.get(name) for name in self._outs]
        values["out"] = None if parts[0] is None else self._record(*parts)

    def _parts(self, record: Any) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(record, name) for name in self._fields)


def part(request: Any, name: str) -> Any:
    """The operator's argument ``name`` of a request."""
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
    """The tensor that an argument is, or data or bytes of an operand."""
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
    """The scales of an operand, blocked ones in one dimension; None of what has none."""
    scale = getattr(x, "scale", None)
    return blocked_flat(scale) if scale is not None and scale.ndim == 6 else scale


def rebuilt(name: str, values: Mapping[str, Any]) -> Any:
    """The argument ``name`` of a public function, of an operator's arguments."""
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
    """K, of floats or of bytes of elements; rows in FP8 have scales in float32."""
    return a.shape[-1] * (1 if scale is None or scale.dtype is torch.float32 else FORMATS[format].elements_per_byte)

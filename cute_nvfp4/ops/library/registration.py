"""How an operator of ``torch.library`` is made.

An operator takes plain tensors: an operand is its data and its scales (blocked ones in one dimension, row-major ones
as they are), and a global scale or None. Its kernel rebuilds the operands and calls the public function, which checks
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import OperandError, OperandTypeError
from ...formats import FORMATS
from ...operand import BlockScaledTensor
from ...quantization.rules import resolve_format
from ...scale_layout import blocked_flat
from ..checks import check_dtype
from ..dispatch import requires_grad, written_to

NAMESPACE = "cute_nvfp4"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
# compilers keep the strides that were traced: rows of an operand are contiguous
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


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

    def refuse(args: tuple, kwargs: dict, allowed: Sequence[str]) -> None:
        if torch.is_grad_enabled():
            refuse_gradients({k: v for k, v in [*zip(names, args), *kwargs.items()] if k not in allowed})

    def run(*args: Any, **kwargs: Any) -> Any:
        refuse(args, kwargs, differentiable)
        return kernel(*args, **kwargs)

    def run_out(*args: Any, **kwargs: Any) -> None:
        refuse(args, kwargs, ())
        kernel(*args, **kwargs)
        written_to(*(kwargs.get(x) for x in written))

    def fake_run(*args: Any, **kwargs: Any) -> Any:
        refuse(args, kwargs, differentiable)
        return fake(*args, **kwargs)

    def fake_out(*args: Any, **kwargs: Any) -> None:
        refuse(args, kwargs, ())
        fake(*args, **{k: v for k, v in kwargs.items() if k not in written})

    for which, real, made_up in ((name, run, fake_run), (overload, run_out, fake_out)):
        LIBRARY.impl(which, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{which}", made_up, lib=LIBRARY)


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


def call(
    operator: Any, tensors: Sequence[Any], options: Mapping[str, Any], config: Any, out: Mapping[str, Any] | None
) -> Any:
    """The result of ``operator``, or nothing where it writes to ``out``."""
    if config is not None:
        expected = "None where torch traces the call, or a gradient is asked for"
        raise OperandError.of("config", got=f"a {type(config).__name__}", expected=expected)
    if out is None:
        return operator.default(*tensors, **options)
    return operator.out(*tensors, **options, **out)


def tensors_of(name: str, operand: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of an operand, or of grouped rows, as operators take them."""
    if not hasattr(operand, "scale_layout"):
        raise OperandTypeError.of(name, got=type(operand).__name__, expected="BlockScaledTensor")
    if FORMATS.get(operand.format.name) != operand.format:
        expected = f"one of {', '.join(FORMATS)}"
        raise OperandError.of(f"format of {name} in an operator", got=operand.format.name, expected=expected)
    scale = operand.scale
    return operand.data, blocked_flat(scale) if scale.ndim == 6 else scale


def operand(
    data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, format: str = "nvfp4"
) -> BlockScaledTensor:
    """The operand that an operator's arguments describe."""
    return BlockScaledTensor(data, scale, global_scale, resolve_format(format))


def either(alpha: float, alpha_tensor: torch.Tensor | None) -> float | torch.Tensor:
    """The alpha of a public function."""
    if alpha_tensor is None:
        return alpha
    if alpha != 1.0:
        raise OperandError.of("alpha", got=f"{alpha} and alpha_tensor", expected="one of the two")
    return alpha_tensor


def new(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    """A result as a fake makes it; float16 by default."""
    dtype = torch.float16 if dtype is None else dtype
    check_dtype("out_dtype", dtype)
    return like.new_empty(shape, dtype=dtype)

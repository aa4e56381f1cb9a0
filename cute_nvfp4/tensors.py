"""Checks of tensors: kernels and exact torch read dense memory that holds the tensor's values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from .errors import OperandError, OperandTypeError

_EXPECTED = "a dense tensor, whose memory holds its values"


def check_dense(what: str, x: Any) -> None:
    """Raises unless ``x`` is a tensor whose memory holds its values, contiguous or strided.

    Sparse, nested and quantized tensors have no such memory, that of a negated view has other values, and a tensor that
    ``torch.func`` maps over has none of its own. A tensor that torch traces is never refused.
    """
    if not isinstance(x, torch.Tensor):
        raise OperandTypeError.of(what, got=type(x).__name__, expected="torch.Tensor")
    if torch.compiler.is_dynamo_compiling():
        return
    if not is_dense(x):
        got, hint = _explained(x)
        raise OperandError.of(what, got=got, expected=_EXPECTED, hint=hint)


def check_tensor(
    name: str,
    x: Any,
    *,
    dtypes: Collection[torch.dtype] = (),
    shapes: Collection[Sequence[int]] = (),
    device: torch.device | None = None,
) -> None:
    """Raises unless x is dense, has one of ``dtypes`` and one of ``shapes``, and lies on ``device``; empty: any."""
    check_dense(name, x)
    if dtypes and x.dtype not in dtypes:
        raise OperandTypeError.of(f"dtype of {name}", got=x.dtype, expected=" or ".join(map(str, dtypes)))
    if shapes and x.shape not in shapes:
        expected = " or ".join(str(tuple(shape)) for shape in shapes)
        raise OperandError.of(f"shape of {name}", got=tuple(x.shape), expected=expected)
    if device is not None and x.device != device:
        raise OperandError.of(f"device of {name}", got=x.device, expected=device)


def is_dense(x: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its values."""
    dense = x.layout is torch.strided and not (x.is_nested or x.is_quantized)
    return dense and not (x.is_neg() or x.is_conj()) and _has_memory(x)


def check_all_dense(named: Iterable[tuple[str, Any]]) -> None:
    """Runs ``check_dense`` on every tensor among arguments, and in lists of them."""
    for name, x in named:
        if isinstance(x, torch.Tensor):
            check_dense(name, x)
        elif isinstance(x, (list, tuple)):
            check_all_dense((f"{name}[{i}]", y) for i, y in enumerate(x))


def memory_of(x: torch.Tensor) -> tuple | None:
    """Shape, strides, dtype, device and alignment (up to 32 bytes) of a dense tensor of torch's own class.

    None for a tensor of another class, without memory, or whose memory does not hold its values.
    """
    try:
        address = x.data_ptr() if type(x) is torch.Tensor else 0
        return None if not address or x.is_neg() else (x.shape, x.stride(), x.dtype, x.device, address & 31)
    except RuntimeError:  # sparse, nested, or wrapped by torch.func
        return None


def _has_memory(x: torch.Tensor) -> bool:
    """Whether a tensor of torch's own class has memory, or needs none."""
    if type(x) is not torch.Tensor or x.is_meta:
        return True
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:
        return False


def _explained(x: torch.Tensor) -> tuple[str, str]:
    """What kind of tensor it is, and what to do about it."""
    if x.is_nested:
        return "a nested tensor", ".to_padded_tensor(0) makes a dense one."
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}", ".to_dense() makes one."
    if x.is_quantized:
        return f"a quantized tensor ({x.dtype})", ".dequantize() gives its values."
    if x.is_neg():
        return "a view that negates its memory", ".resolve_neg() copies."
    if x.is_conj():
        return "a view that conjugates its memory", ".resolve_conj() copies."
    return "a tensor of torch.func, which stands for another", "Call with the tensor itself, outside of vmap."

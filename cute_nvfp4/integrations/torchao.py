"""Runs models that torchao quantized to NVFP4 on this package's layers: the same bytes, without decoding each forward.

torchao's ``NVFP4Tensor`` (torchao 0.18, ``torchao.prototype.mx_formats``) has packed E2M1 ``qdata`` (N, K / 2), an E4M3
``scale``, either row-major or swizzled, which is this package's blocked layout, and a global scale
``per_tensor_scale``, or none. This module knows its tensors by these attributes; only ``dispatch`` imports torchao.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.operand import PLAIN, BlockScaledTensor
from cute_nvfp4.ops.dispatch import is_recorded
from cute_nvfp4.ops.gemm import gemm
from cute_nvfp4.ops.prepare_weight import prepare_weight
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.runtime.backend import Backend, resolve

_PARTS = ("qdata", "scale", "per_tensor_scale", "is_swizzled_scales", "act_per_tensor_scale", "act_quant_kwargs")
_KEPT, _ORIGIN = "_cute_nvfp4_prepared", "_cute_nvfp4_origin"
"""Attributes that this module adds to torchao's tensors: the packed weight, and the tensor they are transposed from."""


def is_torchao(weight: Any) -> bool:
    """Whether a tensor is torchao's ``NVFP4Tensor``."""
    return type(weight).__name__ == "NVFP4Tensor" and all(hasattr(weight, part) for part in _PARTS)


def operand(weight: Any) -> BlockScaledTensor:
    """An ``NVFP4Tensor`` (N, K) as an operand that shares its memory.

    Raises:
        OperandTypeError: the tensor is another one.
        OperandError: it is transposed or stacked, or operands cannot have its memory.
    """
    if not is_torchao(weight):
        raise OperandTypeError.of("weight", got=type(weight).__name__, expected="torchao's NVFP4Tensor")
    data, scale = weight.qdata, weight.scale.view(torch.uint8)
    if data.ndim != 2 or not data.is_contiguous():
        got = f"qdata of shape {tuple(data.shape)}, strides {data.stride()}"
        raise OperandError.of("NVFP4Tensor", got=got, expected="a matrix (N, K / 2), contiguous")
    rows, k = data.shape[0], 2 * data.shape[1]
    scale = scale.reshape(-1) if weight.is_swizzled_scales else scale.view(rows, k // 16)
    factor = weight.per_tensor_scale
    return BlockScaledTensor(data.view(torch.uint8), scale, None if factor is None else factor.float().reshape(()))


def convert(model: torch.nn.Module, *, input_rule: str | None = None, backend: Backend = "auto") -> list[str]:
    """Replaces each linear layer whose weight torchao quantized by an ``NVFP4Linear``, in place; returns their names.

    input_rule: the rule by which activations are quantized, with their calibrated scale if torchao has one; None: they
    stay in 16 bits, whatever torchao would do. backend: that of the layers.

    Raises:
        OperandError: the model has no such layer.
    """
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and is_torchao(module.weight)
    ]
    if not found:
        raise OperandError.of("model", got="no linear layer with an NVFP4Tensor", expected="one that torchao quantized")
    for name in found:
        old = model.get_submodule(name)
        input_global_scale = old.weight.act_per_tensor_scale
        made = NVFP4Linear(
            operand(old.weight),
            None if old.bias is None else old.bias.detach(),
            in_features=old.in_features,
            input_rule=input_rule,
            input_global_scale=None if input_global_scale is None else input_global_scale.float().reshape(()),
            backend=backend,
        )
        model.set_submodule(name, made.requires_grad_(False).train(old.training).prepare())
    return found


def dispatch(tensor_class: type | None = None) -> None:
    """Makes linear layers whose weights alone are NVFP4 use this package's product for 16-bit x.

    torchao would decode the weight in each call. The model and its tensors stay torchao's. The first call with a weight
    packs it, beside its own bytes (``convert`` keeps one copy). All other calls stay with torchao, and so do calls that
    torch traces. tensor_class: by default torchao's ``NVFP4Tensor``.
    """
    if tensor_class is None:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

        tensor_class = NVFP4Tensor
    table = tensor_class._ATEN_OP_TABLE[tensor_class]
    for op, (x, weight, bias) in _PRODUCTS.items():
        theirs = table[op]
        if not isinstance(theirs, _Product):
            table[op] = _Product(theirs, x, weight, bias)
    transpose = torch.ops.aten.t.default
    if not isinstance(table[transpose], _Transpose):
        table[transpose] = _Transpose(table[transpose])


_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.linear.default: (0, 1, 2), _ATEN.mm.default: (0, 1, None), _ATEN.addmm.default: (1, 2, 0)}
"""The operators that multiply, and which of their arguments are x, the weight and a bias. Linear layers call the first
in inference mode, else one of the others with the weight transposed."""


@dataclass(frozen=True)
class _Transpose:
    """torchao's transposition; its result remembers the tensor that it transposes."""

    theirs: Callable[..., Any]

    def __call__(self, func: Any, types: Any, args: tuple, kwargs: Any) -> Any:
        made = self.theirs(func, types, args, kwargs)
        setattr(made, _ORIGIN, args[0])
        return made


@dataclass(frozen=True)
class _Product:
    """A product, torchao's or ours. x, weight, bias: the positions of these arguments."""

    theirs: Callable[..., Any]
    x: int
    weight: int
    bias: int | None

    def __call__(self, func: Any, types: Any, args: tuple, kwargs: Any) -> Any:
        x, weight = args[self.x], args[self.weight]
        prepared = None if kwargs else _packed(x, weight, func is _ATEN.linear.default)
        if prepared is None:
            return self.theirs(func, types, args, kwargs)
        bias = args[self.bias] if self.bias is not None and len(args) > self.bias else None
        y = gemm(x.reshape(-1, prepared.k).contiguous(), prepared).reshape(*x.shape[:-1], prepared.rows)
        return y if bias is None else y + bias


def _packed(x: torch.Tensor, weight: Any, rows: bool) -> PreparedWeight | None:
    """The weight, packed for x; None if torchao must multiply. rows: whether the weight is (N, K), else (K, N)."""
    origin = weight if rows else getattr(weight, _ORIGIN, None)
    if torch.compiler.is_compiling() or origin is None or not is_torchao(origin) or origin.act_quant_kwargs is not None:
        return None
    data = origin.qdata
    if type(x) not in PLAIN or x.dtype not in (torch.bfloat16, torch.float16) or x.numel() == 0:
        return None
    if data.ndim != 2 or not data.is_contiguous() or is_recorded(x) or is_recorded(data):
        return None
    if resolve("auto", x.device).backend == "reference":
        return None
    parts = data, origin.scale
    made_of = (x.dtype, *((part.data_ptr(), 0 if part.is_inference() else part._version) for part in parts))
    kept = getattr(origin, _KEPT, None)
    if kept is None or kept[0] != made_of:
        kept = made_of, prepare_weight(operand(origin), dtype=x.dtype)
        setattr(origin, _KEPT, kept)
    return kept[1]

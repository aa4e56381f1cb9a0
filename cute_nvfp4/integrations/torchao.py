"""Models that torchao quantized to NVFP4, on this package's layers: the same bytes, and no decoding in each forward.

torchao's ``NVFP4Tensor`` (torchao 0.18, ``torchao.prototype.mx_formats``) has packed E2M1 ``qdata`` (N, K / 2),
``scale`` in E4M3, swizzled as the blocked layout of this package or row-major, and a global scale
``per_tensor_scale``, or none.
Nothing here imports torchao: its tensors are known by these attributes.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.runtime.backend import Backend

_PARTS = ("qdata", "scale", "per_tensor_scale", "is_swizzled_scales", "act_per_tensor_scale", "act_quant_kwargs")


def is_torchao(weight: Any) -> bool:
    """Whether a tensor is torchao's ``NVFP4Tensor``."""
    return type(weight).__name__ == "NVFP4Tensor" and all(hasattr(weight, part) for part in _PARTS)


def operand(weight: Any) -> BlockScaledTensor:
    """An ``NVFP4Tensor`` (N, K) as an operand that shares its memory.

    Raises:
        OperandTypeError: another tensor.
        OperandError: a transposed or stacked one, or memory that operands cannot have.
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
    """Puts an ``NVFP4Linear`` in the place of each linear layer whose weight torchao quantized, in place: their names.

    input_rule: how activations are quantized, by their calibrated scale where torchao has one; None leaves them in 16
    bits, whatever torchao would do. backend: of the layers.

    Raises:
        OperandError: no such layer.
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
        given = old.weight.act_per_tensor_scale
        made = NVFP4Linear(
            operand(old.weight),
            None if old.bias is None else old.bias.detach(),
            in_features=old.in_features,
            input_rule=input_rule,
            input_global_scale=None if given is None else given.float().reshape(()),
            backend=backend,
        )
        model.set_submodule(name, made.requires_grad_(False).train(old.training).prepare())
    return found

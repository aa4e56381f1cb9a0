"""``NVFP4Linear``: a linear layer with NVFP4 weights, made from ``torch.nn.Linear`` or from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.gemm import gemm
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.quantization.rules import resolve_rule
from cute_nvfp4.runtime.backend import Backend
from cute_nvfp4.scale_layout import blocked_flat, to_blocked


class NVFP4Linear(torch.nn.Module):
    """y = x · Wᵀ + bias with W (N, K) in NVFP4 and x quantized to NVFP4 on the way in.

    Weights are buffers (``weight_data``, ``weight_scale`` blocked and flat, ``weight_global_scale``), so that they
    move and save with the module and no optimizer sees them. The gradient flows to x and to the bias, through the
    weights as they are (straight-through).

    input_rule: how x is quantized; None leaves x as it is, and decodes the weights for each call instead.
    input_global_scale: x's, calibrated; None computes it for each batch.
    input_scale: (K,) multiplies x first (what AWQ moved out of the weights); None for none.
    backend: of the product, as for ``gemm``. With "reference" x is quantized by torch, too, else by "auto".
    """

    def __init__(
        self,
        weight: BlockScaledTensor,
        bias: torch.Tensor | None = None,
        *,
        in_features: int | None = None,
        input_rule: str | None = "max",
        input_global_scale: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if weight.format is not NVFP4 or weight.is_batched:
            got = f"{weight.format.name}, {'batched' if weight.is_batched else 'a matrix'}"
            raise OperandError.of("weight", got=got, expected="a matrix in nvfp4")
        if input_rule is not None and resolve_rule(input_rule, NVFP4).choice == "hessian":
            raise OperandError.of("input_rule", got="'hessian'", expected="a rule that needs only x")
        self.in_features = weight.k if in_features is None else in_features
        self.out_features = weight.rows
        self.input_rule = input_rule
        self.backend = backend
        if not weight.k - NVFP4.block < self.in_features <= weight.k:
            raise OperandError.of("in_features", got=self.in_features, expected=f"{weight.k}, less its padding")
        for name, tensor, size in (("bias", bias, self.out_features), ("input_scale", input_scale, self.in_features)):
            if tensor is not None and tuple(tensor.shape) != (size,):
                raise OperandError.of(name, got=f"shape {tuple(tensor.shape)}", expected=(size,))
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        self.register_buffer("weight_data", weight.data.view(torch.uint8))
        self.register_buffer("weight_scale", _flat_scale(weight))
        self.register_buffer("weight_global_scale", weight.global_scale)
        self.register_buffer("input_global_scale", input_global_scale)
        self.register_buffer("input_scale", input_scale)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        rule: str = "max",
        *,
        input_rule: str | None = "max",
        input_global_scale: torch.Tensor | None = None,
        backend: Backend = "auto",
        **options: Any,
    ) -> NVFP4Linear:
        """From a layer of torch's, whose weight is quantized by ``rule`` and ``options``, those of ``quantize``.

        in_features need not be a multiple of 16. ``linear`` keeps its own tensors.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise OperandTypeError.of("linear", got=type(linear).__name__, expected="torch.nn.Linear")
        for name in ("transpose", "axis", "hadamard", "scale_layout", "format"):
            if name in options:
                raise OperandError.of("option of from_linear", got=repr(name), expected="one of the weight's")
        weight = quantize(linear.weight, "nvfp4", rule, pad=True, **options)
        bias = linear.bias
        if bias is not None:
            bias = bias.detach().clone().requires_grad_(bias.requires_grad)
        return cls(
            weight,
            bias,
            in_features=linear.in_features,
            input_rule=input_rule,
            input_global_scale=input_global_scale,
            backend=backend,
        )

    @property
    def weight(self) -> BlockScaledTensor:
        """The weight as an operand, (N, K) with K padded to a multiple of 16."""
        return BlockScaledTensor(self.weight_data, self.weight_scale, self.weight_global_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N), in the dtype of x."""
        if x.shape[-1] != self.in_features:
            raise OperandError.of("x", got=f"shape {tuple(x.shape)}", expected=f"(…, {self.in_features})")
        if self.input_scale is not None:
            x = x * self.input_scale.to(x.dtype)
        flat = x if x.ndim == 2 else x.reshape(-1, self.in_features)
        # where no gradient of x is wanted, nothing is paid for one
        y = _Product.apply(flat, self) if x.requires_grad and torch.is_grad_enabled() else self._multiply(flat)
        y = y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return x.new_empty((0, self.out_features))
        if self.input_rule is None:
            return torch.nn.functional.linear(x, self._decoded(x.dtype))
        scale = "auto" if self.input_global_scale is None else self.input_global_scale
        quantizer = "reference" if self.backend == "reference" else "auto"
        a = quantize(x, "nvfp4", self.input_rule, global_scale=scale, pad=True, backend=quantizer)
        return gemm(a, self.weight, out_dtype=x.dtype, backend=self.backend)

    def _decoded(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.dequantize(dtype)[:, : self.in_features]

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"input_rule={self.input_rule!r}, backend={self.backend!r}"
        )


class _Product(torch.autograd.Function):
    """x · Wᵀ, straight-through in x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: NVFP4Linear) -> torch.Tensor:
        ctx.layer = layer
        return layer._multiply(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy @ ctx.layer._decoded(dy.dtype), None


def _flat_scale(weight: BlockScaledTensor) -> torch.Tensor:
    """The blocked scales' bytes in one dimension, without a copy where they are blocked already."""
    blocked = weight.blocked_scale() if weight.scale_layout == "blocked" else to_blocked(weight.rowmajor_scale())
    return blocked_flat(blocked.view(torch.uint8))

"""Quantization inside autograd: fake quantization, and a linear layer whose three products have quantized operands.

Rounding has no useful derivative. Both use the straight-through estimator (Bengio, Léonard and Courville, 2013), in
which quantization is the identity in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.dequantize import dequantize
from cute_nvfp4.ops.gemm import gemm
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.quantization.hadamard import Hadamard, resolve_hadamard
from cute_nvfp4.runtime.backend import Backend


def fake_quantize(x: torch.Tensor, format: str = "nvfp4", rule: str = "max", **options: Any) -> torch.Tensor:
    """``x`` quantized and dequantized, in its shape and dtype; its gradient is that of the identity.

    options: those of ``quantize`` except ``scale_layout``, ``backend`` and ``pad`` (padding is added and dropped). A
    rotation is undone, and blocks along another axis leave the shape as it is.
    """
    for name in ("scale_layout", "backend", "pad"):
        if name in options:
            raise OperandError.of("option of fake_quantize", got=repr(name), expected="one that changes values")
    return _FakeQuantize.apply(x, format, rule, options)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, format: str, rule: str, options: dict[str, Any]) -> torch.Tensor:
        # the options name the axis; quantize moves it last, and only moving it back is left to do
        axis = -2 if options.get("transpose") else options.get("axis")
        axis = -1 if axis is None else axis
        q = quantize(x, format, rule, pad=True, scale_layout="rowmajor", **options)
        values = dequantize(q, torch.float32, k=x.shape[axis], hadamard=options.get("hadamard"))
        values = values.reshape(-1) if x.ndim == 1 else values
        # the view comes last: torch.compile of torch 2.11 loses the gradient of a result that is also an intermediate
        # one, such as that of a conversion to the same dtype (pytorch/pytorch#180642)
        return values.to(x.dtype).movedim(-1, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient, None, None, None


@dataclass(frozen=True)
class LinearRecipe:
    """How the operands of a linear layer's products are quantized to NVFP4.

    rule, weight_rule, gradient_rule: the rules for activations, weights and gradients.
    weight_2d: whether weights have 16 × 16 blocks, so that the forward and the backward pass see the same weights.
    gradient_rounding: "stochastic" keeps the expected gradient; its random bits come from ``generator``, or from
        torch's default generator.
    hadamard: rotates both operands of the weight gradient's product along the batch.
    backend: that of the products, as for ``gemm``. With "reference" torch also quantizes operands, else "auto" does.

    The defaults are those of NVIDIA, "Pretraining Large Language Models with NVFP4" (2025).
    """

    rule: str = "max"
    weight_rule: str = "max"
    gradient_rule: str = "max"
    weight_2d: bool = True
    gradient_rounding: str = "stochastic"
    hadamard: Hadamard | int | None = 0
    generator: torch.Generator | None = None
    backend: Backend = "auto"

    def _quantize(self, x: torch.Tensor, rule: str, **options: Any) -> BlockScaledTensor:
        quantizer = "reference" if self.backend == "reference" else "auto"
        return quantize(x, "nvfp4", rule, pad=True, backend=quantizer, **options)

    def _weight(self, weight: torch.Tensor, **options: Any) -> BlockScaledTensor:
        return self._quantize(weight, self.weight_rule, block_2d=self.weight_2d, **options)

    def _gradient(self, x: torch.Tensor, **options: Any) -> BlockScaledTensor:
        generator = self.generator if self.gradient_rounding == "stochastic" else None
        return self._quantize(x, self.gradient_rule, rounding=self.gradient_rounding, generator=generator, **options)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """y = x · Wᵀ for x (M, K) and W (N, K): (M, N), quantized along K."""
        a = self._quantize(x, self.rule)
        return gemm(a, self._weight(weight), out_dtype=x.dtype, backend=self.backend)

    def dgrad(self, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dx = dy · W for dy (M, N) and W (N, K): (M, K), quantized along N."""
        a = self._gradient(dy)
        return gemm(a, self._weight(weight, transpose=True), out_dtype=dy.dtype, backend=self.backend)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dW = dyᵀ · x for dy (M, N) and x (M, K): (N, K), quantized along M, both rotated."""
        rotation = resolve_hadamard(self.hadamard)
        a = self._gradient(dy, transpose=True, hadamard=rotation)
        b = self._quantize(x, self.rule, transpose=True, hadamard=rotation)
        return gemm(a, b, out_dtype=x.dtype, backend=self.backend)


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, recipe: LinearRecipe | None = None
) -> torch.Tensor:
    """x · Wᵀ + bias for x (…, K), W (N, K) and bias (N,): (…, N); all three products have quantized operands.

    It is differentiable in x, W and bias. Sizes need not be multiples of 16. The bias is added, and its gradient
    summed, in the dtype of x.
    """
    if x.shape[-1] != weight.shape[-1] or weight.ndim != 2:
        raise OperandError.of(
            "x and weight", got=f"shapes {tuple(x.shape)} and {tuple(weight.shape)}", expected="(…, K), (N, K)"
        )
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] == 0:
        # nothing to quantize: an empty product, which autograd can follow
        return torch.nn.functional.linear(x, weight, bias)
    y = _QuantizedLinear.apply(flat, weight, LinearRecipe() if recipe is None else recipe)
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: LinearRecipe) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return recipe.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        recipe: LinearRecipe = ctx.recipe
        dx = recipe.dgrad(dy, weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = recipe.wgrad(dy, x).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None

"""``NVFP4Linear`` and ``MXFP4Linear``: linear layers with 4-bit weights, made from ``torch.nn.Linear`` or from a
checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import MXFP4, NVFP4, Format
from cute_nvfp4.nn.explain import KernelChoice, explain_product
from cute_nvfp4.nn.held_weight import HALVES, HeldWeight
from cute_nvfp4.nn.input_rules import E4M3, check_input_rule, takes_4_bits, takes_fp8
from cute_nvfp4.nn.shard import LinearShard
from cute_nvfp4.operand import PLAIN, BlockScaledTensor, row_alignment
from cute_nvfp4.ops.dispatch import is_recorded, recording
from cute_nvfp4.ops.gemm import gemm
from cute_nvfp4.ops.gemv import gemv
from cute_nvfp4.ops.prepare_weight import prepare_weight
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.ops.row_product import RowProduct, row_product
from cute_nvfp4.row_scaled import by_rows
from cute_nvfp4.runtime.backend import Backend
from cute_nvfp4.runtime.simulating import surroundings


class NVFP4Linear(HeldWeight):
    """A linear layer, y = x · Wᵀ + bias, with W (N, K) in NVFP4; x is quantized to NVFP4 in each call.

    Weights are buffers (``weight_data``, ``weight_scale`` blocked and flat, ``weight_global_scale``), so they move and
    save with the module, and no optimizer sees them. The gradient flows to x and to the bias, through the weights as
    they are (straight-through).

    ``gemv`` multiplies a single row of x, on every architecture: it reads the weight once, and needs no tensor cores.
    ``gemm`` multiplies more rows. Both sum in float32, in different orders, so a row alone and the same row among
    others may differ in the last bits.

    On Hopper, products read the weight repacked (``prepare_weight``); on Blackwell, those of 16-bit x do. ``prepare``
    replaces the checkpoint's bytes by it, and ``state_dict`` unpacks them again: there is one copy. A layer that was
    not prepared keeps the repacked weight beside its own from the first call that needs it: as many bytes again, which
    are not saved.

    input_rule: how x is quantized; None leaves x as it is (W4A16), in one launch for bfloat16 and float16 if kernels
    run, else with weights that are decoded in each call. "fp8": rows become E4M3, and so does the weight (W4A8); on
    Hopper 16-bit x takes one call, elsewhere exact torch runs. "auto": None for few rows of x and "fp8" for many,
    whichever is faster; on Hopper the layer then holds the weight twice, each in four bits.
    input_global_scale: the calibrated global scale of x; None: each batch computes its own.
    input_scale: (K,), multiplies x first (what AWQ moved out of the weights), or None.
    backend: that of the product, as for ``gemm``. With "reference" torch also quantizes x, otherwise "auto" does.

    ``stored`` has the layout of the checkpoint that a layer was read from, and its small tensors (``nn.layouts``).
    ``shard`` is set if the layer has a shard of its weight (``nn.parallel``): it exchanges data with the other ranks.
    """

    stored: tuple[str, dict[str, torch.Tensor]] = ("", {})
    shard: LinearShard | None = None

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
        if weight.format is not self.format or weight.is_batched:
            got = f"{weight.format.name}, {'batched' if weight.is_batched else 'a matrix'}"
            raise OperandError.of("weight", got=got, expected=f"a matrix in {self.format.name}")
        check_input_rule(input_rule, self.format)
        super().__init__(weight, weight.k if in_features is None else in_features, input_rule, backend)
        if input_global_scale is not None and self.format is not NVFP4:
            raise OperandError.of("input_global_scale", got="one", expected=f"None: {self.format.name} has none")
        if not weight.k - self.format.block < self.in_features <= weight.k:
            raise OperandError.of("in_features", got=self.in_features, expected=f"{weight.k}, less its padding")
        for name, tensor, size in (("bias", bias, self.out_features), ("input_scale", input_scale, self.in_features)):
            if tensor is not None and tuple(tensor.shape) != (size,):
                raise OperandError.of(name, got=f"shape {tuple(tensor.shape)}", expected=(size,))
        parameter = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        self.register_parameter("bias", parameter)
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
        """Converts a layer of torch. ``rule`` and ``options``, which are those of ``quantize``, quantize its weight.

        in_features need not be a multiple of 16. ``linear`` keeps its tensors.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise OperandTypeError.of("linear", got=type(linear).__name__, expected="torch.nn.Linear")
        for name in ("transpose", "axis", "hadamard", "scale_layout", "format"):
            if name in options:
                raise OperandError.of("option of from_linear", got=repr(name), expected="one of the weight's")
        weight = quantize(linear.weight, cls.format.name, rule, pad=True, **options)
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) to (…, N), in the dtype of x."""
        factors, bias, shard = self._buffers["input_scale"], self._parameters["bias"], self.shard
        if shard is not None:
            x = shard.entered(x)
        shape = x.shape
        if shape[-1] != self.in_features:
            raise OperandError.of("x", got=f"shape {tuple(shape)}", expected=f"(…, {self.in_features})")
        if factors is not None:
            x = x * factors.to(x.dtype)
        flat = x if len(shape) == 2 else x.reshape(-1, self.in_features)
        # a call that needs no gradient of x does not pay for autograd
        y = _Product.apply(flat, self) if x.requires_grad and torch.is_grad_enabled() else self._multiply(flat)
        y = y if len(shape) == 2 else y.reshape(*shape[:-1], self.out_features)
        if shard is None:
            return y if bias is None else y + bias.to(y.dtype)
        y = shard.summed(y)
        return shard.left(y if bias is None else y + bias.to(y.dtype))

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, self.out_features))
        if takes_fp8(self.input_rule, rows):
            return self._multiply_in_fp8(x)
        if self._left_in_16_bits(x):
            if takes_4_bits(self.input_rule):
                x = quantize(x, self.format.name, self.input_rule, pad=True).dequantize(x.dtype)[:, : self.in_features]
            prepared = self._prepared(x, x.dtype) if x.dtype in HALVES else None
            if prepared is None:
                return torch.nn.functional.linear(x, self._decoded(x.dtype))
            return gemm(self._aligned(x, prepared.k), prepared, backend=self.backend)
        scale = self._buffers["input_global_scale"]
        weight, planned = self._checked() if self._released is None else (None, None)
        if rows == 1 and scale is not None and planned is not None and not recording():
            product = self._row_product(x, scale, weight, planned)
            if product is not None:
                return product(x, scale)
        quantizer = "reference" if self.backend == "reference" else "auto"
        options = {"pad": True, "backend": quantizer}
        if scale is not None:
            options["global_scale"] = scale
        elif self.shard is not None and self.format is NVFP4:
            options["global_scale"] = self.shard.global_scale(x, self.input_rule)
        a = quantize(x, self.format.name, self.input_rule, **options)
        if rows == 1 and weight is not None and self.format is NVFP4:
            return gemv(weight, a, out_dtype=x.dtype, backend=self.backend).unsqueeze(0)
        prepared = self._prepared(x, torch.float16)
        return gemm(a, self.weight if prepared is None else prepared, out_dtype=x.dtype, backend=self.backend)

    def _left_in_16_bits(self, x: torch.Tensor) -> bool:
        """Whether products read x in 16 bits: x is not quantized, or on Hopper to MXFP4, whose values fit 16 bits."""
        quantized = takes_4_bits(self.input_rule)
        if not quantized or self.format is NVFP4:
            return not quantized
        return self._released is not None or (
            not torch.compiler.is_dynamo_compiling() and self._reads_prepared(x.device, torch.bfloat16)
        )

    def _multiply_in_fp8(self, x: torch.Tensor) -> torch.Tensor:
        prepared, backend = self._prepared(x, E4M3), self.backend
        if prepared is None:
            prepared = prepare_weight(self.weight, dtype=E4M3)
        if not (torch.compiler.is_dynamo_compiling() or self._reads_prepared(x.device, E4M3)):
            backend = "reference"
        rows = self._aligned(x, prepared.k)
        return gemm(rows if x.dtype in HALVES else by_rows(rows), prepared, out_dtype=x.dtype, backend=backend)

    def explain_backend(self, rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> KernelChoice:
        """What a call with ``rows`` rows of ``dtype`` runs, and why: ``(backend, kernel, reason)``."""
        return explain_product(
            rows,
            self.out_features,
            self.in_features,
            dtype,
            input_rule=self.input_rule,
            backend=self.backend,
            device=self._weight_device(),
            released=self._released,
            block=self.format.block,
        )

    def _aligned(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """x (M, k) with rows at multiples of 16 bytes, as TMA needs it."""
        if k != self.in_features:
            return torch.nn.functional.pad(x, (0, k - self.in_features))
        x = x.contiguous()
        if is_recorded(x) or row_alignment(x, 16) >= 16:
            return x
        return x.clone()

    def _row_product(
        self, x: torch.Tensor, scale: torch.Tensor, weight: BlockScaledTensor, planned: dict[tuple, RowProduct | None]
    ) -> RowProduct | None:
        """The call planned for rows like x (1, K); None if the public functions must run."""
        factor = weight.global_scale
        if type(x) not in PLAIN or scale.requires_grad or (factor is not None and factor.requires_grad):
            return None
        # a row has one stride that matters, the second
        key = (
            x.dtype,
            x.stride(1),
            x.device,
            x.data_ptr() & 31,
            self.input_rule,
            self.backend,
            surroundings(not x.is_cuda),
        )
        if key not in planned:
            planned[key] = row_product(x, scale, weight, self.input_rule, self.backend)
        return planned[key]

    def _decoded(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.dequantize(dtype)[:, : self.in_features]

    def extra_repr(self) -> str:
        """The text that ``repr`` shows between parentheses."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"input_rule={self.input_rule!r}, backend={self.backend!r}"
        )


class MXFP4Linear(NVFP4Linear):
    """A linear layer with W in MXFP4: each 32 values share a power of two, and there is no global scale.

    x stays as it is, or is quantized to MXFP4.
    """

    format = MXFP4


def linear_class(format: Format) -> type[NVFP4Linear]:
    """The class of layers whose weight is in ``format``."""
    return MXFP4Linear if format is MXFP4 else NVFP4Linear


class _Product(torch.autograd.Function):
    """x · Wᵀ; its gradient with respect to x is straight-through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: NVFP4Linear) -> torch.Tensor:
        ctx.layer = layer
        return layer._multiply(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy @ ctx.layer._decoded(dy.dtype), None

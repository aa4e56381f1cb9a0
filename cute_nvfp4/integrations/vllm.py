"""A plug-in for vLLM: its NVFP4 linear layers on Hopper run this package's products with prepared weights (W4A16).

vLLM calls ``register`` in each of its processes (entry point ``vllm.general_plugins``). It does nothing unless the
environment has ``CUTE_NVFP4_VLLM=1``. The contract is that of ``vllm.model_executor.kernels.linear`` in vLLM 0.30 to
0.33; tests check it against stand-ins for those classes, a script against those of a wheel. No model was served with
it. For weight-only checkpoints vLLM uses Marlin unconditionally.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from cute_nvfp4.errors import CuteNvfp4Error, OperandError
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.gemm import gemm
from cute_nvfp4.ops.prepare_weight import prepare_weight
from cute_nvfp4.prepared_weight import PreparedWeight

SWITCH = "CUTE_NVFP4_VLLM"
_CLOSE = 2.0**-6
"""The largest relative distance between a product and the decoded weight's, in 16 bits, that a self-check accepts."""
_NAME = "CuteNvfp4LinearKernel"


def register() -> None:
    """Puts the kernel before all others of vLLM that multiply NVFP4 weights on CUDA, if the switch is on.

    Raises:
        CuteNvfp4Error: this vLLM has another registry than the plug-in was written for.
    """
    if os.environ.get(SWITCH, "0") != "1":
        return
    try:
        from vllm.model_executor.kernels import linear
        from vllm.platforms import PlatformEnum
    except ImportError as error:
        raise CuteNvfp4Error.of(
            "vLLM", got=str(error), expected="0.30 or later", hint=f"{SWITCH}=0 turns this plug-in off."
        ) from error
    kernels = getattr(linear, "_POSSIBLE_NVFP4_KERNELS", {}).setdefault(PlatformEnum.CUDA, [])
    if any(kernel.__name__ == _NAME for kernel in kernels):
        return
    made = kernel_class()
    linear.register_linear_kernel(made, PlatformEnum.CUDA, "nvfp4")
    if made not in kernels:
        expected, hint = "one that register_linear_kernel appends to", f"{SWITCH}=0 turns this plug-in off."
        raise CuteNvfp4Error.of("registry of vLLM", got="another", expected=expected, hint=hint)
    # vLLM uses the first kernel that can run, which would be Marlin
    kernels.insert(0, kernels.pop(kernels.index(made)))


def kernel_class() -> type:
    """The kernel's class, a subclass of vLLM's."""
    from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel

    class CuteNvfp4LinearKernel(NvFp4LinearKernel):
        """Multiplies 16-bit x (…, K) by a weight that is prepared when it is loaded."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            if compute_capability is None:
                if not torch.cuda.is_available():
                    return False, "no CUDA device"
                major, minor = torch.cuda.get_device_capability()
                compute_capability = 10 * major + minor
            return (True, None) if compute_capability == 90 else (False, f"sm_{compute_capability} is not Hopper")

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            prepare_layer(layer)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return product(layer, x, bias)

    return CuteNvfp4LinearKernel


def prepare_layer(layer: torch.nn.Module) -> None:
    """Replaces vLLM's ``weight`` by the prepared weight, after checking a product of it.

    layer: has weight uint8 (N, K / 2), weight_scale e4m3 (N, K / 16), and weight_global_scale, which multiplies.

    Raises:
        OperandError: the tensors have another form, or a product differs from the decoded weight's.
    """
    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    dtype = getattr(layer, "params_dtype", torch.bfloat16)
    data, scale = layer.weight.data, layer.weight_scale.data
    if tuple(data.shape) != (n, k // 2) or tuple(scale.shape) != (n, k // 16):
        got = f"weight {tuple(data.shape)}, scales {tuple(scale.shape)}"
        raise OperandError.of("layer of vLLM", got=got, expected=f"({n}, {k // 2}) and ({n}, {k // 16}), not padded")
    factor = layer.weight_global_scale.data.to(torch.float32).reshape(())
    weight = BlockScaledTensor(data.contiguous(), scale.contiguous().view(torch.uint8), factor)
    prepared = prepare_weight(weight, dtype=dtype)
    _check(weight, prepared)
    made = {"weight": prepared.packed, "weight_scale": scale.new_empty(0), "weight_global_scale": factor}
    for name, tensor in made.items():
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))


def product(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (…, K) · weightᵀ + bias: (…, N), in the dtype of x, which must be that of the prepared weight."""
    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    weight = PreparedWeight(layer.weight, n, k, x.dtype, layer.weight_global_scale)
    y = gemm(x.reshape(-1, k), weight).reshape(*x.shape[:-1], n)
    return y if bias is None else y + bias


def _check(weight: BlockScaledTensor, prepared: PreparedWeight) -> None:
    """Compares the product of four rows with that of the decoded weight; raises if they differ."""
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(4, weight.k, device=weight.device, generator=generator).to(prepared.dtype)
    exact = x.float() @ weight.dequantize().T
    distance = (gemm(x, prepared).float() - exact).norm() / exact.norm().clamp(min=torch.finfo(torch.float32).tiny)
    if not distance <= _CLOSE:
        expected = f"at most {_CLOSE}"
        raise OperandError.of("self-check of a layer of vLLM", got=f"distance {float(distance):.3g}", expected=expected)

"""``NVFP4Linear`` of one row by the kernels: two launches, on every architecture."""

from __future__ import annotations

import backends
import pytest
import torch

from cute_nvfp4 import NVFP4Linear, quantize, simulating

pytestmark = pytest.mark.kernels


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("arch", backends.architectures())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_one_row(arch: str, dtype: torch.dtype, device: torch.device) -> None:
    """The product of what is quantized, rounded once; then the bias is added. K is no multiple of 32."""
    weight = quantize(normal(136, 208, seed=0).to(device))
    bias = normal(136, seed=1).to(device)
    layer = NVFP4Linear(weight, bias, input_global_scale=torch.tensor(0.002, device=device)).requires_grad_(False)
    x = normal(1, 1, 208, seed=2).to(device, dtype)
    with simulating(arch) as runs:
        y = layer(x)
    if device.type == "cpu":
        assert [run.name for run in runs] == ["quantize", "gemv"]
    a = quantize(x[0].cpu(), global_scale=torch.tensor(0.002), backend="reference").dequantize(torch.float64)
    exact = a @ weight.dequantize(torch.float64).cpu().T
    unit = torch.finfo(dtype).eps
    assert y.shape == (1, 1, 136) and y.dtype is dtype
    error = (y[0].double().cpu() - exact - bias.to(dtype).double().cpu()).abs()
    # float32 sums of products, one rounding of the product and one of the sum
    assert (error <= unit * (exact.abs() + y[0].double().abs().cpu()) + 1e-5).all()

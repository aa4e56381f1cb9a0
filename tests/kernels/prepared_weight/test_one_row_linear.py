"""``NVFP4Linear`` of one row by the kernels: two launches, on every architecture."""

from __future__ import annotations

import pytest
import torch
from support import backends

from cute_nvfp4 import NVFP4Linear, gemv, quantize, simulating
from cute_nvfp4.nn import linear as module

pytestmark = pytest.mark.kernels


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sweep
@pytest.mark.parametrize("arch", backends.architectures())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_one_row(arch: str, dtype: torch.dtype, device: torch.device) -> None:
    """The product of what is quantized, rounded once; then the bias is added. K is no multiple of 32."""
    weight = quantize(normal(136, 208, seed=0).to(device), backend="reference")
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


def test_bits_of_two_calls(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned once for each kind of row, whatever its place in memory; then new weights, and new global scales."""
    plans = []

    def planned(*given: object) -> object:
        plans.append(plan(*given))
        return plans[-1]

    def check() -> None:
        for row in (many[:1], many[2:], wide[:, :96], wide[:, 1:97], wide[:, 2:98], tall.t()[:1], many[0]):
            a = quantize(row.reshape(1, 96), global_scale=layer.input_global_scale)
            want = gemv(layer.weight, a, out_dtype=row.dtype)
            assert layer(row).equal(want if row.ndim == 1 else want[None])

    plan = module.row_product
    monkeypatch.setattr(module, "row_product", planned)
    many, wide = normal(3, 96, seed=3).to(device), normal(1, 128, seed=4).to(device).half()
    tall = normal(96, 2, seed=7).to(device).half()
    weights = [quantize(normal(40, 96, seed=5 + i).to(device), backend="reference") for i in range(2)]
    scale = torch.tensor(0.002, device=device)
    layer = NVFP4Linear(weights[0], input_global_scale=scale)
    assert not layer(many[:1]).equal(layer(many[1:2]))
    check()
    count = len(plans)
    assert count >= 2 and sum(x is not None for x in plans) >= 2
    check()
    layer.load_state_dict(NVFP4Linear(weights[1], input_global_scale=scale).state_dict())
    layer.input_global_scale.fill_(0.004)
    layer.input_global_scale.data = torch.full_like(scale, 0.003)
    check()
    assert len(plans) == count
    layer.weight_global_scale.data = layer.weight_global_scale * 2
    check()
    layer.input_global_scale = torch.full((1,), 0.002, device=device)
    check()
    layer.load_state_dict(NVFP4Linear(weights[0], input_global_scale=scale[None]).state_dict(), assign=True)
    check()
    assert len(plans) == 4 * count


def test_rows_that_need_more_than_two_launches(device: torch.device) -> None:
    """K that is padded, K that is strided, a global scale that is computed: the public functions' way."""
    weight = quantize(normal(40, 70, seed=8).to(device), pad=True, backend="reference")
    layer = NVFP4Linear(weight, in_features=70, input_global_scale=torch.tensor(0.002, device=device))
    x = normal(1, 70, seed=9).to(device)
    a = quantize(x, global_scale=layer.input_global_scale, pad=True)
    assert layer(x).equal(gemv(weight, a, out_dtype=x.dtype)[None])
    weight = quantize(normal(40, 64, seed=8).to(device), backend="reference")
    x = normal(64, 2, seed=9).to(device).t()[:1]
    for scale in (None, torch.tensor(0.002, device=device)):
        layer = NVFP4Linear(weight, input_global_scale=scale)
        a = quantize(x, global_scale="auto" if scale is None else scale)
        assert layer(x).equal(gemv(weight, a, out_dtype=x.dtype)[None])
    with pytest.raises(TypeError, match="float64"):
        layer(x.double())


@pytest.mark.sim_only("architectures change")
def test_another_architecture() -> None:
    """One layer runs what each block asks for, and exact torch where it asks for that."""
    x = normal(1, 64, seed=9)
    layer = NVFP4Linear(quantize(normal(40, 64, seed=8), backend="reference"), input_global_scale=torch.tensor(0.002))
    results = []
    for arch in ("sm_100a", "sm_90a", "sm_100a"):
        with simulating(arch) as runs:
            results.append(layer(x))
        assert [(run.name, run.kernel.arch) for run in runs] == [("quantize", arch), ("gemv", arch)]
    layer.backend = "reference"
    with simulating("sm_100a") as runs:
        results.append(layer(x))
    assert not runs
    for y in results[1:]:
        torch.testing.assert_close(y, results[0], rtol=1e-5, atol=1e-5)

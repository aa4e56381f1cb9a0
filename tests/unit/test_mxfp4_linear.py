"""``MXFP4Linear``: a layer with weights in MXFP4, on every architecture and alone in its packed form."""

from __future__ import annotations

import pytest
import torch

from cute_nvfp4 import quantize, simulating
from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.linear import MXFP4Linear, NVFP4Linear

pytestmark = [pytest.mark.kernels("sm_90a", "sm_100a"), pytest.mark.sim_only("of CPU tensors")]


def made(input_rule: str | None) -> MXFP4Linear:
    torch.manual_seed(0)
    return MXFP4Linear.from_linear(torch.nn.Linear(80, 48), input_rule=input_rule).requires_grad_(False)


def exact(layer: MXFP4Linear, x: torch.Tensor) -> torch.Tensor:
    x = x if layer.input_rule is None else quantize(x, "mxfp4", pad=True).dequantize()[:, : x.shape[1]]
    return x.double() @ layer.weight.dequantize(torch.float64)[:, :80].T + layer.bias.double()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("arch, input_rule", [("sm_90a", None), ("sm_90a", "max"), ("sm_100a", "max")])
def test_products(arch: str, input_rule: str | None, rows: int) -> None:
    """K is padded; on Hopper one copy is left, and its bytes come back."""
    layer, x = made(input_rule), torch.randn(rows, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    want, before = exact(layer, x), {name: y.clone() for name, y in layer.state_dict().items()}
    with simulating(arch) as runs:
        layer.prepare()
        assert (layer.weight_data is None) == (arch == "sm_90a")
        y = layer(x)
        assert runs and layer.explain_backend(rows).backend == "sim"
        after = layer.state_dict()
        assert after.keys() == before.keys() and all(after[name].equal(x) for name, x in before.items())
    assert y.dtype is torch.bfloat16 and (y - want).norm() < 0.01 * want.norm()
    assert not (y.roll(1, -1) - want).norm() < 0.01 * want.norm()


def test_scales_that_packing_moves() -> None:
    """A weight of values far from one: the power of two that is moved out of its scales stays with it."""
    layer, x = made(None), torch.randn(3, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    blocked = layer.weight_scale
    layer.weight_scale = (blocked.int() - 60 * (blocked > 60)).to(torch.uint8)
    layer.bias.zero_()
    want = exact(layer, x)
    with simulating("sm_90a"):
        y = layer.prepare()(x)
        assert layer.weight_prepared_bfloat16_factor is not None
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert compiled(x).equal(y)
        torch._dynamo.reset()
        again = MXFP4Linear(quantize(torch.zeros(48, 80), "mxfp4", pad=True), in_features=80, input_rule=None)
        again.prepare().load_state_dict(layer.state_dict(), strict=False)
    assert (y - want).norm() < 0.01 * want.norm() and want.abs().max() < 1e-10


def test_refused() -> None:
    with pytest.raises(OperandError, match="expected a matrix in mxfp4"):
        MXFP4Linear(quantize(torch.ones(16, 32)))
    with pytest.raises(OperandError, match="expected a matrix in nvfp4"):
        NVFP4Linear(quantize(torch.ones(16, 32), "mxfp4"))
    with pytest.raises(OperandError, match="mxfp4 has none"):
        MXFP4Linear(quantize(torch.ones(16, 32), "mxfp4"), input_global_scale=torch.ones(()))

"""Models that torchao quantized, by a stand-in of its tensor: torchao itself is not installed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import pack, values

from cute_nvfp4 import NVFP4Linear, to_blocked
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.integrations.torchao import convert, operand
from cute_nvfp4.scale_layout import blocked_flat

N, K = 48, 96


class NVFP4Tensor(torch.Tensor):
    """The attributes of torchao's class of that name; its values are a decoded copy."""

    qdata: torch.Tensor
    scale: torch.Tensor
    per_tensor_scale: torch.Tensor | None
    act_per_tensor_scale: torch.Tensor | None
    is_swizzled_scales: bool
    act_quant_kwargs: Any


def weight(swizzled: bool, scaled: bool) -> NVFP4Tensor:
    data, scale, amax = pack(torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
    made = values(data, scale, amax if scaled else 2688.0).as_subclass(NVFP4Tensor)
    made.qdata, made.is_swizzled_scales, made.act_quant_kwargs = data.contiguous(), swizzled, None
    blocked = blocked_flat(to_blocked(scale.view(torch.uint8)[None])).view(torch.float8_e4m3fn).view(-1, 16)
    made.scale = blocked if swizzled else scale
    made.per_tensor_scale = torch.tensor(amax / 2688) if scaled else None
    made.act_per_tensor_scale = torch.tensor([0.002])
    return made


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_the_same_memory(swizzled: bool, scaled: bool) -> None:
    given = weight(swizzled, scaled)
    found = operand(given)
    assert found.data.data_ptr() == given.qdata.data_ptr() and found.scale.data_ptr() == given.scale.data_ptr()
    assert found.scale_layout == ("blocked" if swizzled else "rowmajor")
    torch.testing.assert_close(found.dequantize(), given.as_subclass(torch.Tensor), rtol=1e-6, atol=0)
    # scales of the other layout are other values
    given.is_swizzled_scales = not swizzled
    if swizzled:
        with pytest.raises(RuntimeError):
            operand(given)
    else:
        with pytest.raises(OperandError, match="scale"):
            operand(given)


@pytest.mark.parametrize("rule", [None, "max"])
def test_a_model(rule: str | None) -> None:
    given = weight(True, True)
    linear = torch.nn.Linear(K, N)
    del linear._parameters["weight"]
    linear.weight = given
    model = torch.nn.Sequential(linear, torch.nn.Linear(N, 8)).eval()
    assert convert(model, input_rule=rule) == ["0"]
    layer = model[0]
    assert isinstance(layer, NVFP4Linear) and layer.bias.equal(linear.bias) and type(model[1]) is torch.nn.Linear
    assert layer.weight_data.data_ptr() == given.qdata.data_ptr()
    assert float(layer.input_global_scale) == pytest.approx(0.002)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.linear(x, given.as_subclass(torch.Tensor), linear.bias)
    distance = float((layer(x) - exact).norm() / exact.norm())
    assert distance < 1e-5 if rule is None else 0.01 < distance < 0.2


def test_other_models() -> None:
    with pytest.raises(OperandError, match="no linear layer with an NVFP4Tensor"):
        convert(torch.nn.Sequential(torch.nn.Linear(16, 16)))
    with pytest.raises(OperandTypeError, match="weight: got Tensor"):
        operand(torch.zeros(16, 16))
    given = weight(True, True)
    given.qdata = given.qdata.T
    with pytest.raises(OperandError, match="contiguous"):
        operand(given)

"""Models that torchao quantized, by a stand-in of its tensor; with torchao itself where it is installed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from support.checkpoints import pack, values

from cute_nvfp4 import NVFP4Linear, simulating, to_blocked
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.integrations.torchao import convert, dispatch, operand
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


class Dispatched(torch.Tensor):
    """A tensor of theirs, whose operators a table has: t, mm, addmm, linear and detach."""

    _ATEN_OP_TABLE: ClassVar[dict] = {}
    act_per_tensor_scale = None

    def __new__(cls, qdata: torch.Tensor, *parts: Any) -> Any:
        rows, columns = qdata.shape
        size = (2 * rows, columns) if qdata.stride(0) == 1 else (rows, 2 * columns)
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bfloat16)

    def __init__(
        self, qdata: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, swizzled: bool, kwargs: Any
    ) -> None:
        self.qdata, self.scale, self.per_tensor_scale = qdata, scale, factor
        self.is_swizzled_scales, self.act_quant_kwargs = swizzled, kwargs

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return cls._ATEN_OP_TABLE[cls][func](func, types, args, kwargs or {})


Dispatched.__name__ = "NVFP4Tensor"
THEIRS: list[Any] = []


def theirs(func: Any, types: Any, args: tuple, kwargs: Any) -> torch.Tensor:
    """Their product: remembered, of decoded weights."""
    THEIRS.append(func)
    plain = [x if type(x) is not Dispatched else torch.zeros(x.shape, dtype=args[0].dtype) for x in args]
    return func(*plain, **kwargs)


@pytest.fixture
def table() -> Any:
    aten = torch.ops.aten

    def transposed(func: Any, types: Any, args: tuple, kwargs: Any) -> Dispatched:
        x = args[0]
        return Dispatched(x.qdata.t(), x.scale.t(), x.per_tensor_scale, x.is_swizzled_scales, x.act_quant_kwargs)

    products = dict.fromkeys((aten.linear.default, aten.mm.default, aten.addmm.default), theirs)
    Dispatched._ATEN_OP_TABLE[Dispatched] = {
        aten.t.default: transposed,
        aten.detach.default: lambda *x: x[2][0],
    } | products
    THEIRS.clear()
    dispatch(Dispatched)
    dispatch(Dispatched)


@pytest.mark.kernels
@pytest.mark.sim_only("looks at the simulator's launches")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_linear_of_a_tensor_of_theirs(mode: Any, table: None) -> None:
    """One product, packed once, and again after the bytes changed; float32 and a quantized x are theirs."""
    made = weight(True, True)
    given = Dispatched(made.qdata, made.scale, made.per_tensor_scale, True, None)
    x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    want, bias = x.double() @ made.as_subclass(torch.Tensor).double().T, torch.randn(N).bfloat16()
    with mode(), simulating("sm_90a") as runs:
        y = torch.nn.functional.linear(x, given, bias)
        names = [run.name for run in runs]
        assert y.shape == (2, 3, N) and (y - bias - want).norm() < 0.01 * want.norm()
        torch.nn.functional.linear(x, given)
        assert [run.name for run in runs[len(names) :]] == names[-1:] and not THEIRS
        given.qdata.copy_(given.qdata.roll(1, 0))
        assert (torch.nn.functional.linear(x, given) - want).norm() > 0.5 * want.norm()
        count = len(runs)
        torch.nn.functional.linear(x.float(), given)
        given.act_quant_kwargs = object()
        torch.nn.functional.linear(x, given, bias)
        assert len(runs) == count and len(THEIRS) == 2
    given.act_quant_kwargs = None
    with mode():
        torch.nn.functional.linear(x, given)
    assert len(THEIRS) == 3


@pytest.mark.kernels
@pytest.mark.sim_only("of CPU tensors")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_with_torchao_itself(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is not installed")
    made, tables = theirs.NVFP4Tensor, theirs.NVFP4Tensor._ATEN_OP_TABLE
    w, x = torch.randn(256, 128).bfloat16(), torch.randn(3, 128).bfloat16()
    scale, bias = w.abs().max().float() / 2688, torch.randn(256).bfloat16()
    for swizzled in (False, True):
        given = made.to_nvfp4(w, per_tensor_scale=scale, is_swizzled_scales=swizzled)
        found = operand(given)
        assert found.data.data_ptr() == given.qdata.data_ptr() and found.scale.data_ptr() == given.scale.data_ptr()
        torch.testing.assert_close(found.dequantize(), given.dequantize(torch.float32), rtol=1e-6, atol=0)
        want = torch.nn.functional.linear(x, given, bias)
        with monkeypatch.context() as patched, mode(), simulating("sm_90a") as runs:
            patched.setitem(tables, made, dict(tables[made]))
            dispatch()
            y = torch.nn.functional.linear(x, given, bias)
            torch.nn.functional.linear(x, given, bias)
            assert len(runs) == 3
        assert (y - want).norm() < 0.01 * want.norm()

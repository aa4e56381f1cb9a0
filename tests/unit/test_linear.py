"""``NVFP4Linear``: one row by ``gemv``, and a weight operand that is kept only while it is the buffers'."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

from cute_nvfp4 import NVFP4Linear, gemv, quantize
from cute_nvfp4.nn import linear as module
from cute_nvfp4.ops.gemm import gemm

SCALE = torch.tensor(0.004)


def made(k: int = 64, n: int = 48, seed: int = 0, **options: object) -> NVFP4Linear:
    torch.manual_seed(seed)
    plain = torch.nn.Linear(k, n, bias=options.pop("bias", True))
    return NVFP4Linear.from_linear(plain, input_global_scale=SCALE, **options)


def rows(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(layer: NVFP4Linear, x: torch.Tensor) -> torch.Tensor:
    """In float64, of a fresh operand."""
    weight = torch.nn.functional.linear(
        quantize(x.reshape(-1, layer.in_features), global_scale=SCALE, pad=True).dequantize(torch.float64),
        fresh(layer).dequantize(torch.float64),
    )
    y = weight.reshape(*x.shape[:-1], layer.out_features)
    return y if layer.bias is None else y + layer.bias.double()


def fresh(layer: NVFP4Linear) -> module.BlockScaledTensor:
    return module.BlockScaledTensor(layer.weight_data, layer.weight_scale, layer.weight_global_scale)


def check(layer: NVFP4Linear, x: torch.Tensor) -> None:
    y = layer(x)
    assert y.dtype is x.dtype and y.shape == (*x.shape[:-1], layer.out_features)
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[x.dtype]
    torch.testing.assert_close(y.double(), expected(layer, x), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k,bias", [(64, True), (64, False), (80, True), (70, True)])
def test_one_row(k: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number of dimensions; K is a multiple of 16, or is padded to one."""
    layer = made(k, bias=bias)
    monkeypatch.setattr(module, "gemm", lambda *_, **__: pytest.fail("one row is no matter for gemm"))
    for shape in ((k,), (1, k), (1, 1, k)):
        check(layer, rows(*shape, dtype=dtype))


def test_more_rows_take_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made(), rows(2, 3, 64)
    check(layer, x)
    monkeypatch.setattr(module, "gemv", lambda *_, **__: pytest.fail("several rows are no matter for gemv"))
    a = quantize(x.reshape(6, 64), global_scale=SCALE)
    assert layer(x).equal(gemm(a, layer.weight, out_dtype=x.dtype).reshape(2, 3, 48) + layer.bias)
    assert layer(x[:0]).shape == (0, 3, 48)


def test_what_one_row_calls() -> None:
    """The result is gemv's, as it is; the bias is one addition in the dtype of x."""
    layer, x = made(), rows(1, 64, dtype=torch.bfloat16)
    y = gemv(layer.weight, quantize(x, global_scale=SCALE), out_dtype=torch.bfloat16)
    assert layer(x).equal(y[None] + layer.bias.bfloat16())


def test_the_gradient_of_one_row() -> None:
    layer, x = made(), rows(1, 64).requires_grad_()
    dy = rows(1, 48, seed=2)
    layer(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ layer.weight.dequantize())
    torch.testing.assert_close(layer.bias.grad, dy[0])


def test_the_operand_is_kept() -> None:
    layer = made()
    operand = layer.weight
    layer(rows(1, 64))
    layer(rows(3, 64))
    assert layer.weight is operand


def test_moved() -> None:
    """The next operand is of the new tensors, and the old ones' memory is free at once."""
    layer = made()
    layer(rows(1, 64))
    old = weakref.ref(layer.weight.data)
    torch.nn.Sequential(layer).to("meta")
    gc.collect()
    assert old() is None
    assert layer.weight.device.type == "meta"


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_loaded(assign: bool, swap: bool) -> None:
    """New contents in the same tensors, new tensors, or other tensors' contents swapped in."""
    layer, other, x = made(), made(seed=5), rows(1, 64)
    before = layer(x)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        layer.load_state_dict(other.state_dict(), assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert layer(x).equal(other(x)) and not layer(x).equal(before)
    assert layer.weight.data is layer.weight_data


def test_other_memory_in_the_same_tensor() -> None:
    """``.data =`` changes the tensor and not its identity: a plan for the old memory is not used."""
    layer, other, x = made(), made(k=128, seed=5), rows(1, 64)
    layer(x)
    wide = other.weight_data.clone()
    layer.weight_data.data = wide[:, :32]
    assert layer.weight.key.strides == (64, 0)
    check(layer, x)
    layer.weight_scale.data = made(seed=7).weight_scale
    check(layer, x)


def test_one_buffer_is_replaced() -> None:
    layer, x = made(), rows(1, 64)
    for name in ("weight_data", "weight_scale", "weight_global_scale"):
        layer(x)
        setattr(layer, name, getattr(made(seed=9), name))
        check(layer, x)
    layer.weight_global_scale = None
    check(layer, x)
    # another tensor, in the same memory
    layer.weight_scale = layer.weight_scale.view(torch.float8_e4m3fn)
    assert layer.weight.scale is layer.weight_scale
    layer.weight_data = layer.weight_data[:32]
    layer.weight_scale = layer.weight_scale[:512]
    layer.out_features, layer.bias = 32, None
    check(layer, x)


def test_copies_are_their_own() -> None:
    layer, x = made(), rows(1, 64)
    size = len(pickle.dumps(layer))
    before = layer(x)
    assert len(pickle.dumps(layer)) == size
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(saved, weights_only=False)):
        assert twin(x).equal(before)
        assert twin.weight.data is twin.weight_data and twin.weight.data is not layer.weight.data
        twin.weight_data.zero_()
        assert twin(x).equal(layer.bias[None]) and layer(x).equal(before)


def test_buffers_of_a_functional_call() -> None:
    layer, other, x = made(), made(seed=5), rows(1, 64)
    before = layer(x)
    assert torch.func.functional_call(layer, dict(other.state_dict()), (x,)).equal(other(x))
    assert layer(x).equal(before)


def test_nothing_fake_is_kept() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer, x, mode = made(), rows(1, 64), FakeTensorMode()
    tensors = {name: mode.from_tensor(tensor) for name, tensor in layer.state_dict().items()}
    with mode:
        assert torch.func.functional_call(layer, tensors, (mode.from_tensor(x),)).shape == (1, 48)
    assert layer._kept is None


def test_one_graph_for_one_row() -> None:
    """Traced, before and after an eager call; several rows are another graph."""
    layer = made().requires_grad_(False)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for x in (rows(1, 64), rows(4, 64), rows(1, 64, seed=3)):
        torch.testing.assert_close(compiled(x), layer(x))
    layer.load_state_dict(made(seed=5).state_dict(), assign=True)
    torch.testing.assert_close(compiled(x), layer(x))
    torch._dynamo.reset()

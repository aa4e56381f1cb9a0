"""``NVFP4Linear.prepare`` on sm_90a leaves one copy of the weight, from which everything else comes back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support import backends

from cute_nvfp4 import BlockScaledTensor, NVFP4Linear, gemm, prepare_weight, quantize, simulating
from cute_nvfp4.nn import linear as module

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]
N, K = 72, 144
RULES = pytest.mark.parametrize("rule", ["max", None])


def made(seed: int = 0, rule: str | None = None, k: int = K) -> NVFP4Linear:
    """Codes and scales of every kind: blocks of zeros, negative scales."""
    generator = torch.Generator().manual_seed(seed)
    padded = -(-k // 16) * 16
    data = torch.randint(0, 256, (N, padded // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 0x60, (N, padded // 16), dtype=torch.uint8, generator=generator)
    scale[5, 2], scale[6, 1], scale[7] = 0, 0x80, 0xB0
    device = backends.device()
    weight = BlockScaledTensor(data.to(device), scale.to(device), torch.tensor(0.01, device=device))
    scale_of_x = torch.tensor(0.004, device=device)
    return NVFP4Linear(weight, in_features=k, input_rule=rule, input_global_scale=scale_of_x)


def rows(m: int, k: int = K) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16().to(backends.device())


def state(layer: NVFP4Linear) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@RULES
@pytest.mark.sweep
@pytest.mark.parametrize("k", [K, 70])
def test_one_copy(rule: str | None, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, before = made(rule=rule, k=k), state(made(rule=rule, k=k))
    monkeypatch.setattr(module, "gemv", lambda *_, **__: pytest.fail("gemv reads the weight that was released"))
    monkeypatch.setattr(layer, "_decoded", lambda _: pytest.fail("the weight was decoded"))
    dtype = torch.bfloat16 if rule is None else torch.float16
    with simulating():
        packed = prepare_weight(layer.weight, dtype=dtype)
        assert layer.prepare() is layer and layer.prepare() is layer
        assert layer.weight_data is None and layer.weight_scale is None
        held = [x for x in layer.buffers() if x.numel() > 1 and x.dtype is torch.uint8]
        # nine bytes of each rewritten block: one, one and a row
        assert sorted(x.numel() for x in held) == [9 * (2 + -(-k // 16)), packed.packed.numel()]
        for m in (1, 5, 20):
            x = rows(m, k)
            padded = torch.nn.functional.pad(x, (0, packed.k - k))
            a = padded if rule is None else quantize(padded, global_scale=layer.input_global_scale)
            assert layer(x).equal(gemm(a, packed, out_dtype=torch.bfloat16))
    assert equal(layer.state_dict(), before)


@RULES
def test_saved_and_loaded(rule: str | None) -> None:
    """In the memory that it has, which a captured graph reads; copies are their own."""
    layer, other, x = made(rule=rule), made(seed=1, rule=rule), rows(5)
    with simulating():
        place = next(b for name, b in layer.prepare().named_buffers() if "prepared" in name).data_ptr()
        before = layer(x)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert twin.weight_data is None and twin(x).equal(before) and equal(twin.state_dict(), layer.state_dict())
            twin.load_state_dict(other.state_dict())
            assert layer(x).equal(before)
        layer.load_state_dict(other.state_dict())
        assert layer.weight_data is None and equal(layer.state_dict(), other.state_dict())
        assert next(b for name, b in layer.named_buffers() if "prepared" in name).data_ptr() == place
        assert layer(x).equal(other.prepare()(x)) and not layer(x).equal(before)


def test_x_in_another_dtype() -> None:
    """A weight packed for bfloat16 is decoded for what is not, with the result of the checkpoint's bytes."""
    layer, x = made(), rows(3).half()
    with simulating():
        layer.prepare()
        found = layer(x)
        assert found.dtype is torch.float16
        exact = x.double() @ made().weight.dequantize(torch.float64).T
        torch.testing.assert_close(found.double(), exact, rtol=2**-9, atol=2**-9)
        again = layer.prepare(torch.float16)(x)
        assert layer.weight_data is None and equal(layer.state_dict(), made().state_dict())
        torch.testing.assert_close(again.double(), exact, rtol=2**-9, atol=2**-9)


@pytest.mark.sim_only("runs another architecture")
def test_moved_elsewhere() -> None:
    """The checkpoint's bytes come back where no kernel reads packed ones; before that they are unpacked for a call."""
    layer, other, x = made(rule="fp8", k=160), made(rule="fp8", k=160), rows(4, 160)
    layer.prepare().to("cpu")
    assert layer.weight_data is None
    with simulating("sm_100a"):
        assert layer(x).equal(other(x)) and layer.weight_data is None
        layer.to("cpu")
        assert not any("prepared" in name or "rewritten" in name for name, _ in layer.named_buffers())
        assert equal(layer.state_dict(), other.state_dict()) and layer(x).equal(other(x))


@pytest.mark.sim_only("runs another architecture")
def test_moved_to_blackwell() -> None:
    """Products of x in 16 bits read the same packed weight there; one for FP8 is not read, and goes."""
    layer, both, x = made(), made(rule="auto"), rows(4)
    with simulating("sm_90a"):
        want = layer.prepare()(x)
        both.prepare()
    place = layer.weight_prepared_bfloat16.data_ptr()
    with simulating("sm_100a") as runs:
        torch.testing.assert_close(layer.to("cpu")(x).float(), want.float(), rtol=2**-7, atol=2**-7)
        assert layer.weight_data is None and layer.weight_prepared_bfloat16.data_ptr() == place
        assert both.to("cpu").weight_data is None
        assert not hasattr(both, "weight_prepared_float8_e4m3fn")
        assert both(x).equal(layer(x))
        # the move packed a weight
        assert [run.name for run in runs] == ["stream_gemm", "pack_weight", "stream_gemm", "stream_gemm"]
    assert equal(both.state_dict(), made().state_dict())


def test_the_gradient_of_x() -> None:
    layer, x = made(), rows(20).requires_grad_()
    dy = rows(20, N)
    with simulating():
        layer.prepare()(x).backward(dy)
    assert x.grad.equal(dy @ made().weight.dequantize(torch.bfloat16))

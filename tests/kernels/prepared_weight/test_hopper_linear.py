"""``NVFP4Linear`` on sm_90a: it repacks its weight once, and multiplies with that."""

from __future__ import annotations

import pytest
import torch
from support import backends

from cute_nvfp4 import NVFP4Linear, gemm, prepare_weight, quantize, simulating
from cute_nvfp4.nn import held_weight as module

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]
N = 72


def made(k: int = 144, seed: int = 0, **options: object) -> NVFP4Linear:
    torch.manual_seed(seed)
    plain, device = torch.nn.Linear(k, N, bias=False), backends.device()
    return NVFP4Linear.from_linear(plain.to(device), input_global_scale=torch.tensor(0.004, device=device), **options)


def rows(m: int, k: int = 144, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).to(backends.device())


def close(y: torch.Tensor, exact: torch.Tensor) -> None:
    rounding = 2**-7 if y.dtype is torch.bfloat16 else 2**-10
    torch.testing.assert_close(y.double(), exact, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("m, k, dtype", [(3, 144, torch.bfloat16), (20, 70, torch.float32)], ids=str)
def test_quantized_rows(m: int, k: int, dtype: torch.dtype) -> None:
    layer, x = made(k), rows(m, k, dtype)
    with simulating():
        y = layer(x)
        a = quantize(x, global_scale=layer.input_global_scale, pad=True)
        assert y.equal(gemm(a, prepare_weight(layer.weight, dtype=torch.float16), out_dtype=dtype))
    close(y, a.dequantize(torch.float64) @ layer.weight.dequantize(torch.float64).T)


@pytest.mark.parametrize("m, k, dtype", [(1, 144, torch.bfloat16), (5, 70, torch.float16), (20, 136, torch.float16)])
def test_rows_as_they_are(m: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """W4A16, K padded where it must be; rows anywhere."""
    layer, x = made(k, input_rule=None), rows(m, 2 * k + 1, dtype)[:, 1 : 2 * k + 1 : 2]
    monkeypatch.setattr(layer, "_decoded", lambda _: pytest.fail("the weight was decoded"))
    with simulating():
        y = layer(x)
    close(y, x.double() @ layer.weight.dequantize(torch.float64)[:, :k].T)


def test_the_weight_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its buffers are written to; in the same memory then, which a captured graph reads."""
    layer, other, x = made(), made(seed=1), rows(3)
    names, packs = list(layer.state_dict()), []
    pack = prepare_weight
    monkeypatch.setattr(module, "prepare_weight", lambda *a, **k: packs.append(1) or pack(*a, **k))
    with simulating():
        layer(x)
        first = layer(x)
        place = layer.weight_prepared_float16.data_ptr()
        assert len(packs) == 1 and list(layer.state_dict()) == names
        layer.load_state_dict(other.state_dict())
        assert len(packs) == 2 and layer.weight_prepared_float16.data_ptr() == place
        assert layer(x).equal(other(x)) and not layer(x).equal(first)
        with torch.no_grad():
            layer.weight_data.zero_()
        assert not layer(x).any()
        assert layer.weight_prepared_float16.data_ptr() == place
    assert not hasattr(layer.to("cpu"), "weight_prepared_float16")


@pytest.mark.sim_only("runs another architecture")
@pytest.mark.parametrize("rule", ["max", "fp8"])
def test_nothing_is_packed_elsewhere(rule: str) -> None:
    layer = made(160, input_rule=rule)
    with simulating("sm_90a"):
        layer(rows(3, 160))
    layer.to("cpu")
    with simulating("sm_100a"):
        layer.prepare()(rows(3, 160))
    assert not layer._kept.prepared


@pytest.mark.parametrize("rule, release", [("max", True), ("max", False), (None, True)])
def test_compiled_after_prepare(rule: str | None, release: bool) -> None:
    """One graph, in which nothing is packed or decoded."""
    layer, x, graphs = made(input_rule=rule), rows(3), []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with simulating():
        layer.prepare(release=release)
        y = torch.compile(layer, fullgraph=True, backend=keep)(x)
        assert y.equal(layer(x))
    names = " ".join(str(node.target) for node in graphs[0].graph.nodes)
    assert "packed_gemm" in names and "dequantize" not in names and len(graphs) == 1


def test_compiled_with_other_weights() -> None:
    """A packed weight is that of the buffers it was made of."""
    layer, other, x = made(), made(seed=1), rows(3)
    buffers = dict(other.named_buffers())
    run = torch.compile(lambda x, b: torch.func.functional_call(layer, b, (x,)), fullgraph=True, backend="eager")
    with simulating():
        layer.prepare(release=False)
        assert run(x, buffers).equal(other(x))


def test_the_gradient_of_x() -> None:
    layer, x = made(input_rule=None), rows(20).requires_grad_()
    dy = rows(20, N)
    with simulating():
        layer(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ layer.weight.dequantize(torch.bfloat16))

"""``NVFP4Linear`` and ``MXFP4Linear`` on sm_100a, sm_103a and sm_120a: x in 16 bits is multiplied by a prepared weight,
and nothing is decoded in a call."""

from __future__ import annotations

import pytest
import torch
from support import backends

from cute_nvfp4 import MXFP4, NVFP4, quantize, simulating
from cute_nvfp4.nn.linear import linear_class

ARCHS = ("sm_100a", "sm_103a", "sm_120a")
pytestmark = pytest.mark.kernels(*ARCHS)
N = 136


def made(format: object, k: int, rule: str | None = None) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(k)
    weight = quantize(
        (torch.randn(N, k, generator=generator) / 8).to(backends.device()), format.name, pad=True, backend="reference"
    )
    bias = torch.linspace(-1, 1, N).to(backends.device())
    return linear_class(format)(weight, bias, in_features=k, input_rule=rule)


def rows(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).to(backends.device())


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS, indirect=True)
@pytest.mark.parametrize("prepared", ["one copy", "two copies", "by the call"])
@pytest.mark.parametrize("m, k, dtype", [(1, 144, torch.bfloat16), (5, 72, torch.float16), (40, 144, torch.bfloat16)])
@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda x: x.name)
def test_rows_in_16_bits(
    format: object, m: int, k: int, dtype: torch.dtype, prepared: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = made(format, k), rows(m, k, dtype)
    exact = x.double() @ layer.weight.dequantize(torch.float64)[:, :k].T + layer.bias.double()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    monkeypatch.setattr(layer, "_decoded", lambda _: pytest.fail("the weight was decoded"))
    if prepared != "by the call":
        layer.prepare(dtype, release=prepared == "one copy")
    assert (layer.weight_data is None) == (prepared == "one copy")
    y = layer(x)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-6)
    assert layer(x).equal(y)
    after = layer.state_dict()
    assert before.keys() == after.keys() and all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.sim_only("counts launches")
@pytest.mark.parametrize("arch", ARCHS)
def test_a_call_is_one_launch(arch: str) -> None:
    """The product: no launch decodes the weight, packs it, or rounds x."""
    with simulating(arch) as runs:
        layer = made(NVFP4, 144).prepare()
        for m, name, kernel in ((1, "stream_gemm", "streaming"), (40, "wgmma_gemm", "")):
            before = len(runs)
            layer(rows(m, 144))
            assert [run.name for run in runs[before:]] == [name]
            assert layer.explain_backend(m).kernel.startswith(f"packed {kernel}")


@pytest.mark.sim_only("of CPU tensors")
def test_x_that_is_quantized_reads_the_weight_as_it_is() -> None:
    with simulating("sm_100a") as runs:
        layer = made(NVFP4, 160, "max").prepare()
        layer(rows(5, 160))
        assert layer.weight_data is not None and "gemm" in [run.name for run in runs]

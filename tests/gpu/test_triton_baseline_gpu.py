"""The Triton baseline of ``benchmarks/gemm.py``: decodes every code and scale exactly, and multiplies right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gemm_triton import Config, Weight, configs, gemm, repack, silu_mul

from cute_nvfp4 import BlockScaledTensor

pytestmark = pytest.mark.gpu


def random_weight(n: int, k: int) -> tuple[Weight, torch.Tensor]:
    """A weight of all codes and all finite scales: repacked, and its values in bf16."""
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0, 254, (n, k // 16), dtype=torch.uint8, device="cuda")
    scale += (scale >= 0x7F).to(torch.uint8)  # 254 codes: all but the two NaN
    return repack(data, scale), BlockScaledTensor(data, scale).dequantize(torch.bfloat16)


@pytest.mark.parametrize("config", [Config(64, 16, 1, 4, 4), Config(128, 64, 4, 8, 3)])
def test_decodes_exactly(config: Config) -> None:
    """The product with a unit matrix is the weight, bit for bit."""
    weight, values = random_weight(192, 512)
    x = torch.eye(512, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(gemm(x, weight, config).t(), values)


@pytest.mark.parametrize("m,n,k", [(1, 320, 384), (200, 1024, 2048)])
def test_products_in_every_listed_configuration(m: int, n: int, k: int) -> None:
    weight, values = random_weight(n, k)
    x = torch.randn(m, k, device="cuda").bfloat16()
    want = x.double() @ values.double().t()
    for config in configs(m, n, k):
        error = (gemm(x, weight, config).double() - want).norm() / want.norm()
        assert error < 3e-3, config


def test_silu_mul() -> None:
    both = torch.randn(5, 2600, device="cuda").bfloat16()
    gate, up = both.double().chunk(2, -1)
    torch.testing.assert_close(silu_mul(both).double(), torch.nn.functional.silu(gate) * up, rtol=2**-8, atol=1e-6)


def test_k_is_a_multiple_of_a_group() -> None:
    with pytest.raises(ValueError, match="got 64, expected a multiple of 128"):
        repack(torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.uint8))

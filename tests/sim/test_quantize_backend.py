"""``quantize`` with the fused kernels behind it: the same bits as torch, or a reason."""

from __future__ import annotations

import pytest
import torch

from cute_nvfp4 import quantize
from cute_nvfp4.errors import OperandError, TargetError
from cute_nvfp4.formats import as_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "max"},
        {"rule": "four_six_mse", "global_scale": 0.01, "scale_layout": "rowmajor"},
        {"format": "mxfp4"},
        {"rule": "max", "rounding": "stochastic", "transpose": True},
    ],
)
@pytest.mark.parametrize("shape", [(144, 96), (2, 64, 160)])
def test_the_bits_of_the_torch_backend(options: dict, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    found, expected = (
        quantize(x, **options, generator=torch.Generator().manual_seed(5) if "rounding" in options else None, backend=b)
        for b in ("sim", "torch")
    )
    assert found.data.shape == expected.data.shape and found.scale.shape == expected.scale.shape
    assert torch.equal(as_bytes(found.data), as_bytes(expected.data))
    assert torch.equal(as_bytes(found.scale), as_bytes(expected.scale))
    assert (found.global_scale is None) == (expected.global_scale is None)
    if expected.global_scale is not None:
        assert torch.equal(found.global_scale.reshape(()), expected.global_scale.reshape(()))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"format": "mxfp4", "rule": "optimal"}, "does not search"),
        ({"block_2d": True}, "block_2d with backend='sim'"),
        ({"hadamard": 1}, "hadamard with backend='sim'"),
    ],
)
def test_what_the_kernels_cannot_do(options: dict, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        quantize(torch.ones(16, 32), **options, backend="sim")


def test_a_backend_for_another_device() -> None:
    with pytest.raises(TargetError, match="cuda"):
        quantize(torch.ones(16, 32), backend="cuda")

"""``quantize`` with the kernels behind it: the same bits as the reference, or a reason."""

from __future__ import annotations

import pytest
import torch
from support import backends

from cute_nvfp4 import quantize, simulating
from cute_nvfp4.errors import OperandError, TargetError
from cute_nvfp4.formats import as_bytes
from cute_nvfp4.ops.quantize import explain_backend
from cute_nvfp4.quantization.hadamard import Hadamard

pytestmark = [pytest.mark.kernels, pytest.mark.sweep]
REFUSES = pytest.mark.sim_only("refuses CPU tensors")


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "max"},
        {"rule": "four_six_mse", "global_scale": 0.01, "scale_layout": "rowmajor"},
        {"format": "mxfp4"},
        {"rule": "max", "rounding": "stochastic", "transpose": True},
        {"rule": "max", "hadamard": 3},
        {"rule": "optimal"},
        {"rule": "optimal", "hadamard": 3},
        {"rule": "optimal", "transpose": True, "global_scale": 0.003},
        {"rule": "static_4", "block_2d": True, "hadamard": 4},
    ],
)
@pytest.mark.parametrize("shape", [(144, 96), (2, 64, 160)])
def test_the_bits_of_the_reference(options: dict, shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    found, expected = (
        quantize(x, **options, generator=torch.Generator().manual_seed(5) if "rounding" in options else None, backend=b)
        for b in (backends.backend(), "reference")
    )
    assert found.data.shape == expected.data.shape and found.scale.shape == expected.scale.shape
    assert torch.equal(as_bytes(found.data), as_bytes(expected.data))
    assert torch.equal(as_bytes(found.scale), as_bytes(expected.scale))
    assert (found.global_scale is None) == (expected.global_scale is None)
    if expected.global_scale is not None:
        assert torch.equal(found.global_scale.reshape(()), expected.global_scale.reshape(()))


@REFUSES
@pytest.mark.parametrize(
    "options,message",
    [
        ({"format": "mxfp4", "rule": "optimal"}, "does not search"),
        ({"rule": "optimal", "block_2d": True}, "block_2d for the fused kernels: got rule 'optimal'"),
        ({"hadamard": Hadamard.from_seed(1, 32)}, "size of a rotation for the fused kernels: got 32, expected 16 or"),
        ({"rule": "hessian", "hessian": torch.ones(4, 32)}, "hessian with backend='sim'"),
        ({"format": "mxfp4", "axis": 0, "pad": True}, "padding with backend='sim': got K 16, which pad makes 32"),
    ],
)
def test_what_the_kernels_cannot_do(options: dict, message: str) -> None:
    with pytest.raises(OperandError, match=f"{message}.* backend='auto' or 'reference' does it by torch"):
        quantize(torch.ones(16, 32), **options, backend="sim")
    assert explain_backend(torch.ones(16, 32), **options).backend == "reference"


@REFUSES
def test_which_backend_runs() -> None:
    x = torch.ones(16, 32)
    assert explain_backend(x) == ("sim", "")
    assert explain_backend(x, backend="reference") == ("reference", "asked for")
    assert explain_backend(x, "mxfp4", "floor", backend="sim", global_scale=None) == ("sim", "")
    with pytest.raises(OperandError, match="rule for nvfp4"):
        explain_backend(x, rule="floor")
    with pytest.raises(TargetError, match="cuda"):
        explain_backend(x, backend="cuda")
    with pytest.raises(TargetError, match=r"got 'torch', expected one of .* What used to be 'torch' is 'reference'"):
        quantize(x, backend="torch")


@REFUSES
def test_auto_within_simulating() -> None:
    """The kernels where they take the request; else torch, and nothing is launched."""
    x = torch.ones(16, 32)
    with simulating() as runs:
        quantize(x)
        assert [run.name for run in runs] == ["quantize"]
        quantize(x, "mxfp4", "optimal")
        quantize(x, backend="reference")
    assert len(runs) == 1


@REFUSES
def test_a_backend_for_another_device() -> None:
    with pytest.raises(TargetError, match="cuda"):
        quantize(torch.ones(16, 32), backend="cuda")

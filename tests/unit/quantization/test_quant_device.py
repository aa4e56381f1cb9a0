"""The same bits on a GPU as on the CPU, for every rule and option, by the reference and by what "auto" is there."""

from __future__ import annotations

import pytest
import torch
from quant_golden import FOUROVERSIX, QWANTIZE, arrays

from cute_nvfp4.errors import OperandError
from cute_nvfp4.ops.quantize import (
    explain_backend,
    quantize,
)
from cute_nvfp4.quantization import philox
from cute_nvfp4.quantization.hadamard import Hadamard
from cute_nvfp4.quantization.rules import rules_of

pytestmark = pytest.mark.gpu

INPUTS = [(FOUROVERSIX, name) for name in ("x", "t3", "edge", "huge", "nonfinite", "zeros", "pow2edge")]
OPTIONS = [
    {},
    {"block_2d": True},
    {"transpose": True},
    {"hadamard": 5},
    {"rounding": "stochastic", "generator": 123456789012345},
    {"global_scale": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_bits_of_the_cpu(backend: str, fmt: str, options: dict) -> None:
    for peer, name in INPUTS:
        x = torch.from_numpy(arrays(peer)[f"input/{name}"])
        for dtype in (torch.float32, torch.bfloat16):
            for rule in rules_of(fmt):
                if rule == "hessian":
                    continue
                want = quantize(x.to(dtype), fmt, rule, backend="reference", **options)
                got = quantize(x.to(dtype).cuda(), fmt, rule, backend=backend, **options)
                where = (name, dtype, rule)
                assert torch.equal(got.data.cpu(), want.data), where
                assert torch.equal(got.scale.cpu(), want.scale), where
                if want.global_scale is not None:
                    assert torch.equal(got.global_scale.cpu(), want.global_scale), where


def test_what_auto_is() -> None:
    x = torch.ones(16, 64, device="cuda")
    assert explain_backend(x) == ("cuda", "")
    assert explain_backend(x, backend="reference").backend == "reference"
    for options, reason in (
        ({"rule": "hessian", "hessian": torch.ones(4, 64, device="cuda")}, "hessian with backend='cuda'"),
        ({"rule": "optimal", "block_2d": True}, "block_2d for the fused kernels: got rule 'optimal'"),
        ({"hadamard": Hadamard.from_seed(1, 32)}, "size of a rotation for the fused kernels: got 32"),
    ):
        backend, why = explain_backend(x, **options)
        assert backend == "reference" and why.startswith(reason), options
        with pytest.raises(OperandError, match=f"{reason}.*backend='auto' or 'reference'"):
            quantize(x, backend="cuda", **options)
    assert explain_backend(x[:, :40], pad=True).reason.startswith("padding with backend='cuda': got K 40")
    assert explain_backend(x.requires_grad_()).backend == "cuda"


def test_hessian_on_the_gpu() -> None:
    """Sums of matrix products differ between devices, so that near ties may fall otherwise: but hardly ever."""
    w, x = (torch.from_numpy(arrays(QWANTIZE)[f"input/{name}"]) for name in ("w", "calib"))
    want = quantize(w, rule="hessian", hessian=x)
    got = quantize(w.cuda(), rule="hessian", hessian=x.cuda())
    assert (got.scale.cpu() != want.scale).sum() <= 2


def test_random_bits_on_the_gpu() -> None:
    index = torch.arange(1 << 20) * 12345 + 2**35
    assert torch.equal(philox.uniform(7, index.cuda(), 1).cpu(), philox.uniform(7, index, 1))


def test_large_tensors_take_little_memory() -> None:
    """Beside the result, a bounded number of bytes: a quarter of this tensor's."""
    x = torch.randn(1 << 16, 1 << 15, device="cuda", dtype=torch.bfloat16)
    result = x.numel() * (1 / 2 + 1 / 16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantize(x, rule="optimal")
    assert torch.cuda.max_memory_allocated() - before - result < x.numel() * 2

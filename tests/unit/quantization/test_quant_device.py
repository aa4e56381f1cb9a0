"""The same bits on a GPU as on the CPU, for every rule and option."""

from __future__ import annotations

import pytest
import torch
from quant_golden import FOUROVERSIX, QWANTIZE, arrays

from cute_nvfp4.quantization import philox, quantize, rules_of

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
def test_bits_of_the_cpu(fmt: str, options: dict) -> None:
    for peer, name in INPUTS:
        x = torch.from_numpy(arrays(peer)[f"input/{name}"])
        for dtype in (torch.float32, torch.bfloat16):
            for rule in rules_of(fmt):
                if rule == "hessian":
                    continue
                want = quantize(x.to(dtype), fmt, rule, **options)
                got = quantize(x.to(dtype).cuda(), fmt, rule, **options)
                where = (name, dtype, rule)
                assert torch.equal(got.data.cpu(), want.data), where
                assert torch.equal(got.scale.cpu(), want.scale), where
                if want.global_scale is not None:
                    assert torch.equal(got.global_scale.cpu(), want.global_scale), where


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

"""The fused quantization kernels on the GPU that is there: the bits of the torch backend, in order, without waiting."""

from __future__ import annotations

import pytest
import quantize_problems as problems
import torch
from quantize_problems import DTYPES, PAIRS, differences, edges, fused, near_ties

pytestmark = pytest.mark.gpu

SCALES = (1.0, 2.0**-9, 93 / 16 / 2688, 5.25 / 1536, 0.91 * 6 / 2688, 1 / 3, 0.0014142135, 2.0**-100, 2.0**118)


def check(x: torch.Tensor, format: str, rule: str, **options: object) -> None:
    assert differences(x.cuda(), format, rule, **options) == []


@pytest.mark.parametrize("format,rule", PAIRS)
def test_golden_inputs(format: str, rule: str) -> None:
    scale = "auto" if format == "nvfp4" else None
    for name, x in problems.golden_inputs().items():
        for dtype in DTYPES:
            assert (name, differences(x.to(dtype).cuda(), format, rule, global_scale=scale)) == (name, [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", PAIRS)
def test_edges_and_random(format: str, rule: str, dtype: torch.dtype) -> None:
    scale = torch.tensor(0.0007, device="cuda") if format == "nvfp4" else None
    check(edges(129, 544).to(dtype), format, rule, global_scale=scale)
    x = torch.randn(3000, 4096, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 2, 3000)[:, None]
    check(x.to(dtype), format, rule, global_scale="auto" if format == "nvfp4" else None)
    check(x[:, :96].to(dtype), format, rule, seed=11, scale_layout="rowmajor")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", problems.rules("nvfp4"))
def test_global_scales(rule: str, dtype: torch.dtype) -> None:
    """Many, and elements on and beside every tie: reciprocals and roundings of the device are those of IEEE 754."""
    more = torch.rand(40, generator=torch.Generator().manual_seed(6), dtype=torch.float64).mul(20).exp2().tolist()
    for value in (*SCALES, *more):
        scale = torch.tensor(value, device="cuda")
        for x in (edges(128, 512).to(dtype), near_ties(dtype, value)):
            assert (value, differences(x.cuda(), "nvfp4", rule, global_scale=scale)) == (value, [])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("rule", ["four_six_mse", "four_six_mae", "four_six_abs_max"])
def test_nearly_equal_errors(rule: str, dtype: torch.dtype) -> None:
    """Tensor cores compute the errors; blocks for which that decides nothing are done again."""
    for value in (2.0**-9, 93 / 16 / 1536, 0.0014142135):
        for count in (32, 3):
            x = problems.nearly_equal(rule, value, dtype, 256, count).cuda()
            case, scale = (value, count), torch.tensor(value, device="cuda")
            assert (case, differences(x, "nvfp4", rule, global_scale=scale)) == (case, [])


def test_two_to_the_thirty_one_bytes() -> None:
    """Offsets need 64 bits."""
    x = torch.randn(40000, 32768, device="cuda", dtype=torch.bfloat16)
    got = fused(x, "nvfp4", "max", global_scale=torch.tensor(0.002, device="cuda"))
    part = fused(x[-128:], "nvfp4", "max", global_scale=torch.tensor(0.002, device="cuda"))
    assert got.data[0, -128:].equal(part.data[0])


def test_current_stream() -> None:
    x = torch.randn(512, 1024, device="cuda").bfloat16()
    expected, kept = fused(x, "nvfp4", "max", global_scale="auto"), x.clone()
    x.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(kept)
        got = fused(x, "nvfp4", "max", global_scale="auto")
    stream.synchronize()
    assert got.data.equal(expected.data) and got.scale.equal(expected.scale)


def test_in_a_cuda_graph_and_without_waiting() -> None:
    x = torch.randn(256, 1024, device="cuda").bfloat16()
    fused(x, "nvfp4", "four_six_mse", global_scale="auto")
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused(x, "nvfp4", "four_six_mse", global_scale="auto")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fused(x, "nvfp4", "four_six_mse", global_scale="auto")
    x.copy_(x.flip(-1) * 3)
    graph.replay()
    torch.cuda.synchronize()
    expected = fused(x, "nvfp4", "four_six_mse", global_scale="auto")
    assert got.data.equal(expected.data) and got.global_scale.equal(expected.global_scale)

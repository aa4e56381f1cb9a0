"""The fused quantization kernels and what only a GPU has: streams, graphs, memory, and matrices of many rows.

``tests/kernels/quantize/test_quantize*.py`` compare their bits with torch's backend; ``--backend cuda`` runs those,
too.
"""

from __future__ import annotations

import pytest
import torch
from support.fused_problems import check_rmsnorm, check_silu_mul
from support.quantize_problems import DTYPES, PAIRS, TILE_PAIRS, differences, fused, near_ties, rules

from cute_nvfp4 import rmsnorm_quantize
from cute_nvfp4.quantization.hadamard import Hadamard

pytestmark = pytest.mark.gpu


def check(x: torch.Tensor, format: str, rule: str, **options: object) -> None:
    scale = "auto" if format == "nvfp4" else None
    assert differences(x, format, rule, global_scale=scale, **options) == []


def random(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 2, rows)[:, None]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", PAIRS)
def test_many_rows(format: str, rule: str, dtype: torch.dtype) -> None:
    """Matrices with more than one work tile for each CTA; with rotation; with a strided K."""
    check(random(3000, 4096, dtype), format, rule)
    check(random(4096, 1500, dtype).t(), format, rule)
    check(random(1500, 4096, dtype), format, rule, hadamard=Hadamard.from_seed(2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", TILE_PAIRS)
def test_many_tiles(format: str, rule: str, dtype: torch.dtype) -> None:
    check(random(1500, 4096, dtype), format, rule, block_2d=True)
    check(random(4096, 1500, dtype).t(), format, rule, block_2d=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", rules("nvfp4"))
def test_global_scales(rule: str, dtype: torch.dtype) -> None:
    """Many global scales, with elements on and beside every tie: the device's reciprocals and roundings follow IEEE
    754."""
    for value in (
        torch.rand(40, generator=torch.Generator().manual_seed(6), dtype=torch.float64).mul(20).exp2().tolist()
    ):
        x, scale = near_ties(dtype, value), torch.tensor(value)
        assert (value, differences(x, "nvfp4", rule, global_scale=scale)) == (value, [])


def test_two_to_the_thirty_one_bytes() -> None:
    """A matrix whose offsets need 64 bits."""
    x = torch.randn(40000, 32768, device="cuda", dtype=torch.bfloat16)
    got = fused(x, "nvfp4", "max", global_scale=torch.tensor(0.002))
    part = fused(x[-128:], "nvfp4", "max", global_scale=torch.tensor(0.002))
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


@pytest.mark.parametrize("rows,k", [(1, 4096), (16, 8192), (130, 14336), (3000, 4096), (300, 16384)])
def test_many_rows_of_fused_kernels(rows: int, k: int) -> None:
    x, other, weight = (random(n, k, torch.bfloat16).flip(0) for n in (rows, rows, 2))
    scale = torch.tensor(0.004)
    check_rmsnorm(x, weight[0], other, global_scale=scale, alone=True)
    check_rmsnorm(x, weight[0].float(), global_scale=scale, alone=True)
    check_silu_mul(x, other, global_scale=scale, alone=True)


def test_fused_kernels_in_a_cuda_graph() -> None:
    """A decoding step, replayed with other values: the residual in place, codes in the same memory."""
    x, residual = (torch.randn(16, 4096, device="cuda").bfloat16() for _ in range(2))
    weight, scale = torch.rand(4096, device="cuda").bfloat16(), torch.tensor(0.004, device="cuda")
    first = rmsnorm_quantize(x, weight, residual=residual, global_scale=scale)
    out, kept = first.quantized, residual.clone()

    def step() -> None:
        rmsnorm_quantize(x, weight, residual=residual, residual_out=residual, global_scale=scale, out=out)

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    x.copy_(x.flip(-1) * 3)
    residual.copy_(kept)
    graph.replay()
    torch.cuda.synchronize()
    want = rmsnorm_quantize(x, weight, residual=kept, global_scale=scale)
    assert residual.equal(want.residual)
    assert out.data.equal(want.quantized.data) and out.scale.equal(want.quantized.scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_many_times(dtype: torch.dtype) -> None:
    """Clusters run in many orders: a decoding step in a CUDA graph, with new contents each time, on small and large
    grids."""
    for rows in (1, 16, 130):
        x = random(rows, 4096, dtype).cuda()
        fused(x, "nvfp4", "max", global_scale="auto")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fused(x, "nvfp4", "max", global_scale="auto")
        for step in range(100):
            x.copy_(x.roll(977, -1) * (0.5 if step % 3 else 3.0))
            graph.replay()
            want = fused(x, "nvfp4", "max", global_scale="auto", backend="reference")
            assert got.data.equal(want.data) and got.scale.equal(want.scale)
            assert got.global_scale.equal(want.global_scale)

"""Products that start while the launch before them still runs: the bits of those that do not, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_nvfp4 import gated_gemm, gemm, prepare_weight, quantize

pytestmark = [pytest.mark.gpu, pytest.mark.kernels("sm_90a")]


@pytest.mark.parametrize("rows", [1, 16, 128, 300])
def test_a_chain_of_products(rows: int) -> None:
    """Twelve products, each of what the one before gives, in a stream and in a graph that is replayed."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def drawn(n: int, k: int):
        return quantize(torch.randn(n, k, device="cuda", generator=generator) * k**-0.5)

    both = prepare_weight(drawn(3072, 1024), drawn(3072, 1024)), prepare_weight(drawn(1024, 3072))
    x = torch.randn(rows, 1024, device="cuda", generator=generator).bfloat16()

    def chain(early: bool) -> torch.Tensor:
        up, down = (replace(weight, early=early) for weight in both)
        y = x
        for _ in range(6):
            y = gemm(gated_gemm(y, up), down) + x
            y = gemm(gated_gemm(y, up), down)
        return y

    want = chain(False)
    assert want.isfinite().all() and chain(True).equal(want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(200):
        found.fill_(float("nan"))
        graph.replay()
        assert found.equal(want)

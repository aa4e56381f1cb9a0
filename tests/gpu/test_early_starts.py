"""Products that start while the preceding launch still runs give the same bits as those that wait for it, on a GPU."""

from __future__ import annotations

import pytest
import torch

from cute_nvfp4 import gated_gemm, gemm, prepare_weight, quantize
from cute_nvfp4.planning.packed import PackedProblem, choose
from cute_nvfp4.runtime.backend import resolve

pytestmark = [pytest.mark.gpu, pytest.mark.kernels("sm_90a")]


@pytest.mark.parametrize("rows", [1, 16, 128, 300])
def test_a_chain_of_products(rows: int) -> None:
    """Twelve products, each with the preceding result as input, in a stream and in a graph that is replayed."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def drawn(n: int, k: int):
        return quantize(torch.randn(n, k, device="cuda", generator=generator) * k**-0.5)

    both = prepare_weight(drawn(3072, 1024), drawn(3072, 1024)), prepare_weight(drawn(1024, 3072))
    x = torch.randn(rows, 1024, device="cuda", generator=generator).bfloat16()

    arch, count = resolve("auto", x.device).arch, torch.cuda.get_device_properties(0).multi_processor_count
    problems = PackedProblem(m=rows, n=3072, k=1024, gate="silu"), PackedProblem(m=rows, n=1024, k=3072)
    plans = [choose(problem, arch, count) for problem in problems]

    def chain(early: bool) -> torch.Tensor:
        (up, down), (first, second) = both, [plan.early() for plan in plans] if early else plans
        y = x
        for _ in range(6):
            y = gemm(gated_gemm(y, up, config=first), down, config=second) + x
            y = gemm(gated_gemm(y, up, config=first), down, config=second)
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

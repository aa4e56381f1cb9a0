"""moe on a GPU: against float64, twice the same bits, and in a CUDA graph whose tokens and routing change.

``tests/kernels/moe`` runs on a GPU, too; this file has layers that the simulator is too slow for.
"""

from __future__ import annotations

import pytest
import torch
from support.moe_problems import Layer, Problem

from cute_nvfp4 import moe

pytestmark = pytest.mark.gpu

LAYERS = {
    "Qwen3": Layer(48, 8, 64, 1024, 384, listed=True),
    "gpt-oss": Layer(
        200, 4, 32, 736, 672, "mxfp4", "clamped_swiglu", biases=True, interleaved=True, elsewhere=2, ids=torch.int32
    ),
    "Mixtral": Layer(1, 2, 8, 512, 1792),
    "Nemotron": Layer(33, 6, 12, 672, 464, activation="relu2", routing="same", dtype=torch.float16),
    "DeepSeek": Layer(3, 8, 256, 448, 128, listed=True),
    "crowded": Layer(700, 3, 5, 256, 256, routing="crowded"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    """A layer's values, the same bits twice, and a graph."""
    problem = Problem(LAYERS[name])
    out = problem.run()
    assert problem.right(out)
    for _ in range(3):
        assert torch.equal(problem.run(), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = moe(problem.x, problem.ids, problem.topk_weights, problem.experts, offset=problem.offset)
    # write another batch into the graph's inputs
    problem.x.copy_(problem.x.roll(1, 0) * 1.5)
    problem.ids.copy_(problem.ids.flip(0))
    result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert problem.right(result) and torch.equal(problem.run(), result)

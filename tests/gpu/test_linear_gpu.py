"""``NVFP4Linear`` of one row, and what only a GPU has: graphs, streams of several threads, allocations.

``tests/kernels/prepared_weight/test_one_row_linear.py`` checks its results; ``--backend cuda`` runs that on the GPU.
"""

from __future__ import annotations

import threading

import pytest
import torch

from cute_nvfp4 import NVFP4Linear, quantize
from cute_nvfp4.runtime.kernel import Kernel

pytestmark = pytest.mark.gpu

K, N = 4096, 4096


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().cuda()


@pytest.fixture(scope="module")
def layer() -> NVFP4Linear:
    weight = quantize(normal(N, K, seed=0))
    return NVFP4Linear(weight, normal(N, seed=1), input_global_scale=torch.tensor(0.002, device="cuda"))


def check(layer: NVFP4Linear, x: torch.Tensor, y: torch.Tensor) -> None:
    """Asserts y within the roundings of float16: one of the product, and one of the sum with the bias."""
    a = quantize(x, global_scale=layer.input_global_scale, backend="reference").dequantize(torch.float64)
    exact = a @ layer.weight.dequantize(torch.float64).T
    error = (y.double() - exact - layer.bias.half().double()).abs()
    assert y.dtype is torch.float16 and y.shape == (1, N)
    assert (error <= 2**-10 * (exact.abs() + y.double().abs()) + 1e-3).all()


@torch.no_grad()
def test_eager(layer: NVFP4Linear) -> None:
    for seed in (2, 3):
        x = normal(1, K, seed=seed)
        check(layer, x, layer(x))


@torch.no_grad()
def test_a_graph_with_new_contents(layer: NVFP4Linear) -> None:
    """A replay reads new activations and new weights; two calls in one graph have their own memory."""
    first, second = normal(1, K, seed=4), normal(1, K, seed=5)
    layer(first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layer(first), layer(second)
    for seed in (6, 8):
        first.copy_(normal(1, K, seed=seed))
        second.copy_(normal(1, K, seed=seed + 1))
        graph.replay()
        check(layer, first, results[0])
        check(layer, second, results[1])
    before = layer.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    try:
        other = NVFP4Linear(quantize(normal(N, K, seed=10)), layer.bias, input_global_scale=layer.input_global_scale)
        layer.load_state_dict(other.state_dict())
        graph.replay()
        check(other, first, results[0])
    finally:
        layer.load_state_dict(before)


def test_threads(layer: NVFP4Linear) -> None:
    """Calls of one layer on several streams share no memory that they write."""
    inputs = [normal(1, K, seed=20 + i) for i in range(4)]
    with torch.no_grad():
        want = [layer(x).clone() for x in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(50):
                y = layer(inputs[i])
                stream.synchronize()
                if not y.equal(want[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_a_second_call(layer: NVFP4Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call compiles nothing, waits for nothing, and allocates the quantized row, the product and the sum."""
    x = normal(1, K, seed=30)
    layer(x)
    monkeypatch.setattr(Kernel, "build", lambda *_: pytest.fail("compiled again"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 3
    check(layer, x, y)

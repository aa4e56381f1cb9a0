"""Layers and experts over two GPUs, by NCCL and within CUDA graphs: what one GPU gives.

What two processes give without GPUs is in ``tests/unit/test_parallel.py``.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BOUND = 0.02
"""Of |difference| / |wanted|: two roundings to bfloat16 more, and other orders of sums."""


def distance(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


def captured(call):
    """The result of a graph of ``call``, replayed a hundred times over NaN; all of its results are equal."""
    call()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    first = None
    for _ in range(100):
        result.fill_(float("nan"))
        graph.replay()
        first = result.clone() if first is None else first
        assert result.equal(first)
    return first


def dense(rank: int) -> None:
    """Prepared layers, as they are sharded by the styles; W4A16, and NVFP4 rows with a common global scale."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from cute_nvfp4 import NVFP4Linear, quantize
    from cute_nvfp4.nn import NVFP4ColwiseParallel, NVFP4RowwiseParallel, PeerSums

    generator = torch.Generator("cuda").manual_seed(0)

    def weight(n: int, k: int):
        return quantize(torch.randn(n, k, device="cuda", generator=generator) * k**-0.5)

    up, down = weight(1024, 512), weight(512, 1024)
    sums = PeerSums(16 * 512)  # 300 rows are more than it holds
    for rule, peers in ((None, None), ("max", None), (None, sums)):
        for rows in (1, 16, 300):
            models = [
                torch.nn.Sequential(*(NVFP4Linear(w, input_rule=rule).prepare() for w in (up, down))) for _ in range(2)
            ]
            plan = {"0": NVFP4ColwiseParallel(), "1": NVFP4RowwiseParallel(sums=peers)}
            parallelize_module(models[1], init_device_mesh("cuda", (2,)), plan)
            x = torch.randn(rows, 512, device="cuda", generator=generator).bfloat16()
            want = models[0](x)
            found = captured(lambda m=models[1], x=x: m(x))
            assert distance(found, want) < BOUND, (rule, peers, rows, distance(found, want))
            alone = torch.nn.functional.linear(
                models[1][0](x).float(), down.dequantize()[:, 512 * rank : 512 * (rank + 1)]
            )
            assert distance(alone, want) > 10 * BOUND


def mixture(rank: int) -> None:
    """Experts of both GPUs, rows in bf16 and in NVFP4, in graphs."""
    from cute_nvfp4 import moe, prepare_experts, quantize
    from cute_nvfp4.nn.expert_parallel import ExpertParallel, shard_experts

    generator = torch.Generator("cuda").manual_seed(1)
    shapes = (16, 512, 256), (16, 256, 256)
    experts = prepare_experts(
        *(quantize(torch.randn(*s, device="cuda", generator=generator) / s[-1] ** 0.5) for s in shapes)
    )
    x = torch.randn(2, 40, 256, device="cuda", generator=generator).bfloat16()[rank]
    scores = torch.rand(2, 40, 16, device="cuda", generator=generator)[rank]
    weights, ids = scores.topk(4)
    want = moe(x, ids, weights, experts)
    for rows, bound in (("16 bits", BOUND), ("nvfp4", 0.25)):
        layer = ExpertParallel(shard_experts(experts, rank, 2), rows=rows)
        exchange = layer.exchange(ids)
        for call in (
            lambda e=layer, n=exchange: e(x, ids, weights, n),
            lambda e=layer: e.all_gathered(x, ids, weights),
        ):
            found = captured(call)
            assert distance(found, want) < bound, (rows, distance(found, want))


def _rank(rank: int, store: str) -> None:
    try:
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=torch.device("cuda", rank)
        )
        with torch.inference_mode():
            dense(rank)
            mixture(rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # graphs that hold a communicator outlive its end
    os._exit(0)


def test_two_gpus(tmp_path: Path) -> None:
    context = torch.multiprocessing.spawn(_rank, (str(tmp_path / "store"),), nprocs=2, join=False)
    for process in context.processes:
        process.join(300)
        if process.exitcode is None or process.exitcode:
            for other in context.processes:
                other.kill()
    assert [process.exitcode for process in context.processes] == [0, 0]

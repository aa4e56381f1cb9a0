"""Layers and experts over two GPUs, by NCCL and by stores into the peer's memory, in CUDA graphs, against one GPU.

``tests/unit/test_parallel.py`` tests two processes without GPUs. ``python tests/gpu/test_two_gpus.py`` runs this file's
checks without pytest; with ``--smoke`` over two processes without a GPU: no graphs, no stores into another's memory.

Each rank prints what it has done, and when: run pytest with ``-s`` to see it. Most of the time is spent on compilation.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BOUND = 0.02
"""The largest relative distance |difference| / |wanted|: two more roundings to bfloat16, and other orders of sums."""
ROUNDED = 0.25
"""The largest relative distance where rows travel in NVFP4."""
SECONDS = 200
"""Time limit of the processes; a rank waits ``PATIENCE`` for another one."""
PATIENCE = timedelta(seconds=90)


@dataclass
class Rank:
    """A process: its number, its device, and its start time."""

    rank: int
    device: torch.device
    begin: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        print(f"[rank {self.rank}, {time.perf_counter() - self.begin:5.1f} s] {text}", flush=True)

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Normal values, the same on every rank."""
        return torch.randn(*shape, device=self.device, generator=torch.Generator(self.device).manual_seed(seed))

    def replayed(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a graph of ``call``, replayed a hundred times over NaN; all replays must give equal results."""
        if self.device.type == "cpu":
            return call()
        call()
        torch.cuda.synchronize()
        # all ranks compile before any captures: a collective waits only for a short while
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = call()
        first = None
        for _ in range(100):
            result.fill_(float("nan"))
            graph.replay()
            first = result.clone() if first is None else first
            assert result.equal(first), "replays of a graph differ"
        return first


def distance(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


def sums(r: Rank) -> None:
    """Sums through the peer's memory, of any sizes in turn, equal the sum of both ranks' rows to the bit, including
    NaN."""
    from cute_nvfp4.nn import PeerSums

    for early in (False, True):
        sums = PeerSums(1 << 20, early=early)
        r.say("memory for sums is there")
        for call, count in enumerate((8, 4096, 1 << 20, 5120, 1 << 19, 640, 8, 1 << 20) * 4):
            both = [r.random(count, seed=2 * call + rank).bfloat16() for rank in range(2)]
            for x in both:
                # received memory holds words of all ones before anything arrives
                x.view(torch.int32)[:: 1 + call] = -1
            found = sums(both[r.rank])
            want = (both[0].float() + both[1].float()).bfloat16()
            assert torch.equal(found.nan_to_num(), want.nan_to_num()), (early, count)
            assert torch.equal(found.isnan(), want.isnan()), (early, count)
        y = r.random(128, 640, seed=r.rank).bfloat16()
        # an odd number of calls, whose memory takes turns
        found = r.replayed(lambda sums=sums, y=y: sums(sums(sums(y)) * 0.5) * 0.5)
        want = r.random(128, 640, seed=0).bfloat16().float() + r.random(128, 640, seed=1).bfloat16().float()
        assert distance(found, want) < BOUND
        r.say(f"sums through the peer's memory, early {early}")


def dense(r: Rank) -> None:
    """Prepared layers, sharded by the parallel styles; W4A16, and NVFP4 rows with a common global scale."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from cute_nvfp4 import NVFP4Linear, quantize
    from cute_nvfp4.nn import NVFP4ColwiseParallel, NVFP4RowwiseParallel, PeerSums

    up, down = (quantize(r.random(n, k, seed=n) * k**-0.5) for n, k in ((1024, 512), (512, 1024)))
    on_gpus = r.device.type == "cuda"
    peers = PeerSums(16 * 512) if on_gpus else None  # 300 rows are more than it holds
    mesh = init_device_mesh(r.device.type, (2,))
    for rule, given, counts in ((None, None, (1, 16, 300)), ("max", None, (16,)), (None, peers, (16, 300))):
        for rows in counts:
            models = [
                torch.nn.Sequential(*(NVFP4Linear(w, input_rule=rule).prepare() for w in (up, down))) for _ in range(2)
            ]
            plan = {"0": NVFP4ColwiseParallel(), "1": NVFP4RowwiseParallel(sums=given)}
            parallelize_module(models[1], mesh, plan)
            x = r.random(rows, 512, seed=rows).bfloat16()
            want = models[0](x)
            found = r.replayed(lambda m=models[1], x=x: m(x))
            assert distance(found, want) < BOUND, (rule, given, rows, distance(found, want))
            mine = slice(512 * r.rank, 512 * (r.rank + 1))
            alone = torch.nn.functional.linear(models[1][0](x).float(), down.dequantize()[:, mine])
            assert distance(alone, want) > 10 * BOUND
            r.say(f"layers, rule {rule}, {'peer stores' if given else 'collectives'}, {rows} rows")


def early(r: Rank) -> None:
    """Products that start while the preceding launches run, with sums between them, against one GPU."""
    from cute_nvfp4 import gemm, prepare_weight, quantize
    from cute_nvfp4.nn import PeerSums
    from cute_nvfp4.planning.packed import PackedProblem, choose
    from cute_nvfp4.prepared_weight import PreparedWeight
    from cute_nvfp4.runtime.backend import resolve
    from cute_nvfp4.weight_shards import shard_columns, shard_rows

    up, down = (quantize(r.random(n, k, seed=n) * k**-0.5) for n, k in ((4096, 1024), (1024, 4096)))
    sums = PeerSums(128 * 1024, early=True)
    whole = [prepare_weight(x) for x in (up, down)]
    mine = [prepare_weight(x) for x in (shard_rows(up, r.rank, 2), shard_columns(down, r.rank, 2))]
    arch, count = resolve("auto", r.device).arch, torch.cuda.get_device_properties(0).multi_processor_count

    def product(x: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
        plan = choose(PackedProblem(m=len(x), n=weight.rows, k=weight.k), arch, count)
        return gemm(x, weight, config=plan.early())

    for rows in (1, 16, 128):
        x = r.random(rows, 1024, seed=rows).bfloat16()

        def twice(weights: list, add: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor = x) -> torch.Tensor:
            for _ in range(2):
                x = add(product(product(x, weights[0]), weights[1]))
            return x

        want = r.replayed(lambda twice=twice: twice(whole, lambda y: y))
        found = r.replayed(lambda twice=twice: twice(mine, sums))
        assert distance(found, want) < BOUND, (rows, distance(found, want))
        r.say(f"early starts, {rows} rows")


def mixture(r: Rank) -> None:
    """Experts of both GPUs, rows in bf16 and in NVFP4."""
    from cute_nvfp4 import moe, prepare_experts, quantize
    from cute_nvfp4.nn.expert_parallel import ExpertParallel, shard_experts

    shapes = (16, 512, 256), (16, 256, 256)
    experts = prepare_experts(*(quantize(r.random(*s, seed=s[1]) / s[-1] ** 0.5) for s in shapes))
    x = r.random(2, 40, 256, seed=1).bfloat16()[r.rank]
    weights, ids = r.random(2, 40, 16, seed=2)[r.rank].sigmoid().topk(4)
    want = moe(x, ids, weights, experts)
    r.say("experts on one GPU")
    for rows, bound in (("16 bits", BOUND), ("nvfp4", ROUNDED)):
        layer = ExpertParallel(shard_experts(experts, r.rank, 2), rows=rows)
        exchange = layer.exchange(ids)
        calls = {
            "all to all": lambda e=layer, n=exchange: e(x, ids, weights, n),
            "gathered": lambda e=layer: e.all_gathered(x, ids, weights),
        }
        for name, call in calls.items():
            found = r.replayed(call)
            assert distance(found, want) < bound, (rows, name, distance(found, want))
            r.say(f"experts, rows in {rows}, {name}")


def _rank(rank: int, store: str, device: str) -> None:
    code = 1
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
            options = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
        else:
            torch.set_num_threads(1)
            options = {"backend": "gloo"}
        r = Rank(rank, torch.device("cuda", rank) if device == "cuda" else torch.device("cpu"))
        dist.init_process_group(**options, init_method=f"file://{store}", rank=rank, world_size=2, timeout=PATIENCE)
        r.say(f"{device}, {options['backend']}")
        with torch.inference_mode():
            for part in (dense, mixture) if device == "cpu" else (sums, dense, early, mixture):
                part(r)
        code = 0
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # graphs that hold a communicator outlive its end
    os._exit(code)


def exit_codes(device: str, seconds: float = SECONDS) -> list[int | None]:
    """The exit codes of the two processes. When one fails, the other is ended soon, since it may wait for the failed
    one."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = str(Path(folder) / "store"), device
        processes = torch.multiprocessing.spawn(_rank, arguments, nprocs=2, join=False).processes
        last = time.monotonic() + seconds
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(0.2)
            if any(process.exitcode for process in processes):
                last = min(last, time.monotonic() + 5)
            if time.monotonic() > last:
                print("ended:", [process.exitcode for process in processes], flush=True)
                for process in processes:
                    process.kill()
                    process.join(5)
    return [process.exitcode for process in processes]


@pytest.mark.timeout(SECONDS + 60)
def test_two_gpus() -> None:
    assert exit_codes("cuda") == [0, 0]


if __name__ == "__main__":
    sys.exit(int(any(exit_codes("cpu" if "--smoke" in sys.argv else "cuda"))))

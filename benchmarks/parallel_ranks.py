"""The processes of ``parallel.py``, one for each GPU: how they start and end, and how they take times together."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Captured, capture, gpu_target
from parallel_layers import distance
from torch.cuda import device_count

from cute_nvfp4.harness.timing import ColdL2

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Environment variables of the processes; communicators read them on creation."""
RANKS = 2
CLOSE = 0.02
"""The largest relative distance from one GPU's result: two more roundings to bf16, and other orders of sums."""
WAIT = timedelta(seconds=150)
"""How long a rank waits for another rank, which may be compiling."""


class Rank:
    """A process of the run: its number, its device, and its timing."""

    def __init__(self, rank: int, rounds: int, smoke: bool) -> None:
        self.rank, self.rounds, self.smoke, self.begin = rank, rounds, smoke, time.perf_counter()
        self.contestants: tuple[str, ...] = ("bf16", "w4a16", "w4a16 early")
        self.device = torch.device("cpu") if smoke else torch.device("cuda", rank)
        if not smoke:
            torch.cuda.set_device(self.device)
            self.clear, self.together = ColdL2(self.device), torch.zeros(1, device=self.device)
            self.side = torch.cuda.Stream()

    def say(self, text: str) -> None:
        """Prints, on the first rank only."""
        if not self.rank:
            print(f"{time.perf_counter() - self.begin:5.0f} s  {text}", flush=True)

    def agreed(self, good: bool) -> bool:
        """Whether ``good`` holds on all ranks."""
        found = torch.tensor(int(good), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return bool(found.item())

    def captured(self, call: Callable[[], torch.Tensor]) -> Captured:
        """Captures the call in a graph, after a first call that compiles everything."""
        if self.smoke:
            return Captured(None, call(), call)
        call()
        torch.cuda.synchronize()
        # all ranks compile before any captures: a collective waits only for a short while
        dist.barrier()
        found = capture(call, "thread_local")
        found.graph.replay()
        torch.cuda.synchronize()
        return found

    def close(self, what: str, found: torch.Tensor, want: torch.Tensor, bound: float = 0.0) -> None:
        """Raises AssertionError on all ranks unless the results are close on all ranks."""
        error, bound = distance(found, want), bound or CLOSE
        if not self.agreed(error < bound):
            raise AssertionError(f"{what}: off by {error:.4f} on rank {self.rank}, at most {bound}")

    def times(self, calls: Mapping[str, Captured | None]) -> dict[str, float]:
        """The median of each call in microseconds. Calls take turns in alternating order; a rank with None takes no
        part in one."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(-2, self.rounds):
            for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.clear()
                dist.all_reduce(self.together)
                start.record()
                if calls[name] is not None:
                    calls[name].graph.replay()
                end.record()
                end.synchronize()
                if turn >= 0:
                    found[name].append(start.elapsed_time(end) * 1e3)
        samples = torch.tensor(list(found.values()), device=self.device, dtype=torch.float64)
        dist.all_reduce(samples, op=dist.ReduceOp.MAX)
        return {name: round(statistics.median(x), 2) for name, x in zip(found, samples.tolist())}


@torch.inference_mode()
def process(rank: int, store: str, options: argparse.Namespace, work: Callable[..., None]) -> None:
    """Runs the process of a rank. It ends at once, whatever other ranks and graphs with collectives do."""
    code = 1
    try:
        os.environ.update(MULTICAST_OFF)
        if options.smoke:
            torch.set_num_threads(1)
            backend: dict[str, Any] = {"backend": "gloo"}
        else:
            torch.cuda.set_device(rank)
            backend = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
        dist.init_process_group(**backend, init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=WAIT)
        r = Rank(rank, options.rounds or (21 if options.quick else 61), options.smoke)
        r.contestants = tuple(options.contestants)
        work(r, options)
        code = 0
    except AssertionError as error:
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def run(work: Callable[..., None], options: argparse.Namespace) -> int:
    """Starts processes that do ``work(rank, options)``; returns the exit code."""
    if not options.smoke and gpu_target("--smoke runs small layers in the simulator.") and device_count() < RANKS:
        print(f"{device_count()} GPU: this benchmark measures {RANKS}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = str(Path(folder) / "store"), options, work
        context = torch.multiprocessing.spawn(process, arguments, nprocs=RANKS, join=False)
        return ended(context.processes, options.seconds)


def ended(processes: list, seconds: float) -> int:
    """Waits for the processes, and ends them after ``seconds`` or soon after one fails. Returns the exit code."""
    last = time.perf_counter() + seconds
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.2)
        if any(process.exitcode is not None for process in processes):
            # the others may wait for the failed rank, which will not answer
            last = min(last, time.perf_counter() + 15)
        if time.perf_counter() > last:
            print(f"ended: exit codes {[process.exitcode for process in processes]}", file=sys.stderr)
            for process in processes:
                process.kill()
    return int(any(process.exitcode for process in processes))

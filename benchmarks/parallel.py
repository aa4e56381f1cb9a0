"""Times layers over two GPUs: ``python benchmarks/parallel.py --quick``. It starts a process for each GPU.

Tensor parallelism, for the layers of Qwen3-32B and Llama-3.1-70B and 1, 16, 128 and 2048 rows: qkv, gate and up
column-parallel, o and down row-parallel, an all-reduce after either. Attention, norms and residuals are left out: a
part of qkv's columns stands in for attention's result. NVFP4 weights for bf16 rows (``w4a16``) beside bf16.

- ``one``: the whole layer on the first GPU, in the same processes, the other one idle;
- ``nccl``: over the GPUs, all-reduces by NCCL, all of it in one CUDA graph;
- ``halves``: the same for 2048 rows, the exchange of one half of the rows beside the products of the other;
- ``peer``: all-reduces by loads of the peer's memory in one kernel (torch's symmetric memory);
- ``copies``: from 128 rows on, rows are copied into the peer's memory by the copy engines and added; also in halves;
- ``local``: a rank's products without any exchange: what a perfect overlap would give;
- ``all_reduce`` and so on: one exchange alone; ``parts``: each product alone, on one GPU and of a shard.

Expert parallelism: 128 experts, 8 choices, over the GPUs: rows travel in bf16 or NVFP4, or are gathered by all; beside
one GPU with all rows, and experts in bf16 with the same exchange. The routing is known to the host (``exchange``).

A CUDA graph of the layer with NCCL in it is replayed a thousand times, every result compared with the first.

Times are medians of replays between two CUDA events, L2 cleared before each, a small all-reduce before the first event;
those of the slower GPU. What is timed is compared with one GPU first. NVLink multicast stays off (``MULTICAST_OFF``).

``--smoke`` needs no GPU: small layers in the simulator, two processes over gloo, results compared, no times.

Exit codes: 0 done, 1 a result is wrong or a process failed, 2 fewer than two GPUs.
"""

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
from torch.cuda import device_count

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import Captured, capture, gpu_target, machine, results_path, write
from parallel_layers import (
    CONTESTANTS,
    DENSE,
    MIXTURES,
    SMALL_DENSE,
    SMALL_MIXTURE,
    CopiedSums,
    Dense,
    Mixture,
    Products,
    Weights,
    all_reduced,
    by_peer_loads,
    distance,
    in_halves,
    routing,
    sharded,
    steps_of,
    whole,
)
from parallel_report import text

from cute_nvfp4 import moe, simulating
from cute_nvfp4.harness.timing import ColdL2, copy_bandwidth
from cute_nvfp4.nn import PeerSums

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""The environment of the processes: communicators read it when they are made."""
ROWS, TOKENS = (1, 16, 128, 2048), (1, 16, 128, 1024)
RANKS = 2
CLOSE = 0.02
"""The largest relative distance from one GPU: two roundings to bf16 more, and other orders of sums."""
ROUNDED = 0.25
"""The same where rows were quantized to NVFP4."""
HALVES_FROM, COPIED_FROM = 1024, 128
"""Rows from which on a layer is tried in halves, and with sums by the copy engines."""
REPLAYS = 1000
WAIT = timedelta(seconds=150)
"""How long a rank waits for another one, which may be compiling."""


class Rank:
    """A process of the run: its number, its device, and what it times."""

    def __init__(self, rank: int, rounds: int, smoke: bool) -> None:
        self.rank, self.rounds, self.smoke, self.begin = rank, rounds, smoke, time.perf_counter()
        self.device = torch.device("cpu") if smoke else torch.device("cuda", rank)
        if not smoke:
            torch.cuda.set_device(self.device)
            self.clear, self.together = ColdL2(self.device), torch.zeros(1, device=self.device)
            self.side = torch.cuda.Stream()

    def say(self, text: str) -> None:
        """Prints, on the first rank."""
        if not self.rank:
            print(f"{time.perf_counter() - self.begin:5.0f} s  {text}", flush=True)

    def agreed(self, good: bool) -> bool:
        """Whether it is so on all ranks."""
        found = torch.tensor(int(good), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return bool(found.item())

    def captured(self, call: Callable[[], torch.Tensor]) -> Captured:
        """A graph of the call, which was made already so that all was compiled."""
        if self.smoke:
            return Captured(None, call(), call)
        call()
        torch.cuda.synchronize()
        # every rank has compiled before any captures: a collective waits for a short while only
        dist.barrier()
        found = capture(call, "thread_local")
        found.graph.replay()
        torch.cuda.synchronize()
        return found

    def close(self, what: str, found: torch.Tensor, want: torch.Tensor, bound: float = 0.0) -> None:
        """Raises, on all ranks, unless they are close."""
        error, bound = distance(found, want), bound or CLOSE
        if not self.agreed(error < bound):
            raise AssertionError(f"{what}: off by {error:.4f} on rank {self.rank}, at most {bound}")

    def times(self, calls: Mapping[str, Captured | None]) -> dict[str, float]:
        """The median of each call in microseconds; None has no part in it. They take turns in alternating order."""
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


def reference(r: Rank, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """What the first rank computes, on all of them."""
    want = compute().contiguous() if not r.rank else torch.empty_like(like)
    dist.broadcast(want, 0)
    return want


def dense(r: Rank, shape: Dense, counts: tuple[int, ...], peer: bool = False) -> list[dict]:
    """The rows of a dense layer: each contestant by itself, so that its weights are alone in memory."""
    every, found = Weights.drawn(shape, r.device), []
    mine = every.shard(shape, r.rank, RANKS)
    for name, make in CONTESTANTS.items():
        part = make(mine, shape.q // RANKS)
        full = make(every, shape.q) if not r.rank else None
        for count in counts:
            generator = torch.Generator(r.device).manual_seed(count)
            x = torch.randn(count, shape.hidden, generator=generator, device=r.device).bfloat16()
            try:
                row = (with_peers if peer else with_nccl)(r, part, full, x)
            except AssertionError as error:
                raise AssertionError(f"{shape.model}, {name}, {count} rows: {error}") from error
            found.append({"model": shape.model, "contestant": name, "rows": count} | row)
            times = "  ".join(f"{key} {us:.1f}" for key, us in row.get("us", {}).items())
            r.say(f"{shape.model:>14} {name:>6} {count:5} rows  {times}")
    return found


def with_nccl(r: Rank, part: Products, full: Products | None, x: torch.Tensor) -> dict:
    """A row of the table: the layer in every form but that with peer loads, and its parts."""
    y = torch.randn_like(x)
    calls: dict[str, Captured | None] = {
        "one": r.captured(lambda: whole(full, x)) if full else r.captured(lambda: x.clone()),
        "nccl": r.captured(lambda: sharded(part, x)),
        "local": r.captured(lambda: whole(part, x)),
        "all_reduce": r.captured(lambda: all_reduced(y)),
    }
    want = reference(r, lambda: calls["one"].result, x)
    r.close("nccl", calls["nccl"].result, want)
    if len(x) >= HALVES_FROM and not r.smoke:
        calls["halves"] = r.captured(lambda: in_halves(part, x, r.side))
        r.close("halves", calls["halves"].result, want)
    # the check can fail: without the other rank's part it is another result
    if distance(calls["local"].result, want) < 10 * CLOSE:
        raise AssertionError("a rank's own part is as good as the whole")
    if r.smoke:
        return {}
    if r.rank:
        calls["one"] = None
    us = r.times(calls)
    return {"us": us, "parts_us": {"shard": parts(r, part, x), "one": parts(r, full, x)}}


def parts(r: Rank, p: Products | None, x: torch.Tensor) -> dict[str, float]:
    """Each product alone; None: another rank has them."""
    if p is None:
        return r.times(dict.fromkeys(("qkv", "o", "gated", "down")))
    rows = p.attended(x)
    gated = p.gated(x)
    inputs = {"qkv": x, "o": rows, "gated": x, "down": gated}
    return r.times({name: capture(lambda n=name, y=y: getattr(p, n)(y), "thread_local") for name, y in inputs.items()})


def with_peers(r: Rank, part: Products, full: Products | None, x: torch.Tensor) -> dict:
    """The layer with sums by loads of the peer's memory, and such a sum alone."""
    sums, want = PeerSums(x.numel(), device=r.device), r.captured(lambda: sharded(part, x))
    place = sums.place(*x.shape).normal_()
    calls = {"peer": r.captured(lambda: by_peer_loads(part, x, sums))}
    calls["peer_all_reduce"] = r.captured(lambda: sums(place))
    if len(x) >= COPIED_FROM:
        copied = CopiedSums(x.numel(), r.device)
        calls["copies"] = r.captured(lambda: sharded(part, x, copied))
        calls["copy_all_reduce"] = r.captured(lambda: copied(copied(place.clone())))
    if len(x) >= HALVES_FROM:
        calls["copies, halves"] = r.captured(lambda: in_halves(part, x, r.side, copied))
    for name in calls.keys() - {"peer_all_reduce", "copy_all_reduce"}:
        r.close(name, calls[name].result, want.result)
    found = r.times(calls)
    if "copy_all_reduce" in found:
        found["copy_all_reduce"] = round(found["copy_all_reduce"] / 2, 2)
    return {"us": found}


def replays(r: Rank, shape: Dense, count: int = 16) -> dict:
    """A graph with NCCL in it, replayed: how many results are not that of the first."""
    p = CONTESTANTS["w4a16"](Weights.drawn(shape, r.device).shard(shape, r.rank, RANKS), shape.q // RANKS)
    x = torch.randn(count, shape.hidden, device=r.device, generator=torch.Generator(r.device).manual_seed(7)).bfloat16()
    graph = r.captured(lambda: sharded(p, x))
    first, differing = graph.result.clone(), torch.zeros((), dtype=torch.int64, device=r.device)
    for _ in range(REPLAYS):
        graph.result.fill_(float("nan"))
        graph.graph.replay()
        differing += (graph.result != first).any()
    dist.all_reduce(differing)
    found = {"model": shape.model, "rows": count, "replays": REPLAYS, "differing": int(differing.item())}
    r.say(f"{found['replays']} replays with NCCL, of which {found['differing']} differ from the first")
    if found["differing"]:
        raise AssertionError(f"{found['differing']} of {REPLAYS} replays differ")
    return found


def mixture(r: Rank, layer: Any, counts: tuple[int, ...]) -> list[dict]:
    """The rows of a mixture of experts: ``counts`` tokens on each rank."""
    made, found = Mixture.drawn(layer, r.device, r.rank, RANKS), []
    for count in counts:
        row = mixed(r, made, count)
        found.append({"model": layer.model, "tokens": count} | row)
        times = "  ".join(f"{name} {us:.1f}" for name, us in row.get("us", {}).items())
        r.say(f"{layer.model:>14} {count:5} tokens a GPU  {times}")
    return found


def mixed(r: Rank, made: Mixture, count: int) -> dict:
    """A row of that table: one GPU with the rows of all ranks, each exchange and its steps."""
    layer = made.layer
    every, mine = routing(layer, count, r.rank, RANKS, r.device)
    one = r.captured(lambda: moe(every.x, every.ids, every.weights, made.experts))
    calls: dict[str, Captured | None] = {"one": None if r.rank else one}
    want = reference(r, lambda: one.result, every.x)[r.rank * count :][:count]
    for name, form in made.over_ranks.items():
        if r.smoke and name == "experts in bf16":
            continue
        exchange = form.exchange(mine.ids)
        sent = exchange.sent[1 - r.rank]
        calls[name] = r.captured(lambda form=form, e=exchange: form(mine.x, mine.ids, mine.weights, e))
        # NVFP4 rounds rows: about a tenth of their norm
        bound = ROUNDED if name == "rows in NVFP4" else CLOSE
        r.close(f"{layer.model}, {name}, {count} tokens", calls[name].result, want, bound)
        for step, call in steps_of(form, mine, exchange).items():
            calls[f"{name}: {step}"] = r.captured(call)
    gathered = made.over_ranks["rows in bf16"]
    calls["gathered"] = r.captured(lambda: gathered.all_gathered(mine.x, mine.ids, mine.weights))
    r.close(f"{layer.model}, gathered, {count} tokens", calls["gathered"].result, want)
    return {} if r.smoke else {"sent_rows": sent, "us": r.times(calls)}


def smoke(r: Rank, _: argparse.Namespace) -> None:
    """Small layers in the simulator; raises where a result is wrong."""
    with simulating("sm_90a"):
        dense(r, SMALL_DENSE, (1, 20))
        r.say("dense layers over two processes: as one process")
        mixture(r, SMALL_MIXTURE, (3,))
        r.say("experts over two processes: as one process")


def measure(r: Rank, options: argparse.Namespace) -> None:
    """Everything; the record is written after each step, so that a later one that fails leaves it."""
    record: dict = machine() | {"gpus": RANKS, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    record |= {"copy_bytes_s": copy_bandwidth(), "rounds": r.rounds, "multicast": "off"}
    record |= {"dense": [], "mixtures": [], "peer": [], "replays": None, "failed": {}}
    path = options.output or results_path("parallel")
    r.say(f"{RANKS} × {record['gpu']}, driver {record['driver']}, NCCL {record['nccl']}, torch {torch.__version__}")
    shapes, mixtures = ([x for x in every if x.model in options.models] for every in (DENSE, MIXTURES))

    def kept(key: str, rows: Any) -> None:
        record[key] = record[key] + rows if isinstance(record[key], list) else rows
        if not r.rank:
            write(record, path)

    for shape in shapes:
        kept("dense", dense(r, shape, tuple(options.rows)))
    if shapes:
        kept("replays", replays(r, shapes[0]))
    try:
        for shape in () if options.no_peer else shapes:
            kept("peer", dense(r, shape, tuple(options.rows), peer=True))
    except Exception as error:  # what a machine lacks is said in the record; the other rank fails or times out, too
        record["failed"]["peer"] = f"{type(error).__name__}: {error}"[:500]
        r.say(f"sums by peer loads did not run: {record['failed']['peer']}")
        kept("failed", record["failed"])
    for layer in mixtures:
        kept("mixtures", mixture(r, layer, tuple(options.tokens)))
    if not r.rank:
        print(text(record), f"record: {path}", sep="\n\n", flush=True)
    if "AssertionError" in record["failed"].get("peer", ""):
        raise AssertionError(record["failed"]["peer"])


@torch.inference_mode()
def process(rank: int, store: str, options: argparse.Namespace, work: Callable[..., None]) -> None:
    """What the process of a rank does. It ends at once, whatever other ranks and graphs with collectives do."""
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
        work(r, options)
        code = 0
    except AssertionError as error:
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [x.model for x in (*DENSE, *MIXTURES)]
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/parallel_<gpu>.json)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: at most four minutes with all compiling")
    parser.add_argument("--rounds", type=int, help="replays of each call (default: 61; --quick: 21)")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of dense layers")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens of each GPU, for experts")
    parser.add_argument("--no-peer", action="store_true", help="no sums by loads of the peer's memory")
    parser.add_argument("--seconds", type=float, default=600, help="after which the processes are ended")
    parser.add_argument("--smoke", action="store_true", help="small layers in the simulator: no GPU, no times")
    return parser.parse_args(arguments)


def main() -> int:
    return run(smoke if (options := parse()).smoke else measure, options)


def run(work: Callable[..., None], options: argparse.Namespace) -> int:
    """The exit code of the processes that do ``work(rank, options)``."""
    if not options.smoke and gpu_target("--smoke runs small layers in the simulator.") and device_count() < RANKS:
        print(f"{device_count()} GPU: this benchmark measures {RANKS}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = str(Path(folder) / "store"), options, work
        context = torch.multiprocessing.spawn(process, arguments, nprocs=RANKS, join=False)
        return ended(context.processes, options.seconds)


def ended(processes: list, seconds: float) -> int:
    """The exit code when all processes have ended, or were ended: after ``seconds``, or soon after another one."""
    last = time.perf_counter() + seconds
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.2)
        if any(process.exitcode is not None for process in processes):
            # what a rank waits for will not come
            last = min(last, time.perf_counter() + 15)
        if time.perf_counter() > last:
            print(f"ended: exit codes {[process.exitcode for process in processes]}", file=sys.stderr)
            for process in processes:
                process.kill()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())

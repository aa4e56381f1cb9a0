"""Times layers over two GPUs: ``python benchmarks/parallel.py --quick``. It starts a process for each GPU.

Tensor parallelism: the layers of Qwen3-32B and Llama-3.1-70B with 1, 16, 128 and 2048 rows. qkv, gate and up are
column-parallel, o and down row-parallel, each pair followed by an all-reduce. Attention, norms and residuals are left
out: some of qkv's columns stand in for attention's result. Weights are NVFP4 for bf16 rows (``w4a16``; also ``w4a16
early``, whose products ask L2 for weights while the preceding launch still runs, on one GPU, too), or bf16.

- ``one``: the whole layer on the first GPU, in the same processes, the other one idle;
- ``nccl``: over the GPUs, all-reduces by NCCL, all of it in one CUDA graph;
- ``halves``: the same for 2048 rows, where half of the rows is exchanged while the products of the other half run;
- ``peer``: all-reduces by loads of the peer's memory in one kernel (torch's symmetric memory);
- ``pushed``: all-reduces by stores into the peer's memory, in words that tell when they have arrived (``PeerSums``);
- ``copies``: from 128 rows on, the copy engines copy rows into the peer's memory, and a kernel adds; also in halves;
- ``local``: a rank's products without any exchange: what a perfect overlap would give;
- ``all_reduce`` and so on: one exchange alone; ``parts``: each product alone, on one GPU and of a shard.

Expert parallelism: 128 experts, 8 choices, over the GPUs. Rows travel in bf16 or NVFP4, or all ranks gather them;
beside one GPU with all rows, and experts in bf16 with the same exchange. The host knows the routing (``exchange``).

Graphs of the layer, with NCCL in it and with ``pushed``, are replayed a thousand times; every result is compared with
the first.

Times are medians of replays between two CUDA events, L2 cleared before each, a small all-reduce before the first event;
the slower GPU's time counts. Results are compared with one GPU first. NVLink multicast stays off (``MULTICAST_OFF``).

``--smoke`` needs no GPU: it compares small layers in the simulator, over two processes and gloo.

Exit codes: 0 done, 1 a result is wrong or a process failed, 2 fewer than two GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import Captured, capture, machine, results_path, write
from parallel_layers import (
    CONTESTANTS,
    DENSE,
    MIXTURES,
    SMALL_DENSE,
    SMALL_MIXTURE,
    Add,
    CopiedSums,
    Dense,
    LoadedSums,
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
from parallel_ranks import CLOSE, RANKS, Rank, run
from parallel_report import text

from cute_nvfp4 import moe, simulating
from cute_nvfp4.harness.timing import copy_bandwidth
from cute_nvfp4.nn import PeerSums

ROWS, TOKENS = (1, 16, 128, 2048), (1, 16, 128, 1024)
ROUNDED = 0.25
"""The largest relative distance from one GPU's result where rows were quantized to NVFP4."""
HALVES_FROM, COPIED_FROM = 1024, 128
"""Rows from which on a layer is timed in halves, and with sums by the copy engines."""
PUSHED_TO = 1024
"""Rows up to which a kernel writes sums into the peer's memory."""
REPLAYS = 1000


def reference(r: Rank, compute: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The first rank's result, on all ranks."""
    want = compute().contiguous() if not r.rank else torch.empty_like(like)
    dist.broadcast(want, 0)
    return want


def dense(r: Rank, shape: Dense, counts: tuple[int, ...], peer: bool = False) -> list[dict]:
    """The rows of a dense layer. Each contestant runs by itself, so that memory holds no other weights."""
    every, found = Weights.drawn(shape, r.device), []
    mine = every.shard(shape, r.rank, RANKS)
    for name, make in CONTESTANTS.items():
        if name not in r.contestants:
            continue
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
    """A row of the table: the layer in every form except those with peer memory, and its parts."""
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
    # prove that the check can fail: without the other rank's part the result differs
    if distance(calls["local"].result, want) < 10 * CLOSE:
        raise AssertionError("a rank's own part is as good as the whole")
    if r.smoke:
        return {}
    if r.rank:
        calls["one"] = None
    us = r.times(calls)
    return {"us": us, "parts_us": {"shard": parts(r, part, x), "one": parts(r, full, x)}}


def parts(r: Rank, p: Products | None, x: torch.Tensor) -> dict[str, float]:
    """Each product alone; empty if ``p`` is None, as another rank has the products."""
    if p is None:
        return r.times(dict.fromkeys(("qkv", "o", "gated", "down")))
    rows = p.attended(x)
    gated = p.gated(x)
    inputs = {"qkv": x, "o": rows, "gated": x, "down": gated}
    return r.times({name: capture(lambda n=name, y=y: getattr(p, n)(y), "thread_local") for name, y in inputs.items()})


def with_peers(r: Rank, part: Products, full: Products | None, x: torch.Tensor) -> dict:
    """The layer with sums through the peer's memory, and such a sum alone."""
    want, y, calls = r.captured(lambda: sharded(part, x)), torch.randn_like(x), {}
    if len(x) <= PUSHED_TO:
        pushed = PeerSums(x.numel(), device=r.device, early=part.early)
        calls["pushed"] = r.captured(lambda: sharded(part, x, pushed))
        calls["pushed_all_reduce"] = r.captured(lambda: pushed(y))
    loaded = LoadedSums(x.numel(), r.device)
    calls["peer"] = r.captured(lambda: by_peer_loads(part, x, loaded))
    calls["peer_all_reduce"] = r.captured(lambda: loaded(loaded.place(*x.shape)))
    if len(x) >= COPIED_FROM:
        copied = CopiedSums(x.numel(), r.device)
        calls["copies"] = r.captured(lambda: sharded(part, x, copied))
        calls["copy_all_reduce"] = r.captured(lambda: copied(copied(y.clone())))
    if len(x) >= HALVES_FROM:
        calls["copies, halves"] = r.captured(lambda: in_halves(part, x, r.side, copied))
    for name in (name for name in calls if "all_reduce" not in name):
        r.close(name, calls[name].result, want.result)
    found = r.times(calls)
    if "copy_all_reduce" in found:
        found["copy_all_reduce"] = round(found["copy_all_reduce"] / 2, 2)
    return {"us": found}


def replays(r: Rank, shape: Dense, form: str, count: int = 16) -> dict:
    """Replays a graph of the layer, and counts results that differ from the first."""
    made = CONTESTANTS["w4a16 early" if form == "pushed" else "w4a16"]
    p = made(Weights.drawn(shape, r.device).shard(shape, r.rank, RANKS), shape.q // RANKS)
    x = torch.randn(count, shape.hidden, device=r.device, generator=torch.Generator(r.device).manual_seed(7)).bfloat16()
    add: Add = PeerSums(x.numel(), device=r.device, early=True) if form == "pushed" else all_reduced
    graph = r.captured(lambda: sharded(p, x, add))
    first, differing = graph.result.clone(), torch.zeros((), dtype=torch.int64, device=r.device)
    for _ in range(REPLAYS):
        graph.result.fill_(float("nan"))
        graph.graph.replay()
        differing += (graph.result != first).any()
    dist.all_reduce(differing)
    found = {"model": shape.model, "form": form, "rows": count, "replays": REPLAYS, "differing": int(differing.item())}
    r.say(f"{found['replays']} replays, {form}, of which {found['differing']} differ from the first")
    if found["differing"]:
        raise AssertionError(f"{found['differing']} of {REPLAYS} replays, {form}, differ")
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
        # NVFP4 rounds rows by about a tenth of their norm
        bound = ROUNDED if name == "rows in NVFP4" else CLOSE
        r.close(f"{layer.model}, {name}, {count} tokens", calls[name].result, want, bound)
        for step, call in steps_of(form, mine, exchange).items():
            calls[f"{name}: {step}"] = r.captured(call)
    gathered = made.over_ranks["rows in bf16"]
    calls["gathered"] = r.captured(lambda: gathered.all_gathered(mine.x, mine.ids, mine.weights))
    r.close(f"{layer.model}, gathered, {count} tokens", calls["gathered"].result, want)
    return {} if r.smoke else {"sent_rows": sent, "us": r.times(calls)}


def smoke(r: Rank, _: argparse.Namespace) -> None:
    """Compares small layers in the simulator; raises AssertionError if a result is wrong."""
    with simulating("sm_90a"):
        dense(r, SMALL_DENSE, (1, 20))
        r.say("dense layers over two processes: as one process")
        mixture(r, SMALL_MIXTURE, (3,))
        r.say("experts over two processes: as one process")


def measure(r: Rank, options: argparse.Namespace) -> None:
    """Measures everything. The record is written after each step, so that a failure keeps the earlier steps."""
    record: dict = machine() | {"gpus": RANKS, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    record |= {"copy_bytes_s": copy_bandwidth(), "rounds": r.rounds, "multicast": "off"}
    record |= {"dense": [], "mixtures": [], "peer": [], "replays": [], "failed": {}}
    path = options.output or results_path("parallel")
    r.say(f"{RANKS} × {record['gpu']}, driver {record['driver']}, NCCL {record['nccl']}, torch {torch.__version__}")
    shapes, mixtures = ([x for x in every if x.model in options.models] for every in (DENSE, MIXTURES))

    def kept(key: str, rows: Any) -> None:
        record[key] = record[key] + rows if isinstance(record[key], list) else rows
        if not r.rank:
            write(record, path)

    for shape in shapes:
        kept("dense", dense(r, shape, tuple(options.rows)))
        if shape is shapes[0]:
            kept("replays", [replays(r, shape, "nccl")])
        if options.no_peer or record["failed"]:
            continue
        try:
            kept("peer", dense(r, shape, tuple(options.rows), peer=True))
            kept("replays", [replays(r, shape, "pushed")])
        except Exception as error:  # the record says what a machine lacks; the other rank fails or times out, too
            record["failed"]["peer"] = f"{type(error).__name__}: {error}"[:500]
            r.say(f"sums through the peer's memory did not run: {record['failed']['peer']}")
            kept("failed", record["failed"])
    for layer in mixtures:
        kept("mixtures", mixture(r, layer, tuple(options.tokens)))
    if not r.rank:
        print(text(record), f"record: {path}", sep="\n\n", flush=True)
    if "AssertionError" in record["failed"].get("peer", ""):
        raise AssertionError(record["failed"]["peer"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [x.model for x in (*DENSE, *MIXTURES)]
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/parallel_<gpu>.json)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: at most four minutes, compilation included")
    parser.add_argument("--rounds", type=int, help="replays of each call (default: 61; --quick: 21)")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=tuple(CONTESTANTS))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of dense layers")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens of each GPU, for experts")
    parser.add_argument("--no-peer", action="store_true", help="no sums by loads of the peer's memory")
    parser.add_argument("--seconds", type=float, default=600, help="time limit of the processes")
    parser.add_argument("--smoke", action="store_true", help="small layers in the simulator: no GPU, no times")
    return parser.parse_args(arguments)


def main() -> int:
    return run(smoke if (options := parse()).smoke else measure, options)


if __name__ == "__main__":
    sys.exit(main())

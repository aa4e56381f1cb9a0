"""What launches and barriers cost: empty kernels in a graph, when CTAs start, mbarriers, clusters, code that is new."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from copies import microseconds, spread
from device import Module


def graph_of(call: Callable[[], None], count: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``count`` calls, one after the other."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def measure(memory: Module, sync: Module, out: torch.Tensor, sms: int, cold: Callable[[], None]) -> dict[str, Any]:
    """Microseconds of empty kernels by grid, CTA, shared memory and cluster; nanoseconds until CTAs start."""
    results: dict[str, Any] = {}
    for grid, block, shared, cluster in (
        (1, 32, 0, 1),
        (sms, 128, 0, 1),
        (sms, 1024, 0, 1),
        (sms, 384, 200 << 10, 1),
        (sms, 384, 200 << 10, 2),
        (8 * sms, 128, 0, 1),
        (32 * sms, 128, 0, 1),
        (128 * sms, 128, 0, 1),
        (8 * sms, 384, 200 << 10, 1),
        (8 * sms, 128, 0, 2),
    ):

        def call(g=grid, b=block, s=shared, c=cluster) -> None:
            memory.launch("empty_argument", g, b, [out, 0], shared=s, cluster=c)

        one, many = graph_of(call, 1), graph_of(call, 101)
        single = microseconds(one.replay, 40)
        row = microseconds(many.replay, 10)
        results[f"empty, grid {grid}, {block} threads, {shared >> 10} KB, cluster {cluster}"] = {
            "one_us": round(single, 3),
            "cold_us": round(microseconds(one.replay, 20, cold), 3),
            "each_more_us": round((row - single) / 100, 3),
        }
    for grid, block, shared, cluster in (
        (sms, 128, 0, 1),
        (sms, 384, 200 << 10, 1),
        (sms, 384, 200 << 10, 2),
        (4 * sms, 384, 200 << 10, 1),
        (16 * sms, 128, 0, 1),
    ):
        for _ in range(3):
            memory.launch("start_times", grid, block, [out, 2000], shared=shared, cluster=cluster)
        rows = out[: 4 * grid].view(-1, 4).tolist()
        first = min(r[0] for r in rows)
        entry = {f"start_{k}_ns": v for k, v in spread([r[0] - first for r in rows]).items()}
        entry["end_max_ns"] = max(r[1] for r in rows) - first
        ends: dict[int, list[int]] = {}
        for r in rows:
            ends.setdefault(r[2], []).append(r[0] - first)
        gaps = [b - a for starts in ends.values() for a, b in zip(sorted(starts), sorted(starts)[1:])]
        entry["gap_on_sm_p50_ns"] = statistics.median(gaps) if gaps else 0
        entry["spin_cycles"] = statistics.median(r[3] for r in rows)
        results[f"starts, grid {grid}, {block} threads, {shared >> 10} KB, cluster {cluster}"] = entry
    memory.launch("start_times", 1, 32, [out, 20_000_000])
    now, then, _, cycles = out[:4].tolist()
    results["clock"] = {"MHz": round(cycles / (then - now) * 1e3, 1)}
    for name, clear in (("cold", True), ("again", False)):
        if clear:
            cold()
        memory.launch("first_cycles", sms, 32, [out, out[1 << 18 :], 0])
        rows = out[: 4 * sms].view(-1, 4).tolist()
        words = ("parameter", "special register", "load")
        results[f"first cycles of a CTA, {name}"] = {w: spread([r[k] for r in rows]) for k, w in enumerate(words)}
    words = bytes(range(256)) * 4
    for name, clear in (("cold", True), ("again", False)):
        if clear:
            cold()
        memory.launch("parameters", sms, 32, [out, words])
        rows = out[: 64 * sms].view(-1, 64)
        each = rows.float().median(dim=0).values.tolist()
        results[f"parameters, 32 bytes apart, {name}"] = {"first": each[:32], "again": each[32:]}
    for name, clear in (("first launch", False), ("again, L2 cold", True), ("again", False)):
        if clear:
            cold()
        sync.launch("first_pass", 1, 32, [out, 3])
        results[f"4 KB of new code, {name}"] = {f"pass {p}": out[16 * p : 16 * p + 16].tolist() for p in range(3)}
    return results


def barriers(sync: Module, out: torch.Tensor) -> dict[str, Any]:
    """Cycles of barriers."""
    results: dict[str, Any] = {}
    sync.launch("ping_pong", 1, 64, [out, 200])
    results["mbarrier, arrive to wake and back"] = {"cycles": out[0].item()}
    sync.launch("ping_pong_cluster", 2, 32, [out, 200], cluster=2)
    results["the same across a cluster"] = {"cycles": out[0].item()}
    sync.launch("mbarrier_costs", 1, 32, [out])
    names = ("try_wait that passes", "arrive", "fence.proxy.async", "elect.sync")
    results["in a row"] = {name: round(out[k].item() / 32, 2) for k, name in enumerate(names)}
    for warps in (1, 4, 8, 16, 32):
        sync.launch("bar_sync", 1, 32 * warps, [out])
        results[f"bar.sync of {warps} warps"] = {"cycles": round(out[0].item() / 64, 2)}
    for size in (1, 2, 4, 8):
        for warps in (1, 12):
            sync.launch("cluster_sync", size, 32 * warps, [out], cluster=size)
            results[f"barrier.cluster of {size} CTAs, {warps} warps"] = {"cycles": round(out[0].item() / 16, 1)}
    for sms in (2, 132):
        for each in (1, 2, 4, 8, 16, 32):
            sync.launch("exchange", sms, 128, [out, each], shared=65 << 10, cluster=2)
            cycles = statistics.median(out[:sms].tolist())
            results[f"st.async, {2 * each} KB to the other CTA, {sms} CTAs"] = {"cycles": cycles}
    sync.launch("remote_chase", 2, 32, [out, 64], cluster=2)
    results["ld.shared::cluster, chain"] = {"cycles": out[0].item()}
    sync.launch("remote_rate", 2, 1024, [out, 16], shared=32768, cluster=2)
    results["ld.shared::cluster.v4"] = {"bytes a cycle": round(1024 * 16 * 8 * 16 / out[0].item(), 1)}
    return results

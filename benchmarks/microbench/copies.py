"""What memory costs: chains of loads, bandwidth by bytes in flight, shared memory, TMA and bulk copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from device import Module, tensor_map

MB = 1 << 20
SHARED = 200 << 10


def microseconds(call: Callable[[], None], repeats: int = 5, before: Callable[[], None] | None = None) -> float:
    """The median time between two events around ``call``."""
    times = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        torch.cuda._sleep(500_000)  # the launch is queued when the first event comes
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def spread(values: list[int]) -> dict[str, float]:
    """The distribution of a list of cycles."""
    ordered = sorted(values)
    return {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (1, 10, 50, 90, 99)}


def chain(data: torch.Tensor, lines: int, step: int) -> None:
    """Fills ``data`` (int64) with a random cycle through ``lines`` places that are ``step`` bytes apart."""
    order = torch.randperm(lines, generator=torch.Generator().manual_seed(1)).to(data.device)
    order[order == 0] = order[0].clone()
    order[0] = 0
    places = order * (step // 8)
    data[places] = data.data_ptr() + torch.roll(places, -1) * 8


def latency(memory: Module, out: torch.Tensor, data: torch.Tensor, cold: Callable[[], None]) -> dict[str, Any]:
    """Cycles of one load of a chain, by where it finds its line."""
    results = {}
    for name, lines, step, through_l1, again, clear in (
        ("L1", 128, 128, 1, 512, False),
        ("L2, 2 MB", 16384, 128, 0, 4000, False),
        ("L2, 16 MB", 131072, 128, 0, 4000, False),
        ("DRAM, 64 MB", 524288, 128, 0, 4000, True),
        ("DRAM, 2 GB", 16384, 131072, 0, 4000, True),
    ):
        chain(data, lines, step)
        if clear:
            cold()
        else:
            for _ in range(2):  # ends where it began: the second walk finds what the first has left
                memory.launch("chase", 1, 1, [out, data, again, through_l1])
        memory.launch("chase", 1, 1, [out, data, again, through_l1])
        results[name] = spread(out[again // 4 : again].tolist())
    return results


def bandwidth(memory: Module, out: torch.Tensor, data: torch.Tensor, sms: int) -> dict[str, Any]:
    """GB/s of loads by bytes in flight an SM; of stores; of a copy; from DRAM and from L2."""
    sink, results = out.view(torch.float32), {}
    whole = data.numel() * 8 // 2
    for unroll in (1, 2, 4, 8):
        for threads, ctas in ((128, 1), (256, 1), (512, 1), (1024, 1), (1024, 2)):
            stride = sms * ctas * threads * unroll
            vectors = whole // 16 // stride * stride
            read = partial(memory.launch, f"read_{unroll}")
            time = microseconds(partial(read, sms * ctas, threads, [sink, data, vectors, 1]))
            inside = 16 * MB // 16 // stride * stride
            hot = microseconds(partial(read, sms * ctas, threads, [sink, data, inside, 20]))
            one = [sink, data, 2 * MB // 16 // (threads * unroll) * threads * unroll, 4]
            alone = microseconds(partial(read, 1, threads, one))
            results[f"read, {threads * ctas * unroll * 16} B in flight an SM ({ctas}x{threads}x{unroll})"] = {
                "DRAM GB/s": round(vectors * 16 / time / 1e3, 1),
                "L2 GB/s": round(inside * 16 * 20 / hot / 1e3, 1),
                "one SM from L2 GB/s": round(one[2] * 16 * 4 / alone / 1e3, 1),
            }
    vectors = whole // 16 // (sms * 2 * 1024 * 4) * (sms * 2 * 1024 * 4)
    target = data.view(-1)[whole // 8 :]
    time = microseconds(lambda: memory.launch("write_all", sms * 2, 1024, [target, vectors]))
    results["write"] = {"GB/s": round(vectors * 16 / time / 1e3, 1)}
    time = microseconds(lambda: memory.launch("copy_all", sms * 2, 1024, [target, data, vectors]))
    results["copy"] = {"read + written GB/s": round(vectors * 32 / time / 1e3, 1)}
    for name, far in (("own word", 1), ("one word", 0)):
        time = microseconds(lambda f=far: memory.launch("reduce_global", sms, 1024, [target, 64, f]))
        results[f"red.add.f32, {name}"] = {"lanes/ns": round(sms * 1024 * 64 / time / 1e3, 2)}
    memory.launch("atomic_chain", 1, 1, [out, target, 64])
    results["atom.add, chain"] = {"cycles": out[0].item()}
    memory.launch("store_fence", 1, 1, [out, target])
    results["store, then fence.acq_rel.gpu"] = {"cycles": out[:16].tolist()}
    return results


def whole_launches(
    memory: Module, bulk: Module, out: torch.Tensor, data: torch.Tensor, sms: int, cold
) -> dict[str, Any]:
    """Microseconds of plain kernels that read so many MB once, L2 cold; rates by chunk, and of cp.async."""
    results: dict[str, Any] = {}
    sink = out.view(torch.float32)
    for log_chunk in (2, 3, 4, 5, 6, 8, 10, 14):
        args = [sink, data, log_chunk, 26 - log_chunk]
        time = microseconds(partial(memory.launch, "read_chunks", sms * 2, 1024, args))
        results[f"1 GB in scrambled chunks of {16 << log_chunk} B"] = {"GB/s": round((1 << 30) / time / 1e3, 1)}
    for depth in (2, 4, 8):
        for threads in (256, 512, 1024):
            stride, shared_bytes = sms * threads, depth * threads * 16
            entry = results[f"cp.async, {depth} x {threads} x 16 B in flight an SM"] = {}
            for place, bytes_ in (("DRAM", 1 << 30), ("L2", 16 * MB)):
                vectors = bytes_ // 16 // stride * stride
                call = partial(memory.launch, f"copy_async_{depth}", sms, threads, [sink, data, vectors], shared_bytes)
                entry[f"{place} GB/s"] = round(vectors * 16 / microseconds(call) / 1e3, 1)
    for size in (8, 16, 32, 64, 128):
        vectors = size * MB // 16 // (sms * 1024 * 4) * (sms * 1024 * 4)
        boxes = size * MB // 8192
        calls = {
            "threads 1x1024x4": lambda v=vectors: memory.launch("read_4", sms, 1024, [sink, data, v, 1]),
            "bulk 16x8 KB": lambda b=boxes: bulk.launch(
                "bulk_stream", sms, 32, [data, 64, b, 16, 1 << 30], shared=SHARED
            ),
        }
        entry = results[f"{size} MB"] = {"bytes by threads": vectors * 16, "bytes by bulk": boxes * 8192}
        for name, call in calls.items():
            entry[f"{name}, cold us"] = round(microseconds(call, 15, cold), 3)
            entry[f"{name}, again us"] = round(microseconds(call, 15), 3)
    return results


def shared(memory: Module, out: torch.Tensor) -> dict[str, Any]:
    """Cycles of shared memory: one load of a chain; one request of the SM with 4, 8, 16 and 32 warps."""
    results: dict[str, Any] = {}
    for conflict in (1, 2, 4, 32):
        memory.launch("shared_chase", 1, 32, [out, 64, conflict])
        results[f"chain, {conflict}-way"] = {"cycles": out[0].item()}
    for name in ("lds_32", "lds_64", "lds_128", "sts_32", "sts_128", "ldmatrix_x4", "stmatrix_x4", "atoms_add"):
        for lane_step in (1, 2, 4):
            entry = results.setdefault(f"{name}, lanes {lane_step} apart", {})
            for warps in (4, 8, 16, 32):
                memory.launch(name, 1, 32 * warps, [out, 32, lane_step], shared=65536)
                times = out[: 2 * warps].view(-1, 2).tolist()
                entry[f"warps_{warps}"] = round(
                    (max(t[1] for t in times) - min(t[0] for t in times)) / (256 * warps), 3
                )
    return results


def tma(module: Module, out: torch.Tensor, data: torch.Tensor, sms: int, cold: Callable[[], None]) -> dict[str, Any]:
    """Bulk copies and tiles: cycles of one box at a time, GB/s by bytes in flight an SM."""
    results: dict[str, Any] = {}
    alone = partial(module.launch, shared=SHARED)
    table = data.view(torch.bfloat16)[: 1 << 29].view(-1, 64)  # rows of 128 bytes, 1 GB
    for rows in (2, 8, 16, 32, 64, 128, 256):
        size, steps, map_ = rows * 128, 64, tensor_map(table, (rows, 64))
        for name, call in (
            ("bulk", partial(alone, "bulk_latency", 1, 32, [out, data, size, steps, size])),
            ("tile", partial(alone, "tile_latency", 1, 32, [out, map_, rows, steps])),
        ):
            entry = results.setdefault(f"{name} of {size} B, one at a time", {})
            for place in ("DRAM", "L2"):
                if place == "DRAM":
                    cold()
                call()
                pairs = out[: 2 * steps].view(-1, 2).tolist()
                entry[f"{place} first"] = pairs[0][0]
                entry[f"{place} p50"] = statistics.median(p[0] for p in pairs[1:])
                entry["issue"] = statistics.median(p[1] for p in pairs[1:])
    for rows in (8, 16, 32, 64, 128, 256):
        map_, half = tensor_map(table, (rows, 64)), tensor_map(table, (rows // 2, 64))
        for stages in (1, 2, 3, 4, 6, 8, 12, 16):
            if rows * 128 * stages > 192 << 10:
                continue
            entry = results.setdefault(f"{stages} boxes of {rows * 128} B in flight an SM", {})
            boxes = table.shape[0] // rows // 2
            inside, size = 16 * MB // (rows * 128), rows * 128
            for name, kernel, extra in (("bulk", "bulk_stream", [data]), ("tile", "tile_stream", [map_])):
                args = [*extra, rows, boxes, stages, 1 << 30]
                time = microseconds(lambda k=kernel, a=args: module.launch(k, sms, 32, a, shared=SHARED), 3)
                entry[f"{name} DRAM GB/s"] = round(boxes * size / time / 1e3, 1)
                args = [*extra, rows, inside * 20, stages, inside]
                time = microseconds(lambda k=kernel, a=args: module.launch(k, sms, 32, a, shared=SHARED), 3)
                entry[f"{name} L2 GB/s"] = round(inside * 20 * size / time / 1e3, 1)
                args = [*extra, rows, inside, stages, inside]
                time = microseconds(lambda k=kernel, a=args: module.launch(k, 1, 32, a, shared=SHARED), 3)
                entry[f"{name} one SM, L2 GB/s"] = round(inside * size / time / 1e3, 1)
            if rows >= 16 and rows * 128 * stages <= 128 << 10:
                args = [half, rows, inside * 20, stages, inside]
                call = lambda a=args: module.launch("cast_stream", sms, 32, a, shared=SHARED, cluster=2)  # noqa: E731
                entry["multicast of 2, L2, delivered GB/s"] = round(
                    2 * inside * 20 * size / microseconds(call, 3) / 1e3, 1
                )
    for size in (1024, 4096, 16384, 65536):
        module.launch("store_latency", 1, 32, [out, data, size, 32], shared=SHARED)
        pairs = out[:64].view(-1, 2).tolist()
        entry = results[f"bulk store of {size} B"] = {}
        entry["until read"], entry["more until done"] = (statistics.median(p[k] for p in pairs[4:]) for k in (0, 1))
    return results

"""Measures the host time of every operation, beside torch's own: ``python benchmarks/launch.py``.

Times are medians of single warm calls, by the host's clock, with the GPU's queue drained every few calls, in five
rounds of alternating order. One run gives all times, also as ratios to ``torch.mm(out=)`` of (1, 4096) · (4096, 4096)
in bf16: the product that a GEMV replaces. On a GPU it also compares a CUDA graph of ``NVFP4Linear`` with a graph of its
two kernels. ``--host-only`` needs no GPU: a function that does nothing replaces the driver, so that the time is that of
this package's own code, for every operation and architecture.

Exit codes: 0 done, 2 no CUDA device (and not ``--host-only``).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import gpu_target, machine, results_path, write

import cute_nvfp4 as nv
from cute_nvfp4.ops import scratch
from cute_nvfp4.runtime import backend, launch, template
from cute_nvfp4.runtime.kernel import Kernel
from cute_nvfp4.sim.host.cubin import parameter_sizes
from cute_nvfp4.target import Target, architecture

CALLS, ROUNDS, DRAIN = 100, 5, 8


def host_us(call: Callable[[], object], calls: int = CALLS) -> float:
    """The median host time of a warm call."""
    drain = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(20):
        call()
    drain()
    times = []
    for i in range(calls):
        if i % DRAIN == 0:
            drain()
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    drain()
    return statistics.median(times) / 1e3


@contextlib.contextmanager
def without_driver(arch: str) -> Iterator[None]:
    """Within this block every call on CPU tensors is planned and made as on a GPU, but ``cuLaunchKernelEx`` does
    nothing."""
    nothing = ctypes.CDLL(None).pthread_equal  # of two addresses that differ: 0, a success
    nothing.argtypes, nothing.restype = (ctypes.c_void_p,) * 4, ctypes.c_int

    def launcher(self: Kernel, config, target, device, arguments, touched):
        kernel, signature = self.compile(config), self.signature(config)
        planned = template.capture(kernel, signature.types, signature.values(arguments, 0), signature.varying)
        return launch.CudaLauncher(kernel, planned, 0)

    def load(cubin: bytes, names: list[str], device: int, title: str) -> dict[str, launch.driver.Function]:
        return {name: launch.driver.Function(0, offsets(sizes)) for name, sizes in parameter_sizes(cubin).items()}

    target = Target(architecture(arch), "cuda")
    with (
        mock.patch.object(Kernel, "launcher", launcher),
        mock.patch.object(launch.driver, "load", load),
        mock.patch.object(launch.driver, "launch_function", lambda: nothing),
        mock.patch.object(launch, "raw_stream", lambda index: 0),
        mock.patch.object(scratch, "raw_stream", lambda index: 0),
        mock.patch.object(scratch, "device_index", lambda device: 0),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch.cuda, "current_stream", lambda device: mock.Mock()),
        mock.patch.object(backend, "_resolve", lambda *args: target),
        mock.patch.object(backend, "device_index", lambda device: 0),
        mock.patch.object(backend, "_device_sm_count", lambda index, session: target.arch.sm_count),
    ):
        yield


def offsets(sizes: list[int]) -> tuple[int, ...]:
    """Where parameters of these sizes start, each at a multiple of its own size, up to 64."""
    found, end = [], 0
    for size in sizes:
        step = min(size & -size, 64)
        found.append(-(-end // step) * step)
        end = found[-1] + size
    return tuple(found)


def packed(weight: nv.BlockScaledTensor, x: torch.Tensor, row: torch.Tensor) -> Iterator[tuple[str, Callable]]:
    """Yields calls of ``gemm`` with a prepared weight: one row (the streaming kernel) and 128 rows (WGMMA)."""
    weight = nv.prepare_weight(weight)
    rows = x.repeat(8, 1)
    for name, a in (("1 row", row), ("128 rows", rows)):
        y = nv.gemm(a, weight)
        yield f"gemm, prepared weight, {name} out=", lambda a=a, y=y: nv.gemm(a, weight, out=y)
        yield f"gemm, prepared weight, {name}", lambda a=a: nv.gemm(a, weight)
        yield f"gemm, prepared weight, {name}, prepared", nv.prepare(nv.gemm, a, weight, out=y)
        step = nv.prepare(nv.gemm, a, weight, out=y, vary=("a",))
        yield f"gemm, prepared weight, {name}, prepared, a varies", lambda a=a, step=step: step(a)


def grouped(device: str) -> Iterator[tuple[str, Callable]]:
    """Yields calls of eight groups with prepared weights, with as many rows each as experts have in decoding."""
    problems = []
    for i in range(8):
        weight = nv.prepare_weight(nv.quantize(torch.randn(256, 4096, device=device), global_scale=None))
        problems.append((torch.randn(16 + i, 4096, device=device, dtype=torch.bfloat16), weight))
    outs = nv.grouped_gemm(problems)
    yield "grouped_gemm of 8, prepared weights, out=", lambda: nv.grouped_gemm(problems, out=outs)
    yield "grouped_gemm of 8, prepared weights", lambda: nv.grouped_gemm(problems)
    others = [(x.clone(), weight) for x, weight in problems], [x.clone() for x in outs]
    turns = itertools.cycle([(problems, outs), others])

    def vary() -> None:
        now, out = next(turns)
        nv.grouped_gemm(now, out=out)

    yield "grouped_gemm of 8, prepared weights, x and out vary", vary
    yield "grouped_gemm of 8, prepared weights, prepared", nv.prepare(nv.grouped_gemm, problems, out=outs)
    step = nv.prepare(nv.grouped_gemm, problems, out=outs, vary=("a", "out"))
    given = itertools.cycle([([x for x, _ in now], out) for now, out in ((problems, outs), others)])
    yield "grouped_gemm of 8, prepared weights, prepared, x and out vary", lambda: step(*next(given))


def operations(device: str, arch: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields every call that is timed on an architecture, by name."""
    k = 4096
    weight = nv.quantize(torch.randn(k, k, device=device, dtype=torch.bfloat16))
    x = torch.randn(16, k, device=device, dtype=torch.bfloat16)
    row = x[:1].contiguous()
    scale = torch.tensor(0.01, device=device)
    small, vector = nv.quantize(x), nv.quantize(row)
    y, y16 = torch.empty(k, device=device, dtype=torch.bfloat16), torch.empty(16, k, device=device)
    out = nv.quantize(x, global_scale=scale)
    yield "gemv out=", lambda: nv.gemv(weight, vector, out=y)
    yield "gemv", lambda: nv.gemv(weight, vector, out_dtype=torch.bfloat16)
    run = nv.prepare(nv.gemv, weight, vector, out=y)
    yield "gemv prepared", run
    vary = nv.prepare(nv.gemv, weight, vector, out=y, vary=("b", "out"))
    yield "gemv prepared, b and out vary", lambda: vary(vector, y)
    yield "quantize out=, scale given", lambda: nv.quantize(x, global_scale=out.global_scale, out=out)
    yield "quantize, scale given", lambda: nv.quantize(x, global_scale=scale)
    yield "quantize, scale computed", lambda: nv.quantize(x)
    ready = nv.prepare(nv.quantize, x, global_scale=out.global_scale, out=out, vary=("x",))
    yield "quantize prepared, x varies", lambda: ready(x)
    yield "BlockScaledTensor(…)", lambda: nv.BlockScaledTensor(weight.data, weight.scale, weight.global_scale)
    linear = nv.NVFP4Linear(weight, input_global_scale=scale)
    yield "NVFP4Linear, 1 row", lambda: linear(row)
    gain, gate = torch.ones(k, device=device, dtype=torch.bfloat16), torch.randn_like(x)
    yield "rmsnorm_quantize", lambda: nv.rmsnorm_quantize(x, gain, global_scale=scale)
    place = {"global_scale": out.global_scale, "out": out}
    in_place = {"residual": gate, "residual_out": gate, **place}
    yield "rmsnorm_quantize out=, residual in place", lambda: nv.rmsnorm_quantize(x, gain, **in_place)
    yield "silu_mul_quantize", lambda: nv.silu_mul_quantize(gate, x, global_scale=scale)
    yield "silu_mul_quantize out=", lambda: nv.silu_mul_quantize(gate, x, **place)
    if arch == "sm_90a":
        yield from packed(weight, x, row)
        yield from grouped(device)
    if not arch.startswith("sm_10"):
        return
    yield "gemm out=", lambda: nv.gemm(small, weight, out=y16)
    yield "gemm", lambda: nv.gemm(small, weight)
    multiply = nv.prepare(nv.gemm, small, weight, out=y16)
    yield "gemm prepared", multiply
    halves = [nv.quantize(torch.randn(512, k, device=device)) for _ in range(2)]
    yield "gated_gemm", lambda: nv.gated_gemm(small, *halves)
    weights = [nv.quantize(torch.randn(256, k, device=device), global_scale=None) for _ in range(8)]
    rows = [nv.quantize(torch.randn(16 + i, k, device=device), global_scale=None) for i in range(8)]
    groups = list(zip(rows, weights))
    outs = nv.grouped_gemm(groups)
    yield "grouped_gemm of 8 out=", lambda: nv.grouped_gemm(groups, out=outs)
    yield "grouped_gemm of 8", lambda: nv.grouped_gemm(groups)


def torch_calls(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields torch's calls for comparison, by name."""
    a, b = (torch.randn(16, 16, device=device) for _ in range(2))
    c = torch.empty(16, 16, device=device)
    wide = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    row = torch.randn(1, 4096, device=device, dtype=torch.bfloat16)
    product = torch.empty(1, 4096, device=device, dtype=torch.bfloat16)
    yield "torch.add(out=)", lambda: torch.add(a, b, out=c)
    yield "torch.mm(out=) of 16 × 16", lambda: torch.mm(a, b, out=c)
    if device != "cpu":
        yield "torch.mm(out=)", lambda: torch.mm(row, wide, out=product)
        yield "torch.mm", lambda: torch.mm(row, wide)
        yield "functional.linear", lambda: torch.nn.functional.linear(row, wide)


def graph_us(calls: Mapping[str, Callable[[], object]], repeats: int = 32, rounds: int = 60) -> dict[str, float]:
    """GPU time of a call in a CUDA graph of ``repeats`` calls: the median of replays, which take turns."""
    graphs, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(repeats):
                call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(rounds + 5):
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 5:
                times[name].append(start.elapsed_time(end) * 1e3 / repeats)
    return {name: statistics.median(found) for name, found in times.items()}


def linear_graphs() -> dict[str, float]:
    """GPU time of ``NVFP4Linear`` on one row, 4096 → 4096 in bf16, and of its kernels alone, in graphs."""
    k, options = 4096, {"device": "cuda", "dtype": torch.bfloat16}
    weight, row = nv.quantize(torch.randn(k, k, **options)), torch.randn(1, k, **options)
    linear = nv.NVFP4Linear(weight, input_global_scale=torch.tensor(0.01, device="cuda"))
    a, y = nv.quantize(row, global_scale=linear.input_global_scale), torch.empty(k, **options)

    def kernels() -> None:
        nv.quantize(row, global_scale=a.global_scale, out=a)
        nv.gemv(weight, a, out=y)

    return graph_us({"NVFP4Linear, 1 row": lambda: linear(row), "quantize out= and gemv out=": kernels})


def measured(arch: str, host_only: bool) -> dict[str, float]:
    """Microseconds by name."""
    device = "cpu" if host_only else "cuda"
    with without_driver(arch) if host_only else contextlib.nullcontext():
        calls = {**dict(torch_calls(device)), **dict(operations(device, arch))}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(ROUNDS):
            for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
                found[name].append(host_us(calls[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host-only", action="store_true", help="no GPU: the driver does nothing")
    parser.add_argument("--arch", default="sm_100a", help="what --host-only plans for")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args(arguments)
    if not given.host_only:
        gpu_target("--host-only measures this package's own code.")
    arch = given.arch if given.host_only else backend.resolve("cuda", "cuda").arch.name
    found = measured(arch, given.host_only)
    unit = found.get("torch.mm(out=)", found["torch.add(out=)"])
    print(f"host time of a call on {arch}, µs, and as a multiple of torch.{'add' if given.host_only else 'mm'}(out=)")
    for name, us in found.items():
        print(f"{name:52} {us:8.2f} {us / unit:6.2f}")
    record = {"arch": arch, "host_only": given.host_only, "host_us": found}
    if not given.host_only:
        graphs = linear_graphs()
        whole, kernels = graphs.values()
        print(f"in a CUDA graph: NVFP4Linear {whole:.2f} µs, its kernels {kernels:.2f} µs: {whole / kernels:.3f} ×")
        record = {"machine": machine(), **record, "graph_us": graphs, "linear_to_its_kernels": whole / kernels}
        write(record, given.json or results_path("launch"))
    elif given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Whole launches of kernels that do one thing: measured like those that the clock predicts, and modelled beside.

``python benchmarks/microbench/whole.py --model`` (NVRTC, no GPU) or ``--measure`` (an H200); without an option the two
records are set side by side. None of these kernels is among those predicted: they are what the clock's figures of a
launch are taken from.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

MB = 1 << 20
_FMA = "".join(f"fma.rn.f32 %{j}, %{j}, %4, %4;" for j in range(4))
DIVIDED = (0, 1, 4, 8, 16, 24, 32, 48, 100, 200)
"""KB of shared memory."""
CODES = (64, 256, 512, 1024, 1536, 2048, 4096)


class Map(NamedTuple):
    """A tensor map: boxes of 128 rows of 128 bytes of a buffer whose rows have ``columns`` elements of 16 bits."""

    buffer: str
    columns: int


class Case(NamedTuple):
    """A launch. ``source`` names the text of the kernel; an argument is a number, the name of a buffer, or a map of
    one."""

    name: str
    source: str
    kernel: str
    grid: int
    block: int
    arguments: tuple[object, ...]
    shared: int = 0
    cluster: int = 1


def code() -> str:
    """Kernels of straight code: so many FMAs that could issue one a cycle."""
    out = []
    for n in CODES:
        lines = f'asm volatile("{_FMA * 16}" : "+f"(a), "+f"(c), "+f"(d), "+f"(e) : "f"(b));\n' * (n // 64)
        out.append(
            f'extern "C" __global__ void code_{n}(long long* out, float b) {{\nfloat a = b, c = b + 1, d = b + 2, '
            f"e = b + 3;\n{lines}if (a + c + d + e == 1.234f) out[0] = 1;\n}}"
        )
    return "\n".join(out)


def _reads() -> list[Case]:
    out = []
    for size in (4, 16, 64):
        for unroll, threads in ((1, 1024), (4, 512), (4, 1024)):
            vectors = size * MB // 16 // (132 * threads * unroll) * 132 * threads * unroll
            if vectors:
                name = f"read {vectors * 16 / 1e6:.1f} MB, {threads} threads of {unroll} x 16 B"
                out.append(Case(name, "memory", f"read_{unroll}", 132, threads, ("out", "data", vectors, 1)))
        arguments = ("data", 64, size * MB // 8192, 16, 1 << 30)
        out.append(Case(f"read {size} MB in bulk, 16 x 8 KB", "tma", "bulk_stream", 132, 32, arguments, 200 << 10))
    return out


def _writes() -> list[Case]:
    out = []
    for size in (1, 4, 16, 32):
        vectors = size * MB // 16
        name = f"write {size} MB"
        out.append(Case(name, "memory", "write_all", 264, 512, ("target", vectors)))
        if size > 1:
            vectors = vectors // (132 * 512 * 4) * 132 * 512 * 4
            name = f"copy {vectors * 16 / 1e6:.1f} MB"
            out.append(Case(name, "memory", "copy_all", 132, 512, ("target", "data", vectors)))
    return out


def _boxes() -> list[Case]:
    """Rings of boxes of 16 KB without anything to do, boxes that are written, and sums sent to the other CTA."""
    out = []
    for grid, steps, columns in ((30, 1, 64), (30, 4, 256), (30, 4, 4096), (132, 8, 512), (132, 16, 1024)):
        name = f"{steps} boxes of 16 KB, rows {2 * columns} B apart, {grid} x 64"
        plan = (steps, 1, 6, 0, 0, 0, 0, 0, 128)
        arguments = ("out", Map("data", columns), Map("data", columns), "data", *plan)
        out.append(Case(name, "rings", "ring", grid, 64, arguments, 217 << 10))
    for grid, boxes in ((30, 1), (132, 1), (132, 8)):
        name = f"{boxes} boxes of 16 KB written, {grid} x 32"
        out.append(Case(name, "whole", "box_store", grid, 32, (Map("target", 64), boxes), 17 << 10))
    for each in (1, 8, 16, 32):
        name = f"{2 * each} KB to the other CTA, 132 x 128"
        out.append(Case(name, "sync", "exchange", 132, 128, ("out", each), 65 << 10, 2))
    return out


CASES = (
    Case("nothing, 1 x 32", "whole", "nothing", 1, 32, ("out", 0)),
    Case("nothing, 132 x 128", "whole", "nothing", 132, 128, ("out", 0)),
    Case("nothing, 132 x 1024", "whole", "nothing", 132, 1024, ("out", 0)),
    Case("nothing, 132 x 384, 200 KB", "whole", "nothing", 132, 384, ("out", 0), 200 << 10),
    *(Case(f"4000 cycles, {kb} KB", "whole", "count", 132, 128, ("out", 4000), kb << 10) for kb in DIVIDED),
    Case("nothing, 1056 x 128", "whole", "nothing", 1056, 128, ("out", 0)),
    Case("nothing, 4224 x 128", "whole", "nothing", 4224, 128, ("out", 0)),
    Case("a store a CTA, 132 x 128", "whole", "store_one", 132, 128, ("out",)),
    Case("1 store of 16 B a thread, 132 x 512", "whole", "store_all", 132, 512, ("target", 1)),
    Case("4 stores of 16 B a thread, 132 x 512", "whole", "store_all", 132, 512, ("target", 4)),
    Case("16 stores of 16 B a thread, 132 x 512", "whole", "store_all", 132, 512, ("target", 16)),
    Case("1 load a thread, 132 x 128", "whole", "load_one", 132, 128, ("out", "data")),
    Case("1 load and store a thread, 132 x 128", "whole", "load_store", 132, 128, ("target", "data")),
    Case("4 loads in a chain, 4 MB apart, 132 x 128", "whole", "load_chain", 132, 128, ("out", "data", 4, 4 << 20)),
    Case("16 loads in a chain, 4 MB apart, 132 x 128", "whole", "load_chain", 132, 128, ("out", "data", 16, 4 << 20)),
    Case("16 loads in a chain, 1 MB apart, 132 x 32", "whole", "load_chain", 132, 32, ("out", "data", 16, 1 << 20)),
    *(Case(f"{n} instructions, 132 x 32", "code", f"code_{n}", 132, 32, ("out", 1)) for n in CODES),
    Case("1024 instructions, 132 x 512", "code", "code_1024", 132, 512, ("out", 1)),
    *_reads(),
    *_writes(),
    *_boxes(),
)


def text(source: str) -> str:
    return code() if source == "code" else (HERE / f"{source}.cu").read_text()


def measure() -> dict[str, Any]:
    """Microseconds by name: medians of a graph of one launch between two events, L2 cold and clean."""
    import torch
    from common import machine
    from device import Module, tensor_map
    from launches import graph_of

    from cute_nvfp4.harness.timing import ColdL2, StopRule, time_cuda

    clear, rule, modules, times = ColdL2(), StopRule(repeats=100, relative_error=0.002, seconds=1.0), {}, {}
    buffers = {name: torch.zeros(80 * MB // 8, dtype=torch.int64, device="cuda") for name in ("out", "data", "target")}
    for case in CASES:
        if case.source not in modules:
            modules[case.source] = Module(text(case.source))
        arguments = [buffers.get(a, a) if isinstance(a, str) else a for a in case.arguments]
        for k, a in enumerate(arguments):
            if isinstance(a, Map):
                arguments[k] = tensor_map(buffers[a.buffer].view(torch.bfloat16).view(-1, a.columns), (128, 64))
        launch = modules[case.source].launch
        call = partial(launch, case.kernel, case.grid, case.block, arguments, case.shared, case.cluster)
        times[case.name] = round(
            statistics.median(time_cuda(graph_of(call, 1).replay, rule=rule, clear=clear)) / 1e3, 3
        )
        print(f"{case.name:50} {times[case.name]:8.2f} us measured", flush=True)
    return {"machine": machine(), "microseconds": times}


def model(only: str = "", launch: float | None = None) -> dict[str, float]:
    """Modelled microseconds by name."""
    import numpy as np
    from device import compile_ptx

    from cute_nvfp4 import sim
    from cute_nvfp4.sim.clock.machine import machine

    clock = machine("h200").with_figures({} if launch is None else {"launch.empty_us": launch})
    size, ptx, times = 80 * MB, {}, {}
    buffers = {name: np.zeros(size + 128, np.uint8) for name in ("out", "data", "target")}
    for case in CASES:
        if only not in case.name or case.kernel == "count":  # which has no time but what it counts
            continue
        if case.source not in ptx:
            ptx[case.source] = sim.Program.parse(compile_ptx(text(case.source)))
        memory = sim.GlobalMemory()
        for name, buffer in buffers.items():
            memory.add(buffer, name)
        places = {name: (b.ctypes.data + 127) // 128 * 128 for name, b in buffers.items()}
        parameters = tuple(_bytes(a, places, size) for a in case.arguments)
        launch = sim.Launch(
            case.kernel, (case.grid, 1, 1), (case.block, 1, 1), parameters, (case.cluster, 1, 1), case.shared
        )
        timing = sim.run(ptx[case.source], launch, memory, checks=False, clock=clock, sm_count=132).timing
        times[case.name] = round(timing.microseconds, 3)
        print(f"{case.name:50} {times[case.name]:8.2f} us modelled", flush=True)
    return times


def _bytes(argument: Any, places: dict[str, int], size: int) -> bytes:
    """A kernel's argument, as it lies in memory."""
    from cute_nvfp4.sim.tma.encode import DATA_TYPES, tiled

    if isinstance(argument, Map):
        pitch = 2 * argument.columns
        return tiled(
            DATA_TYPES.index("bf16"), places[argument.buffer], (argument.columns, size // pitch), (pitch,), (64, 128),
            (1, 1), (0, 3, 0, 0), 90,
        )  # fmt: skip
    return places[argument].to_bytes(8, "little") if isinstance(argument, str) else int(argument).to_bytes(4, "little")


def compare(measured: dict[str, float], modelled: dict[str, float]) -> None:
    print(f"{'':50} measured modelled")
    for name in measured:
        if name in modelled:
            print(f"{name:50} {measured[name]:8.2f} {modelled[name]:8.2f} {modelled[name] / measured[name] - 1:+6.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="measure, and write this file")
    parser.add_argument("--against", type=Path, help="model, beside this record")
    parser.add_argument("--launch", type=float, help="microseconds of a launch, instead of the machine file's")
    parser.add_argument("--only", default="", help="only launches whose name contains this")
    options = parser.parse_args()
    if options.measure:
        options.measure.write_text(json.dumps(measure(), indent=1))
    else:
        modelled = model(options.only, options.launch)
        if options.against:
            compare(json.loads(options.against.read_text())["microseconds"], modelled)
    return 0


if __name__ == "__main__":
    sys.exit(main())

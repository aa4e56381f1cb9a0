"""Pages of compiled kernels, plans and simulated launches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from . import memory, pipelines
from .names import short
from .svg import Page, stacked, table

if TYPE_CHECKING:
    from ..runtime.cache import CompiledKernel
    from ..runtime.simulating import SimulatedLaunch

MOST_ROWS = 8


def compiled(kernel: CompiledKernel) -> Page:
    """Returns a page of a compiled kernel: registers, spills, shared memory, instructions, loads and stores."""
    from ..runtime.inspection import inspect_cubin

    shown = []
    for k in inspect_cubin(kernel.cubin, kernel.ptx).kernels:
        rows = [
            ["registers a thread", str(k.registers)],
            ["spills", f"{k.spill_loads} loads, {k.spill_stores} stores"],
            ["static shared memory", f"{k.shared_bytes} bytes"],
            ["instructions", str(k.instructions)],
            *([f"  {name}", str(count)] for name, count in list(k.mix.items())[:MOST_ROWS]),
        ]
        shown.append(table([f"{short(k.name)} for {kernel.arch}, compiled", ""], rows))
        accesses = [[a.kind, a.space, a.bits, a.policy or "-", a.count] for a in k.sass_accesses[:MOST_ROWS]]
        shown.append(table(["loads and stores (SASS)", "space", "bits", "policy", "count"], accesses))
    return stacked(*shown)


def plan(chosen: Any) -> Page:
    """Returns a page of a plan of the library: its configuration, memory to scale, and pipelines."""
    config = getattr(chosen, "config", chosen)
    fields = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
    rows = [[name, value.name if name == "arch" else str(value)] for name, value in fields if value != ""]
    shown: list[Any] = [table(["plan", str(chosen)[:100] if chosen is not config else ""], rows)]
    kind = type(config).__name__
    if kind == "GemmConfig":
        from ..kernels.gemm.sm100 import memory_plan as sm100
        from ..kernels.gemm.sm120 import memory_plan as sm120

        warps = config.arch.generation == "sm120"
        shown.append(memory.shared_memory({"": config}))
        shown += [] if warps else [memory.tensor_memory({"": config})]
        shown.append(pipelines.of_plan((sm120 if warps else sm100).pipelines(config)))
    else:
        from ..kernels.gemm.packed.pipelines import stream_pipelines, wgmma_pipelines

        graph = stream_pipelines if kind == "StreamConfig" else wgmma_pipelines
        stages = [("stage", config.stage_bytes / 1024)] * config.ring_stages
        limit = config.arch.shared_bytes / 1024
        shown.append(memory.bars({"": stages}, limit, "KiB", "shared memory of a CTA: stages"))
        shown.append(pipelines.of_plan(graph(config)))
    return stacked(*shown)


def launch(run: SimulatedLaunch) -> Page:
    """Returns a page of a simulated launch: its counters, findings and times, and its trace if it has one."""
    from . import counters, timelines

    shown: list[Any] = [counters.result(run.result, run.name)]
    shown += [timelines.of_trace(run.trace)] if run.trace is not None else []
    return stacked(*shown)

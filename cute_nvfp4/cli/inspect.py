"""``cute-nvfp4 inspect``: what a kernel compiles to, without a GPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import STDOUT, JsonOption, fail, shown_errors, stderr, stdout, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from ..kernels.gemm.pipeline_graph import Edge
    from ..runtime.compile import CompiledKernel
    from ..runtime.inspection import Access, KernelReport
    from ..target import Architecture

# the problem of each kernel unless the user gives sizes: (m, n, k)
_KERNELS = {"gemv": (7168, 1, 16384), "gemm": (128, 7168, 16384), "quantize": (8192, 1, 8192)}
_DTYPES = ("bfloat16", "float16", "float32")


def inspect(
    kernel: Annotated[str, typer.Argument(help=f"Kernel: {', '.join(_KERNELS)}.", show_default=False)],
    arch: Annotated[str, typer.Option(help="Architecture to compile for: sm_90a, sm_100a, sm_120a …")] = "sm_100a",
    m: Annotated[int | None, typer.Option(help="Rows of A or x.", show_default="7168, gemm 128, quantize 8192")] = None,
    n: Annotated[int | None, typer.Option(help="Rows of B (gemm).", show_default="7168")] = None,
    k: Annotated[int | None, typer.Option(help="Length of a row.", show_default="16384, quantize 8192")] = None,
    batch: Annotated[int, typer.Option("--l", help="Batch.")] = 1,
    scales: Annotated[str, typer.Option(help="Layout of the scales (not gemm): blocked or rowmajor.")] = "blocked",
    format: Annotated[str, typer.Option(help="Format to quantize to: nvfp4, mxfp4, mxfp8_e4m3, …")] = "nvfp4",
    rule: Annotated[str, typer.Option(help="Rule to quantize by: max, four_six_mse, …")] = "max",
    dtype: Annotated[str, typer.Option(help=f"Type of x to quantize: {', '.join(_DTYPES)}.")] = "bfloat16",
    ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Print the SASS.")] = False,
    json: JsonOption = "",
) -> None:
    """Shows what a kernel compiles to: registers, memory, instruction mix, widths and cache policies of its loads.

    Counts are static: one for each instruction in the code, however often it runs. Nothing here is measured.
    """
    if kernel not in _KERNELS:
        fail(f"unknown kernel {kernel!r}; known kernels: {', '.join(_KERNELS)}", 2)
    if scales not in ("blocked", "rowmajor"):
        fail(f"unknown layout of scales {scales!r}; expected blocked or rowmajor", 2)
    if dtype not in _DTYPES:
        fail(f"unknown dtype {dtype!r}; expected {', '.join(_DTYPES)}", 2)
    m, n, k = (default if given is None else given for given, default in zip((m, n, k), _KERNELS[kernel]))
    multiple = 32 if kernel == "gemm" else 16
    sizes = f"m={m} n={n} k={k} l={batch}" if kernel == "gemm" else f"m={m} k={k} l={batch}"
    if k % multiple or min(m, n, k, batch) < 1:
        fail(f"{sizes} is not a problem: k is a multiple of {multiple}, and all are at least 1", 2)
    plan: dict[str, Any] = {}
    with shown_errors():
        from ..dsl_version import require_dsl
        from ..runtime.inspection import inspect_cubin
        from ..target import architecture

        require_dsl()
        architecture(arch)
        with stderr().status(f"compiling {kernel} for {arch}"):
            if kernel == "gemv":
                compiled, config = _compile(arch, m, k, batch, scales)
            elif kernel == "quantize":
                compiled, config = _compile_quantize(arch, m, k, format, rule, dtype, scales)
            else:
                compiled, config, plan = _compile_gemm(arch, m, n, k, batch)
            report = inspect_cubin(compiled.cubin, compiled.ptx)
    content = {"kernel": kernel, "arch": arch, "m": m, "k": k, "l": batch, "config": config} | report.to_dict()
    content |= {"n": n, "plan": plan} if plan else {}
    content |= {"ptx": compiled.ptx} if ptx else {}
    content |= {"sass": report.sass} if sass else {}
    if json:
        write_json(content, json)
    if json == STDOUT:
        return
    if ptx:
        print(compiled.ptx)
    if sass:
        print(report.sass)
    for found in report.kernels:
        _show(found, f"{kernel} · {arch} · {sizes} · compiled, not measured", config)
    if plan:
        _show_plan(plan)


def _compile(arch: str, m: int, k: int, batch: int, scales: str) -> tuple[CompiledKernel, str]:
    """The kernel that ``gemv`` would run on this problem, and its configuration in words."""
    from ..ops.gemv import compile_gemv

    compiled, config = compile_gemv(arch, m=m, k=k, batch=batch, scales=scales)
    return compiled, _in_words(config)


def _in_words(config: Any) -> str:
    values = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return " ".join(f"{name}={value}" for name, value in values if name != "arch" and value != "")


def _compile_quantize(
    arch: str, m: int, k: int, format: str, rule: str, dtype: str, scales: str
) -> tuple[CompiledKernel, str]:
    """The kernel that ``quantize`` would run on an (m, k) matrix with a given global scale, and its configuration."""
    import torch

    from ..ops.quantize_launch import compile_quantize
    from ..quantization.rules import resolve_format, resolve_rule

    resolved = resolve_format(format)
    compiled, config = compile_quantize(
        arch,
        resolved,
        resolve_rule(rule, resolved),
        rows=m,
        k=k,
        dtype=getattr(torch, dtype),
        scale_layout=scales,
        global_scale="given" if resolved.has_global_scale else "none",
    )
    return compiled, _in_words(config)


def _compile_gemm(arch: str, m: int, n: int, k: int, batch: int) -> tuple[CompiledKernel, str, dict[str, Any]]:
    """The kernel that ``gemm`` would run on this problem, its plan in words, and its plans of memory and pipelines."""
    from ..kernels.gemm.limits import shared_plan
    from ..kernels.gemm.sm100 import memory_plan as sm100
    from ..kernels.gemm.sm120 import memory_plan as sm120
    from ..ops.gemm import compile_gemm
    from ..planning.gemm import GemmProblem, choose
    from ..runtime.inspection import disassemble, innermost_loop
    from ..target import architecture

    target = architecture(arch)
    if target.generation == "sm90":
        return _compile_packed(target, m, n, k, batch)
    chosen = choose(GemmProblem(m, n, k, batch), target, target.sm_count)
    compiled, config = compile_gemm(chosen.config), chosen.config
    warps = target.generation == "sm120"
    architecture_plan, opcode, scales = (sm120, "OMMA", "LDS") if warps else (sm100, "UTCOMMA", "UTCCP")
    loop = innermost_loop(disassemble(compiled.cubin), opcode)
    plan = {
        "shared_memory": shared_plan(config).arithmetic,
        "tensor_memory": "none" if warps else sm100.TensorPlan(config).arithmetic,
        "pipelines": _edges(architecture_plan.pipelines(config)),
        "mma_loop": {
            "steps": 1,
            "instructions": loop.instructions,
            "mmas": loop.count(opcode),
            "scale_copies": loop.count(scales),
        },
    }
    return compiled, str(chosen), plan


def _compile_packed(
    target: Architecture, m: int, n: int, k: int, batch: int
) -> tuple[CompiledKernel, str, dict[str, Any]]:
    """The kernel, plan and memory of ``gemm`` with x of m rows and a prepared weight of n rows, in bfloat16."""
    from ..kernels.gemm.packed.pipelines import stream_pipelines, wgmma_pipelines
    from ..ops.prepared_weight.gemm import STREAM, WGMMA
    from ..planning.packed import PackedProblem, choose
    from ..runtime.inspection import disassemble, innermost_loop

    if batch != 1:
        fail(f"l={batch} is not a problem of {target.name}: a prepared weight has one matrix, l=1", 2)
    chosen = choose(PackedProblem(m=m, n=n, k=k), target, target.sm_count)
    compiled, config = (STREAM if chosen.streams else WGMMA).compile(chosen.config), chosen.config
    opcode = "HMMA" if chosen.streams else "HGMMA"
    loop = innermost_loop(disassemble(compiled.cubin), opcode)
    plan = {
        "shared_memory": f"{config.ring_stages} stages of {config.stage_bytes} bytes",
        "tensor_memory": "none",
        "pipelines": _edges((stream_pipelines if chosen.streams else wgmma_pipelines)(config)),
        "mma_loop": {
            "steps": 1,
            "instructions": loop.instructions,
            "mmas": loop.count(opcode),
            "shared_loads": loop.count("LDS"),
        },
    }
    return compiled, str(chosen), plan


def _edges(graph: tuple[Edge, ...]) -> dict[str, dict[str, str]]:
    """The pipelines by name: producer, consumer, and the arrivals of each barrier in words."""
    return {
        edge.name: {"producer": edge.producer, "consumer": edge.consumer}
        | {barrier: str(arrivals) for barrier, arrivals in edge.arrivals.items()}
        for edge in graph
    }


def _show_plan(plan: dict[str, Any]) -> None:
    """Prints the plans of memory, the MMA loop, and the arrivals that complete each phase of each barrier."""
    from rich.text import Text

    console = stdout()
    for name in ("shared_memory", "tensor_memory"):
        console.print(Text(f"{name.replace('_', ' ')}: {plan[name]}"), soft_wrap=True)
    loop = plan["mma_loop"]
    others, name = (
        ("scale_copies", "copies of scales") if "scale_copies" in loop else ("shared_loads", "loads of weights")
    )
    console.print(
        Text(
            f"MMA loop: {loop['instructions'] / loop['steps']:g} instructions for a k-tile, of which "
            f"{loop['mmas'] / loop['steps']:g} MMAs and {loop[others] / loop['steps']:g} {name}"
        ),
        soft_wrap=True,
    )
    for name, edge in plan["pipelines"].items():
        text = f"pipeline {name} ({edge['producer']} to {edge['consumer']}), arrivals that end a phase"
        arrivals = "; ".join(f"{barrier} {edge[barrier]}" for barrier in ("full", "empty") if barrier in edge)
        console.print(Text(f"{text}: {arrivals}"), soft_wrap=True)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def _show(report: KernelReport, title: str, config: str) -> None:
    from rich.columns import Columns
    from rich.text import Text

    console = stdout()
    console.print(Text(title, "bold"), Text(config, "dim"), sep="\n", soft_wrap=True)
    resources = _table("resources", "a kernel", "uses", right=("uses",))
    spills = f"{report.spill_loads} + {report.spill_stores}" if report.spill_loads + report.spill_stores else "none"
    for name, value in (
        ("registers a thread", report.registers),
        ("spills (loads + stores)", spills),
        ("stack, bytes", report.stack_bytes),
        ("local memory, bytes", report.local_bytes),
        ("static shared memory, bytes", report.shared_bytes),
        ("instructions", report.instructions),
    ):
        resources.add_row(name, str(value))
    mix = _table("instructions by class (SASS)", "class", "count", "%", right=("count", "%"))
    for name, count in report.mix.items():
        mix.add_row(name, str(count), f"{100 * count / report.instructions:.1f}")
    opcodes = _table("most frequent opcodes", "opcode", "count", right=("count",))
    for name, count in list(report.opcodes.items())[: len(report.mix)]:
        opcodes.add_row(name, str(count))
    console.print(Columns([resources, mix, opcodes], padding=(0, 4)))
    found = (("loads and stores (SASS)", report.sass_accesses), ("as asked for (PTX)", report.ptx_accesses))
    console.print(Columns([_accesses(*pair) for pair in found], padding=(0, 4)))


def _accesses(title: str, accesses: tuple[Access, ...]) -> Table:
    table = _table(title, "kind", "space", "bits", "policy", "count", right=("bits", "count"))
    for access in accesses:
        table.add_row(access.kind, access.space, str(access.bits), access.policy or "-", str(access.count))
    return table

"""``cute-nvfp4 inspect``: what a kernel compiles to, with no GPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from .output import STDOUT, JsonOption, fail, shown_errors, stderr, stdout, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from ..compile import CompiledKernel
    from ..inspection import Access, KernelReport

_KERNELS = ("gemv",)


def inspect(
    kernel: Annotated[str, typer.Argument(help=f"Kernel: {', '.join(_KERNELS)}.", show_default=False)],
    arch: Annotated[str, typer.Option(help="Architecture to compile for: sm_90a, sm_100a, sm_103a.")] = "sm_100a",
    m: Annotated[int, typer.Option(help="Rows of A.")] = 7168,
    k: Annotated[int, typer.Option(help="Length of a row.")] = 16384,
    batch: Annotated[int, typer.Option("--l", help="Batch.")] = 1,
    scales: Annotated[str, typer.Option(help="Layout of the scales: blocked or rowmajor.")] = "blocked",
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
    if k % 16 or min(m, k, batch) < 1:
        fail(f"m={m} k={k} l={batch} is not a problem: k is a multiple of 16, and all are at least 1", 2)
    with shown_errors():
        from ..inspection import inspect_cubin
        from ..target import architecture

        architecture(arch)
        with stderr().status(f"compiling {kernel} for {arch}"):
            compiled, config = _compile(arch, m, k, batch, scales)
            report = inspect_cubin(compiled.cubin, compiled.ptx)
    content = {"kernel": kernel, "arch": arch, "m": m, "k": k, "l": batch, "config": config} | report.to_dict()
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
        _show(found, f"{kernel} · {arch} · m={m} k={k} l={batch} · compiled, not measured", config)


def _compile(arch: str, m: int, k: int, batch: int, scales: str) -> tuple[CompiledKernel, str]:
    """The kernel that ``gemv`` would run on this problem, and the configuration it chose, in words."""
    from ..ops import compile_gemv

    compiled, config = compile_gemv(arch, m=m, k=k, batch=batch, scales=scales)
    values = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return compiled, " ".join(f"{name}={value}" for name, value in values if name != "arch")


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

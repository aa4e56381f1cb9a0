"""``cute-nvfp4 tune``: times the plans of a GEMM on this GPU, or by the simulator's clock, and stores the fastest; or
ranks them by the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from .output import STDOUT, JsonOption, fail, shown_errors, stderr, stdout, write_json

if TYPE_CHECKING:
    from ..planning.packed_problem import PackedProblem
    from ..planning.table_families import AnyPlan, Problem
    from ..target import Architecture

_TIMES = "median of replays of CUDA graphs of one call, L2 cold, plans in turn"
_CLOCKED = "modelled by the simulator's clock of {}, L2 cold"


def tune(
    problem: Annotated[
        str, typer.Argument(help="Problem whose benchmark shapes to tune: nvfp4_gemm.", show_default=False)
    ] = "",
    m: Annotated[int | None, typer.Option(help="Rows of A, instead of a problem.", show_default=False)] = None,
    n: Annotated[int | None, typer.Option(help="Rows of B.", show_default=False)] = None,
    k: Annotated[int | None, typer.Option(help="Length of a row.", show_default=False)] = None,
    batch: Annotated[int, typer.Option("--l", help="Batch.")] = 1,
    format: Annotated[str, typer.Option(help="Format of A and B: nvfp4, mxfp4, mxfp8, mxfp8_e5m2.")] = "nvfp4",
    x: Annotated[str, typer.Option(help="A on sm_90a, where B is prepared: bfloat16, float16, nvfp4.")] = "bfloat16",
    out: Annotated[
        str, typer.Option(help="dtype of the output (default: float16; on sm_90a the weight's).", show_default=False)
    ] = "",
    out_major: Annotated[str, typer.Option(help="Contiguous dimension of the output: n (row-major) or m.")] = "n",
    model: Annotated[bool, typer.Option("--model", help="Only rank plans by the model: needs no GPU.")] = False,
    clock: Annotated[
        str,
        typer.Option(
            help="Time plans by the simulator's clock of this GPU (b200, h200): needs ptxas and no GPU. Each plan is "
            "executed on the CPU, which may take minutes.",
            show_default=False,
        ),
    ] = "",
    top: Annotated[int, typer.Option(help="Plans to time (the model's first), or to show; 0 for all.")] = 24,
    rounds: Annotated[int, typer.Option(help="Times that each plan is timed.")] = 40,
    arch: Annotated[
        str, typer.Option(help="Architecture to model with --model, such as sm_90a or sm_120a (RTX 5090).")
    ] = "sm_100a",
    json: JsonOption = "",
) -> None:
    """Times plans of a GEMM on this GPU and stores the fastest, which gemm() then uses for this problem.

    The table is gemm.json in the user's configuration folder, or the file that CUTE_NVFP4_GEMM_TABLE names. With
    --model nothing is run or stored: plans are ranked by modelled times of the GPU of --arch. With --clock the
    model's first plans (--top) are executed in the simulator, their results checked, and the one that the clock finds
    fastest is stored, marked as modelled. On sm_90a B is a weight that prepare_weight has repacked. Exit code 2 where
    nothing can be timed.
    """
    sizes = (m, n, k)
    if bool(problem) == any(size is not None for size in sizes) or (not problem and None in sizes):
        fail("give a problem (nvfp4_gemm), or all of --m, --n and --k", 2)
    if top < 0 or rounds < 1:
        fail(f"--top is {top} and --rounds is {rounds}, expected at least 0 and 1", 2)
    if model and clock:
        fail("give --model or --clock, not both", 2)
    with shown_errors():
        shapes = _benchmarks(problem) if problem else [(*sizes, batch)]
        device = _modelled_device(_arch_of(clock) if clock else arch) if model or clock else _gpu()
        make = _packed_problem if device.arch.generation == "sm90" else _problem
        problems = [make(shape, format, out, out_major, x) for shape in shapes]
        if model:
            records = _modelled(problems, device, top)
        else:
            records = _timed(problems, device, top, rounds, clock)
    if json:
        write_json({"kind": "clock" if clock else "model" if model else "measured", "problems": records}, json)
    if json != STDOUT:
        for record in records:
            _show(record)


def _benchmarks(name: str) -> list[tuple[int, int, int, int]]:
    from ..harness.problem import get_problem
    from ..harness.schema import load_task

    task = load_task(get_problem(name).folder / "task.yml")
    if not {"m", "n", "k"} <= set(task.parameters):
        fail(f"{name} is not a GEMM: its parameters are {', '.join(task.parameters)}", 2)
    return [(case["m"], case["n"], case["k"], case.get("l", 1)) for case in task.benchmarks]


class _Device(NamedTuple):
    """The device whose plans are ranked."""

    arch: Architecture
    sm_count: int
    name: str


def _problem(shape: tuple, format: str, out: str, out_major: str, x: str) -> Problem:
    from ..errors import OperandError
    from ..kernels.gemm.config import OUT_BYTES
    from ..planning.gemm_problem import GemmProblem

    out = out or "float16"
    if out not in OUT_BYTES:
        raise OperandError.of("out", got=out, expected=f"one of {', '.join(OUT_BYTES)}")
    m, n, k, batch = shape
    row = (n if out_major == "n" else m) * OUT_BYTES[out]
    signature = {"a_format": format, "b_format": format, "out": out, "out_major": out_major, "vector": row % 16 == 0}
    return GemmProblem(m, n, k, batch, **signature)


def _packed_problem(shape: tuple, format: str, out: str, out_major: str, x: str) -> PackedProblem:
    from ..errors import OperandError
    from ..formats import FORMATS
    from ..kernels.gemm.config import OUT_BYTES
    from ..planning.packed_problem import PackedProblem
    from ..weight_packing import packing_of

    m, n, k, batch = shape
    dtype = "float16" if x == "nvfp4" else x
    out = out or dtype
    got = {"x": x, "out": out, "format": format, "l, out-major": (batch, out_major)}
    wanted = {
        "x": ("bfloat16", "float16", "nvfp4"),
        "out": tuple(OUT_BYTES),
        "format": ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"),
        "l, out-major": ((1, "n"),),
    }
    for name, value in got.items():
        if value not in wanted[name]:
            raise OperandError.of(name, got=value, expected=f"one of {', '.join(map(str, wanted[name]))} on sm_90a")
    vector = n * OUT_BYTES[out] % 16 == 0
    packing = packing_of(FORMATS[format])
    return PackedProblem(m=m, n=n, k=k, dtype=dtype, out=out, quantized=x == "nvfp4", vector=vector, packing=packing)


def _modelled_device(arch: str) -> _Device:
    from ..target import architecture

    found = architecture(arch)
    return _Device(found, found.sm_count, found.example.split("/")[-1 if found.generation == "sm90" else 0])


def _ranked(problem: Problem, device: _Device) -> list[tuple[float, str, AnyPlan]]:
    """(modelled µs, what bounds it or "", plan) of every candidate, the fastest first."""
    if device.arch.generation == "sm90":
        from ..planning.packed import candidates, predict

        return [(predict(plan, problem, device.sm_count), "", plan) for plan in candidates(problem, *device[:2])]
    from ..planning.gemm import ranked

    return [(p.us, p.bound, plan) for p, plan in ranked(problem, *device[:2])]


def _modelled(problems: list[Problem], device: _Device, top: int) -> list[dict]:
    records = []
    for problem in problems:
        rows = _ranked(problem, device)[: top or None]
        plans = [{"plan": str(plan), "model_us": round(us, 3), "bound": bound} for us, bound, plan in rows]
        records.append(_record(problem, device) | {"plans": plans})
    return records


def _record(problem: Problem, device: _Device) -> dict:
    import dataclasses

    record = {"problem": dataclasses.asdict(problem), "device": device.name, "sm_count": device.sm_count}
    if device.arch.generation == "sm90":
        return record
    least = problem.minimum
    light = {"speed_of_light_us": round(least.speed_of_light_us, 3), "ceiling_us": round(least.ceiling_us, 3)}
    return record | light


def _gpu() -> _Device:
    """This machine's GPU, if it has tcgen05 or wgmma; else the command ends with the reason."""
    import torch

    from ..errors import TargetError
    from ..runtime.backend import resolve

    hint = "Nothing was timed or stored; --model ranks the plans by modelled times of a B200 instead."
    if not torch.cuda.is_available():
        fail(f"cannot time kernels: this machine has no CUDA device. {hint}", 2)
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    try:
        arch = resolve("cuda", device).arch
    except TargetError as error:
        fail(f"cannot time kernels on {name}: {error} {hint}", 2)
    if arch.generation not in ("sm90", "sm100"):
        fail(f"cannot time kernels on {name} ({arch.name}): expected sm_90a, sm_100a or sm_103a. {hint}", 2)
    return _Device(arch, torch.cuda.get_device_properties(device).multi_processor_count, name)


def _arch_of(clock: str) -> str:
    from ..sim.clock.machine import machine

    return machine(clock).arch


def _timed(problems: list[Problem], device: _Device, top: int, rounds: int, clock: str) -> list[dict]:
    from ..harness.tuning import by_clock, measure
    from ..planning import gemm_table

    records = []
    for problem in problems:
        modelled = {plan: us for us, _, plan in _ranked(problem, device)[: top or None]}
        what = f"m={problem.m} n={problem.n} k={problem.k}"
        with _progress(what) as progress:
            if clock:
                timed = by_clock(problem, list(modelled), clock, device.sm_count, progress=progress)
            else:
                timed = measure(problem, list(modelled), rounds=rounds, progress=progress)
        ran = [t for t in timed if not t.error]
        if not ran:
            fail(f"{what}: none of {len(modelled)} plans could run; the first: {timed[0].error}", 1)
        winner = ran[0]
        entry = gemm_table.Entry(
            device.name, device.arch.name, device.sm_count, problem, winner.plan, winner.us, _note(winner.runs, clock)
        )
        rows = [
            {"plan": str(t.plan), "us": round(t.us, 3), "best_us": round(t.best_us, 3), "runs": t.runs}
            | {"model_us": round(modelled[t.plan], 3)}
            | ({"error": t.error} if t.error else {})
            for t in timed
        ]
        stored = str(gemm_table.store(entry))
        timing = _CLOCKED.format(clock) if clock else _TIMES
        records.append(_record(problem, device) | {"timing": timing, "clock": clock, "stored": stored, "plans": rows})
    return records


def _note(runs: int, clock: str) -> str:
    import datetime

    import torch

    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    if clock:
        return f"{_CLOCKED.format(clock)}, {day}"
    return f"{_TIMES}, {runs} calls, {day}, torch {torch.__version__}"


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Shows progress on standard error, and yields the function that reports it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        line = progress.add_task(what)
        yield lambda doing, done, total: progress.update(
            line, description=f"{what}: {doing}", completed=done, total=total
        )


def _show(record: dict) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console, p = stdout(), record["problem"]
    measured, clock = "stored" in record, record.get("clock", "")
    kind = f"measured on {record['device']}" if measured else f"model of a {record['device']}, not measured"
    if clock:
        kind = f"modelled by the clock of {clock}, not measured"
    a = p["a_format"] if "a_format" in p else "nvfp4" if p["quantized"] else p["dtype"]
    size = f"m={p['m']} n={p['n']} k={p['k']} l={p.get('batch', 1)}"
    console.print(Text(f"gemm {size} {a} → {p['out']}: {kind}", "bold"), soft_wrap=True)
    if "ceiling_us" in record:
        light = f"speed of light {record['speed_of_light_us']} us, best published rates {record['ceiling_us']} us"
        console.print(Text(light, "dim"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("clock us" if clock else "measured us", "best") if measured else ():
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("model us", justify="right", no_wrap=True)
    table.add_column("" if measured else "bound by", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for row in record["plans"]:
        times = (f"{row['us']:.2f}", f"{row['best_us']:.2f}") if measured and "error" not in row else ("-", "-")
        last = row.get("error", "") if measured else row["bound"]
        table.add_row(*(times if measured else ()), f"{row['model_us']:.2f}", last, row["plan"])
    console.print(table)
    if measured:
        console.print(Text(f"{record['timing']}. The first is stored in {record['stored']}", "dim"), soft_wrap=True)

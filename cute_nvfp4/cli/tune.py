"""``cute-nvfp4 tune``: times plans of a GEMM on this GPU and keeps the fastest, or ranks them by the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from .output import STDOUT, JsonOption, fail, shown_errors, stderr, stdout, write_json

if TYPE_CHECKING:
    from ..planning.gemm_problem import GemmProblem
    from ..target import Architecture

_TIMES = "median of single calls between CUDA events, L2 cold, plans in turn"


def tune(
    problem: Annotated[
        str, typer.Argument(help="Problem whose benchmark shapes to tune: nvfp4_gemm.", show_default=False)
    ] = "",
    m: Annotated[int | None, typer.Option(help="Rows of A, instead of a problem.", show_default=False)] = None,
    n: Annotated[int | None, typer.Option(help="Rows of B.", show_default=False)] = None,
    k: Annotated[int | None, typer.Option(help="Length of a row.", show_default=False)] = None,
    batch: Annotated[int, typer.Option("--l", help="Batch.")] = 1,
    format: Annotated[str, typer.Option(help="Format of A and B: nvfp4, mxfp4, mxfp8, mxfp8_e5m2.")] = "nvfp4",
    out: Annotated[str, typer.Option(help="dtype of the output: float16, bfloat16, float32.")] = "float16",
    out_major: Annotated[str, typer.Option(help="Contiguous dimension of the output: n (row-major) or m.")] = "n",
    model: Annotated[bool, typer.Option("--model", help="Only rank plans by the model: needs no GPU.")] = False,
    top: Annotated[int, typer.Option(help="Plans to time (the model's first), or to show; 0 for all.")] = 24,
    rounds: Annotated[int, typer.Option(help="Times that each plan is timed.")] = 40,
    arch: Annotated[str, typer.Option(help="Architecture to model: sm_100a, sm_103a.")] = "sm_100a",
    json: JsonOption = "",
) -> None:
    """Times plans of a GEMM on this GPU and stores the fastest, which gemm() then uses for this problem.

    The table is gemm.json in the user's configuration folder, or the file that CUTE_NVFP4_GEMM_TABLE names. With
    --model nothing is run or stored: plans are ranked by modelled times of a B200. Exit code 2 where nothing can be
    timed.
    """
    sizes = (m, n, k)
    if bool(problem) == any(size is not None for size in sizes) or (not problem and None in sizes):
        fail("give a problem (nvfp4_gemm), or all of --m, --n and --k", 2)
    if top < 0 or rounds < 1:
        fail(f"--top is {top} and --rounds is {rounds}, expected at least 0 and 1", 2)
    with shown_errors():
        shapes = _benchmarks(problem) if problem else [(*sizes, batch)]
        problems = [_problem(shape, format, out, out_major) for shape in shapes]
        records = _modelled(problems, arch, top) if model else _measured(problems, top, rounds)
    if json:
        write_json({"kind": "model" if model else "measured", "problems": records}, json)
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


def _problem(shape: tuple, format: str, out: str, out_major: str) -> GemmProblem:
    from ..errors import OperandError
    from ..kernels.gemm.config import OUT_BYTES
    from ..planning.gemm_problem import GemmProblem

    if out not in OUT_BYTES:
        raise OperandError.of("out", got=out, expected=f"one of {', '.join(OUT_BYTES)}")
    m, n, k, batch = shape
    row = (n if out_major == "n" else m) * OUT_BYTES[out]
    signature = {"a_format": format, "b_format": format, "out": out, "out_major": out_major, "vector": row % 16 == 0}
    return GemmProblem(m, n, k, batch, **signature)


def _modelled(problems: list[GemmProblem], arch: str, top: int) -> list[dict]:
    from ..planning.gemm import ranked
    from ..target import architecture

    target = architecture(arch)
    records = []
    for problem in problems:
        rows = ranked(problem, target, target.sm_count)
        plans = [{"plan": str(plan), "model_us": round(p.us, 3), "bound": p.bound} for p, plan in rows[: top or None]]
        records.append(_record(problem, target.example.split("/")[0], target.sm_count) | {"plans": plans})
    return records


def _record(problem: GemmProblem, device: str, sm_count: int) -> dict:
    import dataclasses

    least = problem.minimum
    return {
        "problem": dataclasses.asdict(problem),
        "device": device,
        "sm_count": sm_count,
        "speed_of_light_us": round(least.speed_of_light_us, 3),
        "ceiling_us": round(least.ceiling_us, 3),
    }


def _gpu() -> tuple[Architecture, int, str]:
    """Architecture, multiprocessors and name of a GPU that has tcgen05; ends the command with the reason if none."""
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
    if arch.capability[0] != 10:
        fail(f"cannot time kernels on {name} ({arch.name}): they need tcgen05, of sm_100a or sm_103a. {hint}", 2)
    return arch, torch.cuda.get_device_properties(device).multi_processor_count, name


def _measured(problems: list[GemmProblem], top: int, rounds: int) -> list[dict]:
    from ..harness.tuning import measure
    from ..planning import gemm_table
    from ..planning.gemm import predict_plan, ranked

    arch, sm_count, name = _gpu()
    records = []
    for problem in problems:
        plans = [plan for _, plan in ranked(problem, arch, sm_count)][: top or None]
        what = f"m={problem.m} n={problem.n} k={problem.k} l={problem.batch}"
        with _progress(what) as progress:
            timed = measure(problem, plans, rounds=rounds, progress=progress)
        ran = [t for t in timed if not t.error]
        if not ran:
            fail(f"{what}: none of {len(plans)} plans could run; the first: {timed[0].error}", 1)
        entry = gemm_table.Entry(name, arch.name, sm_count, problem, ran[0].plan, ran[0].us, _note(ran[0].runs))
        rows = [
            {"plan": str(t.plan), "us": round(t.us, 3), "best_us": round(t.best_us, 3), "runs": t.runs}
            | {"model_us": round(predict_plan(t.plan, problem, sm_count).us, 3)}
            | ({"error": t.error} if t.error else {})
            for t in timed
        ]
        stored = str(gemm_table.store(entry))
        records.append(_record(problem, name, sm_count) | {"timing": _TIMES, "stored": stored, "plans": rows})
    return records


def _note(runs: int) -> str:
    import datetime

    import torch

    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return f"{_TIMES}, {runs} calls, {day}, torch {torch.__version__}"


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function to report progress to: a line on standard error."""
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
    measured = "stored" in record
    kind = f"measured on {record['device']}" if measured else f"model of a {record['device']}, not measured"
    console.print(
        Text(f"gemm m={p['m']} n={p['n']} k={p['k']} l={p['batch']} {p['a_format']} → {p['out']}: {kind}", "bold"),
        Text(f"speed of light {record['speed_of_light_us']} us, best published rates {record['ceiling_us']} us", "dim"),
        sep="\n",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("measured us", "best") if measured else ():
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

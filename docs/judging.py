"""Tables of records that need no GPU: first calls, ``cute-nvfp4 eval``, the simulator's speed; and of tolerances."""

from __future__ import annotations

from typing import Any

from table_cells import table

from cute_nvfp4.harness.problem import get_problem, known_problems
from cute_nvfp4.harness.schema import Tolerances, load_task


def host(of: dict[str, Any], how: str) -> str:
    """Where, when and how a record was made: the line above its table."""
    named = ", ".join(f"{name} {version}" for name, version in of["versions"].items())
    where = f"One {of['gpu']}" if "gpu" in of else f"{of['cores']} cores of an {of['processor']}, beside other work"
    return f"*{where}, {of['date']} ({named}); {how}.*\n\n"


def first_call(of: dict[str, Any]) -> str:
    """What a first call costs, from a record of ``benchmarks/first_call.py``."""
    lines = []
    for arch, found in of["calls"].items():
        for name, row in found.items():
            text = name if name.startswith("import") else f"`{name.partition(',')[0]}`{name[len(name.split(',')[0]) :]}"
            cells = [f"{row[when][kind]:.2f}" for when in ("first", "next process") for kind in ("wall", "cpu")]
            lines.append([f"`{arch}`", text, *cells])
    head = [
        "for",
        "first call of",
        "nothing cached, s",
        "of the processor, s",
        "kernel on the disk, s",
        "of the processor, s",
    ]
    return host(of, "with the launch" if "gpu" in of else "without the launch") + table(head, lines)


def eval_times(of: dict[str, Any], benchmark: dict[str, Any]) -> str:
    """Time and memory of ``cute-nvfp4 eval``, from a record of ``benchmarks/eval_times.py``. benchmark: another run's
    record, which has only CPU seconds of the benchmark shapes."""
    lines = []
    for problem, found in of["rows"].items():
        for name, row in found.items():
            speed = f"{row['instructions'] / row['cpu_s']:,.0f}" if row["cases"] > 1 else ""
            shown = name.replace("smallest shape", "`--case 0`")  # case 0 of the dual GEMM is not its smallest
            lines.append([f"`{problem}`", shown, f"{row['wall_s']:.0f}", f"{row['cpu_s']:.0f}",
                          f"{row['memory_bytes'] / 1e9:.1f}", f"{row['instructions']:,}", speed])  # fmt: skip
        if problem in benchmark["cpu_s"]:
            cells = [f"benchmark, {benchmark['date']}", "", f"{benchmark['cpu_s'][problem]:.0f}", "", "", ""]
            lines.append([f"`{problem}`", *cells])
    head = [
        "problem",
        "what",
        "wall, s",
        "processor, s",
        "largest process, GB",
        "warp instructions",
        "… a second of the processor",
    ]
    how = "the package's own submissions on a simulated B200, checks on, one job"
    return host(of, how) + table(head, lines)


def leaderboard(of: dict[str, Any]) -> str:
    """What ``eval --mode leaderboard`` takes on a GPU."""
    lines = [[f"`{problem}`", f"{seconds:.0f}"] for problem, seconds in of["wall_s"].items()]
    return host(of, of["how"]) + table(["problem, mode `leaderboard`", "wall, s"], lines)


def simulator(of: dict[str, Any]) -> str:
    """The smallest, the middle and the largest of the forty shapes of ``benchmarks/simulator.py``, and the sum of
    all."""
    found = sorted(of["shapes"], key=lambda shape: shape["checks_on_cpu_s"])
    picked = [found[0], found[len(found) // 4], found[len(found) // 2], found[3 * len(found) // 4], found[-1]]
    lines = [[f"`{x['shape']}`", f"{x['checks_off_cpu_s']:.2f}", f"{x['checks_on_cpu_s']:.2f}"] for x in picked]
    total = of["total"]
    lines.append([f"all {len(found)} shapes", f"{total['checks_off_cpu_s']:.1f}", f"{total['checks_on_cpu_s']:.1f}"])
    return host(of, "seconds of the processor, kernels compiled before") + table(
        ["launch", "checks off, s", "checks on, s"], lines
    )


def notebooks(of: dict[str, Any]) -> str:
    """How long notebooks take, from the record of ``notebooks/execute.py --times``."""
    lines = [[f"`{name}`", f"{x['wall']:.0f}", f"{x['cpu']:.0f}"] for name, x in sorted(of["seconds"].items())]
    return host(of, "all cells of one notebook, compiled kernels on the disk from earlier ones") + table(
        ["notebook", "wall, s", "processor, s"], lines
    )


def extreme_fuzz(of: dict[str, Any]) -> str:
    """The outcome of the calls of ``tests.fuzz.extreme``, and the machines that ran them."""
    where = sorted({kind.split(" ", 1)[0] for kind in of["kinds"]})
    what = sorted({kind.split(" ", 1)[1] for kind in of["kinds"]})
    lines = [[place, *(f"{of['kinds'].get(f'{place} {one}', 0):,}" for one in what)] for place in where]
    return (
        f"*{of['calls']:,} calls with seed {of['seed']}, {of['date']}, sources of `{of['commit']}`; "
        f"{of['calls_with_launches']:,} launched kernels; {len(of['failures'])} failed.*\n\n"
    ) + table(["", *what], lines)


def _tolerance(of: Tolerances) -> str:
    parts = [f"{of.atol:g}", f"{of.rtol:g} · |ref|"]
    if of.sum_rtol:
        parts.append(f"{of.sum_rtol:g} · S")
    return " + ".join(parts)


def tolerances() -> str:
    """Tolerances, and when a timed case stops, from each problem's ``task.yml``."""
    lines = []
    for name in known_problems():
        task = load_task(get_problem(name).folder / "task.yml")
        limits = task.limits
        stop = f"{limits.relative_error:.1%} of the mean, {limits.repeats} repeats, or {limits.seconds:g} s"
        counts = f"{len(task.tests)}; {len(task.benchmarks)}"
        lines.append([f"`{name}`", counts, _tolerance(task.tolerances), _tolerance(task.full_range_tolerances),
                      str(limits.batch), stop, f"{limits.timeout_seconds:g} s"])  # fmt: skip
    head = ["problem", "shapes: correctness; benchmark", "error allowed, public data", "error allowed, `--data full`",
            "calls in a timed repeat", "a timed case stops at", "time for a call"]  # fmt: skip
    return table([cell.replace("|", "\\|") for cell in head], [[c.replace("|", "\\|") for c in line] for line in lines])

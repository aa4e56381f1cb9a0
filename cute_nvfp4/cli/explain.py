"""``cute-nvfp4 explain``: a compiled kernel, line by line of Python, beside its PTX and SASS, with what each costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import STDOUT, JsonOption, check_writable, fail, shown_errors, stderr, stdout, write_json

if TYPE_CHECKING:
    from ..sim.profile import Explanation
    from .explain_target import Ran, Target

SCHEMA = 1
"""The version of what ``--json`` writes; it grows when a key changes its meaning."""
_LINES = 8


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET [ARGS]...",
            help="A Python program that launches kernels, with its arguments; a submission; or gemv, gemm, gated_gemm, "
            "grouped_gemm, quantize.",
            show_default=False,
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    arch: Annotated[str, typer.Option(help="Architecture to compile for: sm_90a, sm_100a, sm_120a …")] = "sm_100a",
    problem: Annotated[str, typer.Option(help="What a submission is for: nvfp4_gemv …", show_default=False)] = "",
    task: Annotated[
        Path | None,
        typer.Option(help="The task file of a problem folder, or one with cases of the problem.", show_default=False),
    ] = None,
    case: Annotated[int, typer.Option(help="A submission's test case, numbered from 0.")] = 0,
    m: Annotated[int | None, typer.Option(help="Rows of an operation's A or x.", show_default=False)] = None,
    n: Annotated[int | None, typer.Option(help="Rows of B.", show_default=False)] = None,
    k: Annotated[int | None, typer.Option(help="Length of a row.", show_default=False)] = None,
    launch: Annotated[
        int | None, typer.Option(help="One launch, numbered from 0.", show_default="the first of each kernel")
    ] = None,
    lines: Annotated[int, typer.Option(min=1, help="Lines of Python to print, the most expensive first.")] = _LINES,
    all_lines: Annotated[bool, typer.Option("--all", help="Print all lines.")] = False,
    json: JsonOption = "",
    html: Annotated[
        Path | None, typer.Option(help="Writes a page in which lines can be clicked.", show_default=False)
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Writes what Nsight Compute's details page has, as .txt, .csv or .json.", show_default=False),
    ] = None,
) -> None:
    """Explains compiled kernels: what came of each line of Python, and what it costs.

    The target runs in a simulated GPU, without checks (cute-nvfp4 sim has them). PTX instructions and bytes are
    counted; times are modelled by the clock, where the architecture has one and ptxas and nvdisasm are found.
    """
    for option, file in (("--html", html), ("--report", report)):
        check_writable(option, str(file or ""))
    with shown_errors():
        from ..sim.profile.page import FORMATS
        from ..target import architecture
        from .explain_target import Target, launches

        if report and report.suffix not in FORMATS:
            fail(f"--report {report}: expected a name that ends in {', '.join(FORMATS)}", 2)
        architecture(arch)
        asked = Target(target, arch, problem, case, task, (m, n, k), tuple(arguments or ()))
        with stderr().status(f"running {target} for {arch}"):
            ran = launches(asked)
            chosen = _chosen(ran, asked, launch)
            found = [_explained(one) for one in chosen]
            if report:
                _write_report(chosen, report)
    if json:
        content = {"schema": SCHEMA, "target": target, "arch": arch, "launches": len(ran)}
        write_json(content | {"kernels": [e.to_dict() for e in found]}, json)
    if html:
        from .explain_page import write_page

        write_page(found, f"{target} · {arch}", html)
    if json != STDOUT:
        _show(found, None if all_lines else lines)


def _chosen(ran: list[Ran], target: Target, number: int | None) -> list[Ran]:
    """The requested launch, or the first launch of each kernel."""
    if not ran:
        fail(f"{target.name} launched no kernel", 2)
    if number is None:
        return list({one.launch.kernel: one for one in reversed(ran)}.values())[::-1]
    if not 0 <= number < len(ran):
        fail(f"launch {number} does not exist: {len(ran)} launches, numbered from 0", 2)
    return [ran[number]]


def _explained(ran: Ran) -> Explanation:
    from ..sim.profile import explain as explained

    return explained(*ran)


def _write_report(chosen: list[Ran], path: Path) -> None:
    """Writes the profiles of the launches to ``path``."""
    from ..sim.profile import profile
    from ..sim.profile.page import written

    path.write_text(written([profile(*one) for one in chosen], path.suffix))


def _show(found: list[Explanation], lines: int | None) -> None:
    from rich.text import Text

    from .explain_page import text_lines

    for number, e in enumerate(found, 1):
        for line in text_lines(e, number, lines):
            stdout().print(Text(line), soft_wrap=True)

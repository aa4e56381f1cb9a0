"""``cute-nvfp4 new``: writes a starter submission."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import fail, shown_errors, stdout


def new(
    problem: Annotated[str, typer.Argument(help="Name of the problem, such as nvfp4_gemv.", show_default=False)],
    style: Annotated[
        str, typer.Option(help="cute (a kernel in the CuTe DSL), inline-ptx (nvfp4_gemv: with PTX in it), or torch.")
    ] = "cute",
    output: Annotated[Path, typer.Option(help="Where to write it.")] = Path("submission.py"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Writes a submission to begin with: right, short, commented, and slow on purpose.

    It explains the layout of every tensor, and names three things to try next.
    """
    with shown_errors():
        from ..harness.starters import starter

        text = starter(problem, style)
    try:
        with output.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError:
        fail(f"{output} exists. Write elsewhere with --output FILE, or over it with --force.", 2)
    except OSError as error:
        fail(f"cannot write {output}: {error}", 2)
    told = f"wrote {output}. Is it right? cute-nvfp4 eval {problem} {output}"
    stdout().print(told, markup=False, soft_wrap=True)

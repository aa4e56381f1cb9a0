"""The ``cute-nvfp4`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .doctor import doctor
from .eval import evaluate
from .explain import explain
from .inspect import inspect
from .new import new
from .output import JsonCommand
from .quantize import quantize
from .schema import schema
from .sim import SETTINGS, sim
from .support import support
from .tune import tune

app = typer.Typer(
    name="cute-nvfp4",
    help="CuTe DSL kernels for NVFP4: run the hackathon's problems, look into the kernels, check this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("eval", cls=JsonCommand)(evaluate)
app.command("new")(new)
app.command("inspect", cls=JsonCommand)(inspect)
app.command("explain", cls=JsonCommand)(explain)
app.command("sim", context_settings=SETTINGS)(sim)
app.command("tune", cls=JsonCommand)(tune)
app.command("quantize", cls=JsonCommand)(quantize)
app.command("doctor", cls=JsonCommand)(doctor)
app.command("support", cls=JsonCommand)(support)
app.command("schema")(schema)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cute-nvfp4 {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """CuTe DSL kernels for NVFP4: run the hackathon's problems, look into the kernels, check this machine."""

"""What all commands share: ``--json [FILE]``, consoles, and the display of errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from ..errors import CuteNvfp4Error

STDOUT = "-"
JsonOption = Annotated[
    str,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Print JSON in the place of tables; with FILE (ends in .json), print tables and write JSON there.",
        show_default=False,
    ),
]


class JsonCommand(TyperCommand):
    """A command whose ``--json`` may stand alone: without a ``*.json`` path after it, it means standard output."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        out: list[str] = []
        for position, argument in enumerate(args):
            out.append(argument)
            if argument == "--json" and not (position + 1 < len(args) and args[position + 1].endswith(".json")):
                out.append(STDOUT)
        return super().parse_args(ctx, out)


_PIPE_WIDTH = 140


def stdout() -> Console:
    """The console for results. In a pipe or a file, tables are not folded to 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def stderr() -> Console:
    """The console for progress and errors."""
    return Console(stderr=True, highlight=False)


def say(text: str, style: str | None = None) -> None:
    """Prints a line to standard error as it is, without markup; only the terminal folds it."""
    stderr().print(text, style=style, markup=False, soft_wrap=True)


def write_json(content: dict, where: str) -> None:
    """Writes ``content`` to standard output (``-``) or to the file ``where``."""
    from ..sim.observe.json_text import json_text

    text = json_text(content)
    if where == STDOUT:
        print(text)
        return
    try:
        Path(where).write_text(text + "\n")
    except OSError as error:
        fail(f"cannot write {where}: {error}", 2)


def check_writable(option: str, path: str) -> None:
    """Ends the command at once if it could not write the file later."""
    if not path or path == STDOUT:
        return
    there = Path(path).exists()
    try:
        with open(path, "a"):
            pass
        if not there:
            Path(path).unlink()
    except OSError as error:
        fail(f"{option}: cannot write {path}: {error.strerror}", 2)


def fail(message: str, code: int) -> None:
    """Shows an error and ends the process with ``code``."""
    stderr().print("error: ", style="bold red", end="")
    say(message)
    raise typer.Exit(code)


@contextlib.contextmanager
def shown_errors() -> Iterator[None]:
    """Turns the library's errors into a message and an exit code (the error's own, or 2)."""
    try:
        yield
    except CuteNvfp4Error as error:
        fail(str(error), getattr(error, "exit_code", 2))

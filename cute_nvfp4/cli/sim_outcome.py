"""The outcome of a run of ``cute-nvfp4 sim``: a block on standard error, and the exit status."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from .output import say, stderr

if TYPE_CHECKING:
    from ..sim.session import LaunchRecord, Session

EXIT_INTERNAL = 70
EXIT_NOT_MODELLED = 111
EXIT_HAZARD = 112
EXIT_INTERRUPTED = 130
_STATUS = {"hazard": EXIT_HAZARD, "not modelled": EXIT_NOT_MODELLED, "internal error": EXIT_INTERNAL}
_NAME_WIDTH = 72
_INSTRUCTION = re.compile(r"`(?:@!?%?\w+ )?([a-z]\w*)[^`]*` \(PTX line")
_HINTS = {
    "Deadlock": "--trace FILE draws how it came to that",
    "StepLimit": "--step-limit N lets a kernel run for longer; --trace FILE shows where it turns in circles",
    "UndefinedRegister": "a variable of the kernel is read on a path that does not assign it",
}


def launch_line(record: LaunchRecord) -> str:
    """A launch on one line."""
    launch = record.launch
    name = launch.kernel if len(launch.kernel) <= _NAME_WIDTH else launch.kernel[: _NAME_WIDTH - 1] + "…"
    cluster = "" if launch.cluster == (1, 1, 1) else f" cluster {launch.cluster}"
    return f"{name} grid {launch.grid} block {launch.block}{cluster}"


def show_outcome(
    session: Session,
    status: int,
    error: BaseException | None,
    script: str,
    repeat: str,
    *,
    full: bool = False,
    traced: bool = False,
) -> tuple[int, str]:
    """Shows the error that stopped the program, if any; returns the exit status and the outcome in words.

    status: the program's own. error: what it raised. repeat: the command that repeats the run. full: adds the traceback
    to errors that name a place themselves. traced: whether a trace was written.
    """
    from ..errors import SimError, TargetError
    from ..sim.session import outcome_of

    if session.failure is not None:
        record, found = session.failure
        outcome = outcome_of(found)
        code = _STATUS[outcome]
        advice = [] if traced and type(found).__name__ == "Deadlock" else _advice(found, outcome)
        lines = ([f"in launch {record.number}: {launch_line(record)}"] if record else []) + advice
        _show(outcome, f"{type(found).__name__}: {found}", [*lines, f"repeat with: {repeat}"])
        if full or code == EXIT_INTERNAL:
            show_traceback(found, script)
        if error is not None and error is not found and not _comes_from(error, found):
            show_traceback(error, script)
        return code, outcome
    if error is None:
        return status, "program failed" if status else "ended"
    if isinstance(error, KeyboardInterrupt):
        stderr().print("interrupted", style="red")
        return EXIT_INTERRUPTED, "program failed"
    if isinstance(error, (SimError, TargetError)):
        outcome = "not modelled"
        _show(outcome, f"{type(error).__name__}: {error}", [*_advice(error, outcome), f"repeat with: {repeat}"])
        if full:
            show_traceback(error, script)
        return EXIT_NOT_MODELLED, outcome
    show_traceback(error, script)
    if missing := _missing_package(error):
        _show("program failed", f"it needs the package {missing}, which is not installed for {sys.executable}", [])
    from ..harness.dsl_compat import hint

    if advice := hint(error):
        say(advice.removeprefix("; "))
    return 1, "program failed"


def _advice(found: BaseException, outcome: str) -> list[str]:
    """Lines of advice on the error ``found``."""
    from ..sim.errors import PtxSyntaxError, UnsupportedInstruction

    if outcome == "internal error":
        return ["this is a defect of the simulator, not of the program: please report all of these lines"]
    if isinstance(found, PtxSyntaxError):
        return ["the simulator cannot read this PTX: please report it with the line of the PTX"]
    if isinstance(found, UnsupportedInstruction):
        from ..sim.frontend.opcodes import OPCODES

        name = match[1] if (match := _INSTRUCTION.search(str(found))) else ""
        if not name:
            return ["please report it with these lines; docs/reference/simulator.md lists what is modelled"]
        part = f"other forms of {name} are modelled, this one is not" if name in OPCODES else f"no {name} is modelled"
        return [f"{part}; docs/reference/simulator.md lists what is. Please report it with these lines"]
    hint = _HINTS.get(type(found).__name__)
    if name := re.search(r"\[([a-z-]+)\]$", str(found)):
        return [hint] * bool(hint) + [
            f"docs/how-to/read_a_hazard.md explains it; --allow {name[1]} goes on past it, --continue past all"
        ]
    return [hint] if hint else []


def _show(outcome: str, message: str, lines: list[str]) -> None:
    stderr().print(outcome, style="bold red", end=": ")
    for line in (message, *("  " + line for line in lines)):
        say(line)


def _comes_from(error: BaseException, cause: BaseException) -> bool:
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        if at is cause:
            return True
        seen.append(at)
        at = at.__cause__ or at.__context__
    return False


def _missing_package(error: BaseException) -> str:
    """The missing package that ended the program; "" if only a module of an installed package is missing."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    try:
        return "" if importlib.util.find_spec(package) else package
    except (ImportError, ValueError):
        return ""


def show_traceback(error: BaseException, script: str) -> None:
    """Shows a traceback as Python does, without this command's frames."""
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != script:
        at = at.tb_next
    at = at or error.__traceback__
    # the DSL shows its own errors by an excepthook, which reads the error's traceback
    show = traceback.print_exception if sys.excepthook is sys.__excepthook__ else sys.excepthook
    show(type(error), error.with_traceback(at), at)

"""``cute-nvfp4 sim --schedules N``: runs the program under several schedules, each in its own process."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .output import say, stderr, write_json
from .sim_options import Options
from .sim_outcome import EXIT_HAZARD, EXIT_INTERNAL, EXIT_NOT_MODELLED
from .sim_report import SCHEMA


def run_schedules(options: Options, count: int, seed: int) -> int:
    """Runs the program under ``count`` schedules, up to the first that fails; returns its exit status."""
    from ..sim.machine.schedule import adversarial

    reports = []
    begin, status, number, schedule = time.perf_counter(), 0, 0, ""
    with tempfile.TemporaryDirectory() as folder:
        for number, chosen in enumerate(adversarial(count, seed), 1):
            schedule = str(chosen)
            label = f"schedule {number} of {count}: {schedule}"
            done, seconds = _run_one(options, schedule, Path(folder), label, first=number == 1)
            status = done.returncode
            found = _read(Path(folder), {"schedule": schedule, "status": status})
            reports.append(found)
            say(f"{label}: {_words(found)}, {seconds:.1f} s")
            if status:
                _show_output(done)
                break
    if not status:
        say(f"all {count} schedules ended well, {time.perf_counter() - begin:.1f} s", "green")
    elif status not in (EXIT_HAZARD, EXIT_NOT_MODELLED, EXIT_INTERNAL):
        # runs with these statuses have printed the command themselves
        say(f"  repeat with: {shlex.join(options.command(schedule))}")
    if options.json:
        asked = {"script": options.script, "arguments": options.arguments, "arch": options.arch}
        write_json({"schema": SCHEMA, **asked, "status": status, "schedules": reports}, options.json)
    return status


def _run_one(options: Options, schedule: str, folder: Path, label: str, *, first: bool) -> Any:
    """The finished process, and its seconds. Only the first run's output is shown, and that of a run that fails."""
    extra = ["--quiet"] if options.quiet or not first else []
    extra += ["--json", str(folder / "report.json")] if options.json else []
    extra += ["--trace", options.trace] if options.trace else []
    extra += ["--counters"] if options.counters else []
    extra += ["--traceback"] if options.traceback else []
    command, console, begin = options.command(schedule, extra), stderr(), time.perf_counter()
    sys.stdout.flush()
    if first or not console.is_terminal:
        done = subprocess.run(command, capture_output=not first)
    else:
        with console.status(label):
            done = subprocess.run(command, capture_output=True)
    return done, time.perf_counter() - begin


def _read(folder: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    path = folder / "report.json"
    if not path.is_file():
        return otherwise
    found = json.loads(path.read_text())
    path.unlink()
    return found


def _words(found: dict[str, Any]) -> str:
    status = found["status"]
    known = {0: "ended well", EXIT_HAZARD: "hazard", EXIT_NOT_MODELLED: "not modelled", EXIT_INTERNAL: "internal error"}
    return f"{known.get(status, 'program failed')}, status {status}"


def _show_output(done: subprocess.CompletedProcess) -> None:
    """Prints the output of a captured run; nothing for a run whose output went to the terminal."""
    sys.stdout.write((done.stdout or b"").decode(errors="replace"))
    sys.stdout.flush()
    sys.stderr.write((done.stderr or b"").decode(errors="replace"))
    sys.stderr.flush()

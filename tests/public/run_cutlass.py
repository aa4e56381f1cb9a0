"""Runs programs of a checkout of NVIDIA/cutlass in the simulator: ``python tests/public/run_cutlass.py --cutlass DIR``.

Each runs unmodified, in its own process and its own folder, and passes when its own checks do. Prints a table and
writes JSON. Not part of the test suite: it needs the checkout, and takes minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cutlass_programs import PROGRAMS, Program

ROOT = Path("examples/python/CuTeDSL")
_TAIL = 40
_STATUS = {0: "passed", 111: "not modelled", 112: "hazard"}


@dataclass
class Outcome:
    """How a program ended; ``outcome`` is "passed", "failed", "hazard", "not modelled" or "too slow"."""

    program: str
    arguments: str
    arch: str
    expect: str
    outcome: str
    status: int
    seconds: float
    launches: int = 0
    kernel_seconds: float = 0.0
    instructions: int = 0
    reason: str = ""
    checked: bool = True

    @property
    def as_expected(self) -> bool:
        return (self.outcome == "passed") == (self.expect == "pass")


def run(program: Program, folder: Path, options: list[str], scale: float) -> Outcome:
    path = folder / ROOT / program.path
    report = Path(tempfile.mkdtemp()) / "report.json"
    command = [sys.executable, "-m", "cute_nvfp4.sim", "--arch", program.arch, "--json", str(report), *options]
    begin, limit = time.perf_counter(), program.limit * scale
    try:
        done = subprocess.run(
            [*command, path.name, *program.arguments.split()],
            cwd=path.parent, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        status, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        status, text = 124, f"more than {limit:.0f} s"
    except OSError as error:
        status, text = 127, str(error)
    out = Outcome(program.path, program.arguments, program.arch, program.expect, "", status, 0.0)
    out.checked = program.checked
    out.seconds = round(time.perf_counter() - begin, 1)
    out.outcome = "too slow" if status == 124 else _STATUS.get(status, "failed")
    if not status and program.shows not in text:
        out.outcome, out.reason = "failed", f"its output has no {program.shows!r}"
    if report.is_file():
        found = json.loads(report.read_text())
        out.launches = len(found["launches"])
        out.kernel_seconds = round(sum(entry["seconds"] for entry in found["launches"]), 2)
        out.instructions = sum(entry["instructions"] for entry in found["launches"])
        if found["failure"]:
            out.reason = f"{found['failure']['kind']}: {found['failure']['message']}"
    if status and not out.reason:
        out.reason = "\n".join(text.strip().splitlines()[-_TAIL:])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cutlass", type=Path, required=True, help="checkout of NVIDIA/cutlass")
    parser.add_argument("--only", default="", help="programs whose path contains this")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    parser.add_argument("--limit-scale", type=float, default=1.0, help="multiplies the time limits")
    parser.add_argument("--option", action="append", default=[], help="passed to the simulator, such as --no-checks")
    given = parser.parse_args()
    outcomes = []
    for program in PROGRAMS:
        if given.only not in program.path:
            continue
        outcome = run(program, given.cutlass, given.option, given.limit_scale)
        outcomes.append(outcome)
        mark = " " if outcome.as_expected else "!"
        first = outcome.reason.strip().splitlines()[-1][:110] if outcome.reason.strip() else ""
        counts = f"{outcome.launches:4d} launches {outcome.kernel_seconds:7.2f} s of {outcome.seconds:6.1f} s"
        print(f"{mark} {outcome.outcome:12} {counts}  {outcome.program}  {first}", flush=True)
        if given.json:
            given.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    passed, checked = ([o for o in outcomes if o.outcome == "passed" and (o.checked or not c)] for c in (False, True))
    odd = sum(not o.as_expected for o in outcomes)
    print(
        f"{len(passed)} of {len(outcomes)} passed, {len(checked)} of them by checks of their own; {odd} not as expected"
    )
    return 0 if all(o.as_expected for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

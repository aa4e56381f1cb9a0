"""Runs programs of a checkout of NVIDIA/cutlass in the simulator: ``python tests/public/run_cutlass.py --cutlass DIR``.

Each runs unmodified, in its own process and its own folder, and passes when its own checks do. Prints a line for each,
and writes JSON, and the table of benchmarks/records/public_programs.md (``--markdown``). Not part of the test suite: it
needs the checkout, and takes minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from cutlass_programs import PROGRAMS, Program
from cutlass_table import half, markdown, versions

ROOT = Path("examples/python/CuTeDSL")
_TAIL = 40
_STATUS = {0: "passed", 111: "not modelled", 112: "hazard"}


@dataclass
class Outcome:
    """How a program ended; ``outcome`` is "passed", "failed", "hazard", "not modelled", "too slow" or "absent"."""

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


def run(program: Program, checkout: Path, options: list[str], scale: float) -> Outcome:
    path = checkout / ROOT / program.path
    out = run_program(program, path, path.parent, options, scale)
    # nothing of this machine in what is written
    out.reason = out.reason.replace(str(checkout.resolve()), "cutlass").replace(str(checkout), "cutlass")
    return out


def run_program(program: Program, path: Path, folder: Path, options: list[str], scale: float) -> Outcome:
    """Runs the file ``path`` in ``folder``."""
    out = Outcome(program.path, program.arguments, program.arch, program.expect, "", 0, 0.0, checked=program.checked)
    if not path.is_file():
        out.outcome, out.status, out.reason = "absent", 127, "there is no such file"
        return out
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.json"
        command = [sys.executable, "-m", "cute_nvfp4", "sim", "--arch", program.arch, "--json", str(report), *options]
        _run(out, program, [*command, str(path)], folder, report, program.limit * scale)
    return out


def _run(out: Outcome, program: Program, command: list[str], folder: Path, report: Path, limit: float) -> None:
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, *program.arguments.split()],
            cwd=folder, capture_output=True, text=True, errors="replace", timeout=limit, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        out.status, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        out.status, text = 124, f"more than {limit:.0f} s"
    out.seconds = round(time.perf_counter() - begin, 1)
    out.outcome = "too slow" if out.status == 124 else _STATUS.get(out.status, "failed")
    if not out.status and program.shows not in text:
        out.outcome, out.reason = "failed", f"its output has no {program.shows!r}"
    if report.is_file():
        found = json.loads(report.read_text())
        out.launches = len(found["launches"])
        out.kernel_seconds = round(sum(entry["seconds"] for entry in found["launches"]), 2)
        out.instructions = sum(entry["instructions"] for entry in found["launches"])
        if found["failure"]:
            out.reason = f"{found['failure']['kind']}: {found['failure']['message']}"
        elif found["error"] and out.status:
            out.reason = f"{found['error']['kind']}: {found['error']['message']}"
    if out.status and not out.reason.strip():
        out.reason = "\n".join(text.strip().splitlines()[-_TAIL:])


def run_all(programs: list[Program], given: argparse.Namespace) -> Iterator[tuple[int, Outcome]]:
    """(index, outcome) as they end, ``given.jobs`` at a time."""
    with ThreadPoolExecutor(given.jobs) as pool:
        tasks = {
            pool.submit(run, program, given.cutlass, given.option, given.limit_scale): index
            for index, program in enumerate(programs)
        }
        try:
            for task in as_completed(tasks):
                yield tasks[task], task.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cutlass", type=Path, required=True, help="checkout of NVIDIA/cutlass")
    parser.add_argument("--commit", default="", help="its commit, where git does not know it")
    parser.add_argument("--only", default="", help="programs whose path contains this")
    parser.add_argument(
        "-j", "--jobs", type=int, default=1, help="programs at a time; slower each, so see --limit-scale"
    )
    parser.add_argument("--json", type=Path, help="write versions and outcomes there")
    parser.add_argument("--markdown", type=Path, help="the table of benchmarks/records/public_programs.md")
    parser.add_argument("--limit-scale", type=float, default=1.0, help="multiplies the time limits")
    parser.add_argument(
        "--option", action="append", default=[], help="passed to the simulator, as --option=--no-checks"
    )
    given = parser.parse_args(arguments)
    if not (given.cutlass / ROOT).is_dir():
        parser.error(f"{given.cutlass} has no {ROOT}")
    if given.jobs < 1:
        parser.error(f"--jobs: got {given.jobs}, expected at least 1")
    return given


def main() -> int:
    given = parse()
    programs = [p for p in PROGRAMS if given.only in p.path]
    found: dict[int, Outcome] = {}
    about = versions(given.cutlass, given.commit)
    for index, outcome in run_all(programs, given):
        found[index] = outcome
        _show(outcome, len(found), len(programs))
        outcomes = [asdict(found[i]) for i in sorted(found)]
        # written as it grows, so that a run that is broken off leaves what it had
        if given.json:
            given.json.write_text(json.dumps({"versions": about, "programs": outcomes}, indent=1) + "\n")
        if given.markdown:
            given.markdown.write_text(half(markdown(outcomes, about, given.option), given.markdown))
    ended = list(found.values())
    passed, checked = ([o for o in ended if o.outcome == "passed" and (o.checked or not c)] for c in (False, True))
    odd = sum(not o.as_expected for o in ended)
    print(f"{len(passed)} of {len(ended)} passed, {len(checked)} of them by checks of their own; {odd} not as expected")
    return 1 if odd or not ended else 0


def _show(outcome: Outcome, number: int, count: int) -> None:
    mark = " " if outcome.as_expected else "!"
    first = outcome.reason.strip().splitlines()[-1][:110] if outcome.reason.strip() else ""
    counts = f"{outcome.launches:4d} launches {outcome.kernel_seconds:7.2f} s of {outcome.seconds:6.1f} s"
    print(f"{mark} {number:3d}/{count} {outcome.outcome:12} {counts}  {outcome.program}  {first}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Runs kernels of public libraries in the simulator: ``python tests/public/run_libraries.py``.

Each program is a function of a driver in ``tests/public/libraries``, which imports a library, calls it as its users do,
and compares with torch; it runs in its own process. Writes ``libraries.json`` beside this file, and the second half of
benchmarks/records/public_programs.md. Not part of the test suite: it needs the packages that
``library_programs.py`` names, and takes an hour.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from cutlass_programs import Program
from cutlass_table import LIBRARIES
from library_programs import PROGRAMS
from library_table import markdown, versions
from run_cutlass import Outcome, run_program

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "libraries.json"
PAGE = HERE.parents[1] / "benchmarks" / "records" / "public_programs.md"


def page(before: str, results: dict) -> str:
    """The page with its second half made from ``results``."""
    above = before.partition(LIBRARIES)[0].rstrip("\n") + "\n"
    return above + LIBRARIES + markdown(results["programs"], results["versions"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="what a driver and its arguments contain; without, all are run")
    parser.add_argument("--failed", action="store_true", help="programs that did not end as expected the last time")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="programs at a time")
    parser.add_argument("--limit-scale", type=float, default=1.0, help="multiplies the time limits")
    parser.add_argument(
        "--option", action="append", default=[], help="passed to the simulator, as --option=--no-checks"
    )
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    return parser.parse_args(arguments)


def main() -> int:
    given = parse()
    ended: list[Outcome] = []
    chosen = [] if given.page else choose(given)
    with ThreadPoolExecutor(given.jobs) as pool:
        tasks = [pool.submit(run, p, given) for p in chosen]
        for task in as_completed(tasks):
            outcome = task.result()
            ended.append(outcome)
            mark = " " if outcome.as_expected else "!"
            reason = outcome.reason.splitlines()[:1] if outcome.outcome != "passed" else []
            print(f"{mark} {len(ended):3d}/{len(chosen)} {outcome.outcome:12} {outcome.seconds:6.1f} s", end="  ")
            print(outcome.program, outcome.arguments, *(r[:200] for r in reason), flush=True)
            if not given.dry:
                write([outcome])
    if given.page:
        write([])
    return int(not all(o.as_expected for o in ended))


def run(program: Program, given: argparse.Namespace) -> Outcome:
    # in a folder of its own: some libraries leave what they compiled where they stand
    with tempfile.TemporaryDirectory() as folder:
        path = HERE / "libraries" / program.path
        outcome = run_program(program, path, Path(folder), given.option, given.limit_scale)
    outcome.reason = told(outcome.reason)
    return outcome


def choose(given: argparse.Namespace) -> list[Program]:
    """Programs that are named whole, or contain what names no program; only those not as expected with ``--failed``."""
    known, names = read(), {f"{p.path} {p.arguments}" for p in PROGRAMS}
    asked = [p for p in PROGRAMS if not given.programs or any(_meant(word, p, names) for word in given.programs)]
    return [p for p in asked if not given.failed or not as_expected(known.get((p.path, p.arguments)))]


def _meant(word: str, program: Program, names: set[str]) -> bool:
    name = f"{program.path} {program.arguments}"
    return word == name or (word in name and word not in names)


def told(reason: str) -> str:
    """The lines of an error that say what happened, without the folders of this machine."""
    lines = [line for line in reason.strip().splitlines() if "repeat with:" not in line]
    # an exception's message begins with its kind, and may go on for long; a traceback ends with it
    lines = lines[:8] if lines and re.match(r"[\w.]+: ", lines[0]) else lines[-1:]
    return re.sub(r"(?<![\w/])/(?:[\w.+-]+/)*(?:site-packages|libraries)/", "", "\n".join(lines))


def as_expected(outcome: dict | None) -> bool:
    return outcome is not None and (outcome["outcome"] == "passed") == (outcome["expect"] == "pass")


def read() -> dict[tuple[str, str], dict]:
    old = json.loads(RESULTS.read_text())["programs"] if RESULTS.is_file() else []
    return {(o["program"], o["arguments"]): o for o in old}


def write(ended: list[Outcome]) -> None:
    """Adds to the results, in the order of the list and with what it expects now; and writes the page."""
    known = read() | {(o.program, o.arguments): asdict(o) for o in ended}
    listed = [known[p.path, p.arguments] | {"expect": p.expect} for p in PROGRAMS if (p.path, p.arguments) in known]
    results = {"versions": versions(), "programs": listed}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), results))


if __name__ == "__main__":
    sys.exit(main())

"""The outcomes of ``run_cutlass.py`` as the table of benchmarks/records/public_programs.md."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_HEADINGS = (
    ("cute/blackwell/tutorial", "Blackwell tutorials"),
    ("cute/blackwell/kernel/attention", "Blackwell attention and state space kernels"),
    ("cute/blackwell/kernel", "Blackwell kernels"),
    ("cute/blackwell/efc", "Blackwell GEMMs with an epilogue of the caller's"),
    ("cute/blackwell_geforce", "Blackwell of GeForce (sm_120a)"),
    ("cute/hopper", "Hopper"),
    ("cute/ampere", "Ampere programs, compiled for Blackwell"),
    ("cute_ext", "The extension library"),
    ("experimental/primitives", "Primitives"),
    ("experimental/task_scheduling", "Task scheduling"),
    ("dsl_tutorials", "The language"),
    ("", "Others"),
)
_REASON = 200
LIBRARIES = "\n# Libraries\n"
"""Line of the page where what ``run_libraries.py`` writes begins."""
_INTRODUCTION = """\
# Public programs

NVIDIA publishes CuTe DSL programs with CUTLASS. These were run in the simulator, unmodified, with arguments that keep
them small. A program passes when it ends with status 0 and, where it checks its own result, its check holds. Programs
that check nothing only show that they run to their end. The simulator's own checks for hazards were {checks}.

`python tests/public/run_cutlass.py --cutlass DIR --markdown FILE` makes this half of the page; kernels of other
[libraries](#libraries) are below.

"""


def versions(checkout: Path, commit: str = "") -> dict[str, str]:
    """Commit of the checkout (``commit``, or what git says) and versions of the packages that took part."""
    names = ("nvidia-cutlass-dsl", "torch", "numpy", "cute-nvfp4")
    return {"CUTLASS": commit or _commit(checkout) or "unknown commit"} | {name: installed(name) for name in names}


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit(checkout: Path) -> str:
    """Empty where the folder is not itself a checkout: one inside another repository has not that one's commit."""
    command = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    lines = done.stdout.split("\n")
    top = bool(done.stdout) and not done.returncode and Path(lines[0]).resolve() == checkout.resolve()
    return lines[1].strip() if top else ""


def markdown(outcomes: list[dict[str, Any]], about: dict[str, str], options: list[str]) -> str:
    """The whole file; ``outcomes`` are ``Outcome`` objects as dictionaries."""
    text = _INTRODUCTION.format(checks="off" if "--no-checks" in options else "on")
    text += "Versions: " + ", ".join(f"{name} {found}" for name, found in about.items()) + ".\n\n"
    text += _summary(outcomes)
    left = list(outcomes)
    for prefix, heading in _HEADINGS:
        group = [o for o in left if o["program"].startswith(prefix)]
        left = [o for o in left if o not in group]
        if group:
            passed = sum(o["outcome"] == "passed" for o in group)
            text += f"\n## {heading}\n\n{passed} of {len(group)} pass.\n\n{_table(group)}"
    return text


def half(text: str, page: Path) -> str:
    """``text`` in place of the first half of ``page``."""
    below = page.read_text().partition(LIBRARIES)[2] if page.is_file() else ""
    return text.rstrip("\n") + "\n" + (LIBRARIES + below if below else "")


def _summary(outcomes: list[dict[str, Any]]) -> str:
    passed = [o for o in outcomes if o["outcome"] == "passed"]
    checked = sum(o["checked"] for o in passed)
    lines = [
        f"- programs run: {len(outcomes)}",
        f"- pass by their own checks: {checked}",
        f"- run to their end and check nothing: {len(passed) - checked}",
        f"- stopped by a check, while their own checks pass with `--no-checks`: {sum(map(_stopped, outcomes))}",
        f"- do not pass for another reason: {len(outcomes) - len(passed) - sum(map(_stopped, outcomes))}",
    ]
    return "\n".join(lines) + "\n"


def _stopped(outcome: dict[str, Any]) -> bool:
    return outcome["outcome"] == "hazard" and outcome["expect"].startswith("checks: ")


def _table(group: list[dict[str, Any]]) -> str:
    rows = ["| program | arguments | outcome |", "|---|---|---|"]
    for o in group:
        arch = "" if o["arch"] == "sm_100a" else f" ({o['arch']})"
        arguments = f"`{o['arguments']}`" if o["arguments"] else ""
        rows.append(f"| {o['program']}{arch} | {arguments.replace('|', chr(92) + '|')} | {words(o)} |")
    return "\n".join(rows) + "\n"


def words(outcome: dict[str, Any]) -> str:
    """The outcome as a sentence in a cell."""
    if outcome["outcome"] == "passed":
        return "passes by its own checks" if outcome["checked"] else "passes, but checks nothing"
    known = "" if outcome["expect"] == "pass" else outcome["expect"]
    lines = outcome["reason"].strip().splitlines()
    # an error's first line is its message where the simulator reports one, its last line in a traceback
    reason = known or (
        lines[0 if outcome["outcome"] in ("hazard", "not modelled") else -1] if lines else "no reason told"
    )
    reason = re.sub(r"(?<![\w/])/(?:[\w.+-]+/)+", "", reason).replace("|", "\\|").replace("\n", " ")
    reason = re.sub(r"0x[0-9a-f]{8,}", "an address", reason)
    short = reason if len(reason) <= _REASON else reason[: _REASON - 1] + "…"
    return f"{outcome['outcome']}: {short}"

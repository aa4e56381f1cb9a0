"""The findings that a run of ``cute-nvfp4 sim`` went on past, class by class."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .output import say

if TYPE_CHECKING:
    from ..sim.checks.findings import Finding
    from ..sim.session import Session


def show_findings(session: Session, quiet: bool) -> None:
    """Prints the first message of each class of hazard in full; unless ``quiet``, a line for each class of warning."""
    from ..sim.checks.findings import grouped

    found = session.findings()
    told = "" if session.failure is None else str(session.failure[1])
    for text in grouped(found, "hazard"):
        if not told or not text.removeprefix("hazard: ").startswith(told.rpartition(" [")[0]):
            say(text, "red")
    hazards = [f for f in found if f.severity == "hazard"]
    if hazards:
        where = sorted({f"{f.rule} at {place(f)}" for f in hazards})
        say(f"{len(where)} hazard(s): {'; '.join(where)}", "red")
    for line in [] if quiet else warning_lines(found):
        say(line, "dim")


def warning_lines(found: list[Finding]) -> list[str]:
    """A line for each class of warning: its first place, how often it occurs there, and at how many others."""
    by: dict[str, list[Finding]] = {}
    for finding in found:
        if finding.severity == "warning":
            by.setdefault(finding.rule, []).append(finding)
    lines = []
    for rule, (first, *more) in by.items():
        times = f" ({first.count} times)" if first.count > 1 else ""
        lines.append(f"warning: {rule} at {place(first)}{times}{f', and {len(more)} more' if more else ''}")
    hint = "--json FILE has the warnings in full, docs/how-to/read_a_hazard.md what they mean"
    return [*lines, hint] if lines else []


def place(finding: Finding) -> str:
    """An instruction in a few words: its opcode, its line in the PTX, the file and line of its source."""
    opcode = re.sub(r"^@!?\S+\s+", "", finding.instruction).partition(" ")[0]
    source = f", {re.sub(r'^.*/', '', finding.loc)}" if finding.loc else ""
    return f"{opcode} (PTX line {finding.line}{source})" if finding.line else finding.loc or "an earlier instruction"

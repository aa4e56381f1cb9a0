"""The committed results of public libraries' programs: they are what the page says, and enough of them end well."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "public"))
from library_programs import PROGRAMS, TRUE_HAZARDS
from library_table import argued, internal
from run_libraries import PAGE, RESULTS, page

FOUND = json.loads(RESULTS.read_text())
PROGRAMS_RUN = FOUND["programs"]


def test_every_listed_program_was_run() -> None:
    assert [(o["program"], o["arguments"]) for o in PROGRAMS_RUN] == [(p.path, p.arguments) for p in PROGRAMS]


def test_bars() -> None:
    good = [o for o in PROGRAMS_RUN if o["outcome"] == "passed" or argued(o)]
    assert len(PROGRAMS_RUN) >= 60 and len(good) >= 0.85 * len(PROGRAMS_RUN)
    assert not [o["arguments"] for o in PROGRAMS_RUN if internal(o)]


def test_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == page(PAGE.read_text(), FOUND)


def test_true_hazards_are_told_in_the_findings() -> None:
    findings = (PAGE.parent / "findings.md").read_text()
    stopped = {o["arguments"] for o in PROGRAMS_RUN if argued(o)}
    assert stopped == set(TRUE_HAZARDS)
    assert all(o["arguments"].split()[0] in findings for o in PROGRAMS_RUN if argued(o))


def test_nothing_of_the_machine_is_in_the_results() -> None:
    assert not [o["arguments"] for o in PROGRAMS_RUN if "/home/" in o["reason"] or "site-packages" in o["reason"]]

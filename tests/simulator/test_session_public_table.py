"""The table of public programs: words for outcomes, counts, and nothing of the machine that made it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "public"))
from cutlass_table import half, markdown, versions, words


def outcome(program: str = "cute/ampere/x.py", **more: object) -> dict:
    base = {"program": program, "arguments": "", "arch": "sm_100a", "expect": "pass", "outcome": "passed"}
    return base | {"reason": "", "checked": True} | more


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({}, "passes by its own checks"),
        ({"checked": False}, "passes, but checks nothing"),
        ({"outcome": "failed", "expect": "known cause", "reason": "A\nB"}, "failed: known cause"),
        ({"outcome": "failed", "reason": "Traceback\nValueError: a | b"}, "failed: ValueError: a \\| b"),
        ({"outcome": "hazard", "reason": "Race: `st` (/a/b/c.py:3) at 0x7f0012345678\nmore"},
         "hazard: Race: `st` (c.py:3) at an address"),
        ({"outcome": "too slow", "reason": "more than 3 s"}, "too slow: more than 3 s"),
    ],
)  # fmt: skip
def test_words(more: dict, want: str) -> None:
    assert words(outcome(**more)) == want


def test_groups_and_counts() -> None:
    found = [
        outcome(),
        outcome("cute_ext/y.py", checked=False, arguments="--mnk 1,2"),
        outcome("z.py", outcome="failed"),
        outcome("w.py", outcome="hazard", expect="checks: a wait is missing"),
    ]
    text = markdown(found, {"CUTLASS": "abc", "torch": "2"}, [])
    counts = ["programs run: 4", "pass by their own checks: 1", "run to their end and check nothing: 1"]
    counts += ["stopped by a check, while their own checks pass with `--no-checks`: 1"]
    counts += ["do not pass for another reason: 1"]
    assert "\n".join(f"- {c}" for c in counts) in text
    assert text.count("\n## ") == 3 and "| cute_ext/y.py | `--mnk 1,2` | passes, but checks nothing |" in text
    assert "CUTLASS abc, torch 2." in text and "## Others\n\n0 of 2 pass." in text and "hazards were on" in text


def test_versions_do_not_take_the_commit_of_another_repository(tmp_path) -> None:
    assert versions(tmp_path)["CUTLASS"] == "unknown commit"
    assert versions(Path(__file__).parent)["CUTLASS"] == "unknown commit"
    assert versions(tmp_path, "1234")["CUTLASS"] == "1234" and "nvidia-cutlass-dsl" in versions(tmp_path)


def test_the_other_half_of_the_page_stays(tmp_path) -> None:
    page = tmp_path / "page.md"
    assert half("# New\n", page) == "# New\n"
    page.write_text("# Old\n\n# Libraries\n\nrows\n")
    assert half("# New\n\n", page) == "# New\n\n# Libraries\n\nrows\n"

"""The pages keep their kinds: explanations are short, and dated runs stand in the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPLANATIONS = sorted((ROOT / "docs" / "explanation").glob("*.md"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MOST_WORDS = 1500
"""Words of an explanation; what is more belongs to a how-to, to the reference or to the records."""
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def too_long(text: str) -> str | None:
    """What is wrong with the length of an explanation, or None."""
    words = len(text.split())
    return f"got {words} words, expected at most {MOST_WORDS}: divide the page" if words > MOST_WORDS else None


def dated(text: str) -> list[str]:
    """Dates of runs in a page, outside the tables that ``docs/tables.py`` writes with the date of their record."""
    return DATE.findall(re.sub(r"<!-- table: .*?<!-- table: end -->", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", EXPLANATIONS, ids=lambda page: page.stem)
def test_explanations_are_short(page: Path) -> None:
    assert not too_long(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_dated_runs_stand_in_the_records(page: Path) -> None:
    assert not dated(page.read_text(encoding="utf-8")), "move the run to benchmarks/records, or generate its table"


def test_the_tests_can_fail() -> None:
    assert too_long("word " * 1501) and not too_long("word " * 1500)
    assert dated("On an H200, 2026-11-22: 5 µs.") == ["2026-11-22"]
    assert not dated("<!-- table: gemm -->\nMeasured 2026-11-22.\n<!-- table: end -->\n")
    assert len(EXPLANATIONS) >= 10

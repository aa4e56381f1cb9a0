"""The pages keep their kinds, their tables are those of the records, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from support import forked

import cute_nvfp4
from cute_nvfp4.errors import OperandError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import limits  # noqa: E402
import messages  # noqa: E402
import support_matrix  # noqa: E402
import tables  # noqa: E402

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


def typed_times(text: str) -> list[str]:
    """Heads of tables with times or rates that a person typed: outside the marks of the scripts that write tables."""
    text = re.sub(r"<!-- (table|accuracy): .*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    heads = re.findall(r"^(\|.*\|)\n\| ?:?---", text, re.MULTILINE)
    return [head for head in heads if re.search(r"µs|\bms\b|TFLOPS", head)]


MEASURE = re.compile(r"\d\s?(?:µs|ms\b|TFLOPS|TB/s)|\d\s?% (?:faster|slower|too|off|from|of cuBLAS)|times cuBLAS")
GENERATED = re.compile(
    r"<!-- (table|accuracy): .*?<!-- \1: end -->|<!-- count: .*?<!-- end -->|```.*?```|`[^`]*`", re.DOTALL
)


def typed_figures(text: str) -> list[str]:
    """Paragraphs and rows with a time, a rate or an error that a person typed and that no record is linked for.

    What scripts write, and code, has none. A link to ``benchmarks`` in the same paragraph, or one below the same
    heading for a table, is the record.
    """
    found = []
    for section in re.split(r"^(?=#)", GENERATED.sub("", text), flags=re.MULTILINE):
        for paragraph in section.split("\n\n"):
            linked = section if paragraph.lstrip().startswith("|") else paragraph
            if MEASURE.search(paragraph) and "benchmarks/" not in linked:
                found += [line for line in paragraph.splitlines() if MEASURE.search(line)]
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_typed_figures_have_a_record(page: Path) -> None:
    assert not typed_figures(page.read_text(encoding="utf-8")), "generate the figure, or link its record"


@pytest.mark.parametrize("page", EXPLANATIONS, ids=lambda page: page.stem)
def test_explanations_are_short(page: Path) -> None:
    assert not too_long(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_dated_runs_stand_in_the_records(page: Path) -> None:
    assert not dated(page.read_text(encoding="utf-8")), "move the run to benchmarks/records, or generate its table"


WITH_TABLES = [
    page for page in tables.pages() if tables.TABLE.search(text := page.read_text()) or tables.COUNT.search(text)
]
SUPPORT = ROOT / "docs" / "reference" / "support.md"


@pytest.mark.parametrize("page", [p for p in WITH_TABLES if p != SUPPORT], ids=lambda page: page.stem)
def test_tables_are_those_of_their_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.written(text) == text, "python docs/tables.py --write"


def unlinked(index: str, pages: list[Path]) -> set[Path]:
    """Pages that the lists of ``index``, the text of docs/index.md, do not link; its toctrees are hidden on GitHub."""
    links = re.findall(r"\]\(([^)#]+)", index.partition("```{toctree}")[0])
    return set(pages) - {(ROOT / "docs" / link).resolve() for link in links}


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    pages = [page for page in (*PAGES, *(ROOT / "benchmarks" / "records").glob("*.md")) if page != index]
    text = index.read_text(encoding="utf-8")
    assert not unlinked(text, pages), "add the page to its list in docs/index.md"
    missing = text.replace("](find_it.md)", "](../README.md)")
    assert unlinked(missing, pages) == {ROOT / "docs" / "find_it.md"}


def test_a_changed_figure_is_seen() -> None:
    page = ROOT / "docs" / "reference" / "measured.md"
    text = page.read_text(encoding="utf-8")
    figure = "| 14.5 |"
    assert figure in text and tables.written(text.replace(figure, "| 14.4 |")) == text
    count = "<!-- count: fingerprints -->1<!-- end -->"
    assert tables.written(count) != count
    with pytest.raises(KeyError, match="none"):
        tables.written("<!-- table: none -->\n<!-- table: end -->")


def test_the_support_matrix_is_what_the_package_answers() -> None:
    """The page says what ``cute-nvfp4 support`` does; another answer gives another page."""
    command = [sys.executable, "-m", "cute_nvfp4", "support", "--json"]
    done = forked.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    page = SUPPORT.read_text(encoding="utf-8")
    assert f"<!-- table: support -->\n{support_matrix.markdown(answers)}<!-- table: end -->" in page, (
        "python docs/tables.py --write"
    )
    row = next(row for row in answers["rows"] if (row["operation"], row["form"]) == ("gemm", "prepared"))
    assert row["architectures"]["sm_90a"]["runs"]
    assert not all(cell["runs"] for other in answers["rows"] for cell in other["architectures"].values())
    row["architectures"]["sm_90a"] = {"runs": False, "reason": "none"}
    assert support_matrix.markdown(answers) not in page


def _takes_64s(m: int, n: int, k: int) -> None:
    if k % 64:
        raise OperandError.of("K", got=k, expected="a multiple of 64")


def test_a_new_name_or_command_changes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed summaries are asked of the package: a name, a command or a limit that is not there is seen."""
    api, commands = tables.TABLES["api"](), tables.TABLES["commands"]()
    assert "\ngemm(a, b, *, alpha=None, bias=None," in tables.TABLES["all_arguments"]()
    assert "| `gemm(a, b, …)` |" in api and "## support" in commands and "`--schedules`" in commands
    monkeypatch.setattr(cute_nvfp4, "__all__", [name for name in cute_nvfp4.__all__ if name != "gemm"])
    assert "| `gemm(a, b, …)` |" not in tables.TABLES["api"]()
    assert "\ngemm(" not in tables.TABLES["all_arguments"]()
    assert limits.limit(limits.Call("f", "x", _takes_64s), "K", "sm_90a") == (
        64,
        "K: got 288, expected a multiple of 64.",
    )


ENVIRONMENT = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
READ = re.compile(r"""["'`](CUTE_NVFP4_[A-Z_]+[A-Z])(?:=1)?["'`]""")


def missing_variables(sources: str) -> set[str]:
    """Variables of the package that its sources name and the page does not."""
    return set(READ.findall(sources)) - set(re.findall(r"CUTE_NVFP4_[A-Z_]+[A-Z]", ENVIRONMENT))


def missing_codes(codes: set[int]) -> set[int]:
    """Exit codes without a row in the page's table."""
    return codes - set(map(int, re.findall(r"^\| (\d+) \|", ENVIRONMENT, re.MULTILINE)))


def test_the_page_of_the_environment_is_complete() -> None:
    """Every variable that the package reads and every exit code that a module names; a new one is seen."""
    package = ROOT / "cute_nvfp4"
    sources = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    assert "CUTE_NVFP4_CACHE_DIR" in READ.findall(sources) and not missing_variables(sources)
    assert missing_variables('"CUTE_NVFP4_NEW"') == {"CUTE_NVFP4_NEW"}
    codes = {int(code) for code in re.findall(r"^EXIT_\w+ = (\d+)$", sources, re.MULTILINE)}
    assert 112 in codes and not missing_codes(codes)
    assert missing_codes({113, 114}) == {114}


def test_a_message_of_the_page_is_what_a_call_says() -> None:
    """A call that is not refused, and words that no module has, are errors of the table's script."""
    with pytest.raises(ValueError, match="got no error"):
        messages.said(messages.Refused("2 + 2", lambda: 4, ""))
    assert "expected a multiple of 16" in messages.said(next(messages.quantizations()))


@pytest.mark.parametrize("written", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["checked", "written"])
def test_the_site_builds_strictly(written: bool, tmp_path: Path) -> None:
    """Links, anchors, docstrings and notebooks: Sphinx has no warning. What writing its pages costs is most of it."""
    if not all(map(importlib.util.find_spec, ("myst_nb", "furo", "sphinx_copybutton"))):
        pytest.skip("the extra 'docs' is not installed")
    command = [sys.executable, str(ROOT / "docs" / "build.py"), "--strict", "--skip-tables", "--out", str(tmp_path)]
    done = forked.run([*command, *["--check"] * (not written)], capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    if written:
        assert "gated_gemm" in (tmp_path / "docs" / "reference" / "api.html").read_text(encoding="utf-8")
        assert (tmp_path / "searchindex.js").exists()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_no_table_of_times_is_typed(page: Path) -> None:
    assert not typed_times(page.read_text(encoding="utf-8")), "generate the table (docs/tables.py), or make it a record"


def test_the_tests_can_fail() -> None:
    head = "| call | µs |\n|---|---|\n| gemm | 5 |\n"
    assert typed_times(head) == ["| call | µs |"]
    assert not typed_times(f"<!-- table: gemm -->\n{head}<!-- table: end -->\n")
    assert typed_figures("A call takes 5 µs.\n") and typed_figures("It is 8 % too fast.\n")
    assert not typed_figures("A call takes 5 µs ([record](../../benchmarks/records/launch.md)).\n")
    assert not typed_figures("A call takes <!-- count: launch -->5 µs<!-- end -->, and `5 µs` is code.\n")
    assert typed_figures("One takes 5 µs.\n\nThe [record](../benchmarks/x.md) is of another.\n") == ["One takes 5 µs."]
    assert too_long("word " * 1501) and not too_long("word " * 1500)
    assert dated("On an H200, 2026-11-22: 5 µs.") == ["2026-11-22"]
    assert not dated("<!-- table: gemm -->\nMeasured 2026-11-22.\n<!-- table: end -->\n")
    assert len(EXPLANATIONS) >= 10

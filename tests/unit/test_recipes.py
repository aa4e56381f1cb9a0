"""README and the pages of docs/how-to and docs/tutorials do what they print, command by command, in the simulated GPU.

A page's ```python blocks without a mark are one program, run as ``cute-nvfp4 sim --arch sm_90a``: what the page prints
for an H100 needs no other line here. Marks are comments on the line before a block:

    <!-- file: NAME -->      the block is written to NAME; above it readers see *File `NAME`:*
    <!-- exit: 112 -->       the commands of the block end with this code
    <!-- run: … -->          the block is a command that is no ``cute-nvfp4``
    <!-- needs: ptxas -->    not run where ptxas is missing
    <!-- not run: WHY -->    not run
    <!-- command: NAME -->   an installation of the README: not run here
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import forked

from cute_nvfp4.sim.checks.findings import CLASSES
from cute_nvfp4.sim.checks.static import RULES, STRICT
from cute_nvfp4.sim.clock.tools import found

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = ROOT / "docs" / "how-to"
PAGES = [
    "../README.md",
    "how-to/serve_a_model.md",
    "how-to/compete.md",
    "how-to/write_kernels.md",
    "how-to/use_a_prepared_weight.md",
    "how-to/moe.md",
    "how-to/judge_a_kernel.md",
    "how-to/time_a_kernel.md",
    "how-to/look_inside_a_kernel.md",
    "how-to/add_an_instruction.md",
    "how-to/operations.md",
    "explanation/formats.md",
    "reference/shapes.md",
    "tutorials/first_gemm.md",
    "tutorials/first_submission.md",
    "tutorials/faster_without_a_gpu.md",
]
DOORS = PAGES[1:4]
BLOCK = re.compile(r"(?:<!-- ([^>]*?) -->\n)?```(python|bash|yaml)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code of a page: its language, its text, and the mark before it ("" if there is none)."""

    mark: str
    language: str
    text: str

    def value(self, name: str) -> str | None:
        """What the mark ``name`` says, or None."""
        key, _, value = self.mark.partition(": ")
        return value if key == name else None


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall((ROOT / "docs" / page).read_text())]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Runs a command of a page: ``cute-nvfp4`` and ``python`` by forking."""
    start = {"cute-nvfp4": [sys.executable, "-m", "cute_nvfp4"], "python": [sys.executable]}[words[0]]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": paths}
    variables.pop("CUTE_NVFP4_ARCH", None)
    return forked.run([*start, *words[1:]], capture_output=True, text=True, cwd=folder, env=variables, timeout=280)


def commands(block: Block) -> list[list[str]]:
    lines = (line.partition("  #")[0].strip() for line in block.text.splitlines())
    return [shlex.split(line) for line in lines if line]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page: str, tmp_path: Path) -> None:
    program = ""
    for block in blocks(page):
        if (block.value("not run") or block.value("command")) is not None or (
            block.value("needs") == "ptxas" and not found("ptxas")
        ):
            continue
        if (name := block.value("file")) is not None:
            (tmp_path / name).write_text(block.text)
        elif block.language == "python":
            program += block.text
        else:
            for words in commands(block):
                done = run(words, tmp_path)
                expected = int(block.value("exit") or 0)
                assert done.returncode == expected, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    if program:
        (tmp_path / "page.py").write_text(program)
        done = run(["cute-nvfp4", "sim", "--quiet", "--arch", "sm_90a", "page.py"], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", DOORS)
def test_a_door_has_ten_recipes(page: str) -> None:
    """Each recipe has a number and code."""
    recipes = re.split(r"^## (\d+)\. ", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    assert [int(number) for number in recipes[1::2]] == list(range(1, 11))
    assert all(BLOCK.search(text.partition("\n## ")[0]) for text in recipes[2::2])


NAMED = re.compile(r"^\*File `(.+)`:\*\n\n<!-- file: (.+) -->\n```", re.MULTILINE)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_file_is_named_where_a_reader_sees_it(page: Path) -> None:
    """A mark is a comment, which no reader of the site or of GitHub sees."""
    text = page.read_text()
    assert NAMED.findall(text) == [(name, name) for name in re.findall(r"^<!-- file: (.+) -->$", text, re.MULTILINE)]


def classes_in_code() -> set[str]:
    """Every class that a check of the simulator can name, warnings included."""
    source = "\n".join(path.read_text() for path in (ROOT / "cute_nvfp4" / "sim" / "checks").glob("*.py"))
    warned = re.findall(r"""warn\(\s*"([a-z-]+)\"""", source)
    return {*CLASSES, *RULES, *STRICT, *warned}


def test_every_class_of_hazard_has_an_entry() -> None:
    """An entry says what the class means, the usual mend, and what goes on past it."""
    text = (HOW_TO / "read_a_hazard.md").read_text()
    entries = dict(re.findall(r"^### `([a-z-]+)`\n(.*?)(?=^##)", text, flags=re.DOTALL | re.MULTILINE))
    assert set(entries) == classes_in_code() and "lane-signal" in entries
    for name, entry in entries.items():
        assert all(part in entry for part in ("**Means.**", "**Mend.**", "**Go on.**")), name
        assert (f"`--allow {name}`" in entry) == (name in CLASSES), name


def test_a_class_without_an_entry_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    monkeypatch.setitem(CLASSES, "new-class", CLASSES["race"])
    with pytest.raises(AssertionError):
        test_every_class_of_hazard_has_an_entry()

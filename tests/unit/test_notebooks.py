"""The notebooks run, and what they print is what is stored in them."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from support import forked

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks" / "course"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks"))

import execute
from judge import NOT_YET, SOLVED

from cute_nvfp4.sim.clock.tools import found

SHORTER = {"10_accuracy_lab": ("STEPS = 360", "STEPS = 20")}
"""Where a cell takes long whose output is not compared: the line, and what is executed in its place."""


def shortened(path: Path) -> nbformat.NotebookNode:
    """A notebook as it is executed here."""
    notebook, (line, shorter) = nbformat.read(path, as_version=4), SHORTER.get(path.stem, ("", ""))
    cells = [cell for cell in notebook.cells if line and cell.source.count(line)]
    assert len(cells) == bool(line) and all(execute.VARIES in cell.metadata.tags for cell in cells)
    for cell in cells:
        cell.source = cell.source.replace(line, shorter)
    return notebook


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", execute.notebooks(), ids=lambda path: path.stem)
def test_stored_outputs_are_those_of_now(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first in kernels that are forked, which is quicker than to start them."""
    if path != execute.notebooks()[0]:
        monkeypatch.setattr(local_provisioner, "launch_kernel", forked.KernelProcess)
    times = path.stem == "07_time" or path.parent.name == "course"
    if times and not (found("ptxas") and found("nvdisasm")):
        pytest.skip("ptxas and nvdisasm: pip install cute_nvfp4[clock]")
    stored = nbformat.read(path, as_version=4)
    assert any(cell.get("outputs") for cell in stored.cells), f"python notebooks/execute.py notebooks/{path.name}"
    differs = execute.difference(stored, execute.executed(path, shortened(path)))
    assert not differs, f"to store new outputs: python notebooks/execute.py notebooks/{path.name}\n{differs}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTER)
def test_what_is_shortened_runs_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_provisioner, "launch_kernel", forked.KernelProcess)
    (path,) = (path for path in execute.notebooks() if path.stem == name)
    assert not execute.difference(nbformat.read(path, as_version=4), execute.executed(path))


_SVG = re.compile(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)")
_FILE = re.compile(r"/(?:home|root|tmp|work|Users)/[\w./-]+\.py\b")


def files_named(text: str) -> set[str]:
    """Python files with their folders that a stored notebook names, in its pictures too."""
    pictures = [base64.b64decode(code).decode() for code in _SVG.findall(text)]
    return {name for part in (text, *pictures) for name in _FILE.findall(part)}


DRAWING = re.compile(r"\b(plt|ax|axes|axis|fig|figure)\b[.,\[ ]|\bbars?\(|\.(imshow|plot|set|legend|annotate)\(")


def draws(source: str) -> bool:
    """Whether nearly a third of a cell's lines or more draw."""
    lines = [line for line in source.splitlines() if line.strip()]
    return bool(lines) and sum(bool(DRAWING.search(line)) for line in lines) >= 0.3 * len(lines)


def not_hidden(notebook: nbformat.NotebookNode) -> list[int]:
    """The numbers of cells that draw, or have a solution, and are not folded, in Jupyter and on the site."""
    found = []
    for number, cell in enumerate(notebook.cells):
        tags = cell.metadata.get("tags", [])
        folded = "hide-input" in tags and cell.metadata.get("jupyter", {}).get("source_hidden")
        if (
            cell.cell_type == "code"
            and (draws(cell.source) or "solution" in tags)
            and "exercise" not in tags
            and not folded
        ):
            found.append(number)
    return found


@pytest.mark.parametrize("path", execute.notebooks(), ids=lambda path: path.stem)
def test_a_notebook_says_what_it_teaches_and_folds_what_draws(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    first = notebook.cells[0].source
    assert "**You will learn**" in first and "**Time**: about " in first and "README.md#how-long-they-take" in first
    assert not not_hidden(notebook), "give the cell the tag hide-input, and jupyter.source_hidden"
    kernels = [cell for cell in notebook.cells if cell.source.startswith(("%%module", "%%cute"))]
    assert all(
        "hide-input" not in cell.metadata.get("tags", []) or "solution" in cell.metadata.tags for cell in kernels
    )


def test_a_cell_that_draws_is_seen() -> None:
    cell = nbformat.v4.new_code_cell("fig, ax = plt.subplots()\nax.plot(x)\nplt.show()")
    notebook = nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_code_cell("y = gemm(a, b)")])
    assert not_hidden(notebook) == [0]
    cell.metadata |= {"tags": ["hide-input"], "jupyter": {"source_hidden": True}}
    assert not not_hidden(notebook)


def test_stored_outputs_name_no_folder_of_a_machine() -> None:
    assert files_named("compute /tmp/cells-1/a.py:3") == {"/tmp/cells-1/a.py"}
    picture = base64.b64encode(b"<title>/home/me/b.py:7</title>").decode()
    assert files_named(f"data:image/svg+xml;base64,{picture}") == {"/home/me/b.py"}
    found = {path.name: files_named(path.read_text()) for path in execute.notebooks()}
    assert not {name: files for name, files in found.items() if files}


COURSE = [path for path in execute.notebooks() if path.parent.name == "course"]


def verdicts(path: Path) -> list[tuple[str, bool]]:
    """(tag of the cell that was judged, whether it was solved) in order: it judges itself, or is the last one before
    that has a tag."""
    out, tag = [], ""
    for cell in nbformat.read(path, as_version=4).cells:
        tag = next((t for t in cell.metadata.get("tags", []) if t in ("exercise", "solution")), tag)
        said = "".join(o.get("text", "") for o in cell.get("outputs", []))
        out += [(tag, line.startswith(SOLVED)) for line in said.splitlines() if line.startswith((SOLVED, NOT_YET))]
    return out


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_exercises_of_the_course_are_judged(path: Path) -> None:
    """Each exercise says that it is not solved yet, and its solution that it is."""
    found = verdicts(path)
    assert found and found == [("exercise", False), ("solution", True)] * (len(found) // 2)


MISTAKES = {
    "4_mbarriers": ("32 of 33 arrivals", "hazard: Race", "hazard: Deadlock"),
    "5_tma_ring": ("4 bytes still to come", "hazard: MissingProxyFence"),
    "3_shared_memory": ("passes are lost to bank conflicts", "hazard: Race"),
    "2_global_memory": ("4112 (4% useful)",),
    "7_gemm": ("hazard: Deadlock", "a wait for an mbarrier that tcgen05.commit arrives at", "1 of 2 arrivals missing"),
}
"""What beginners do wrong, by the words with which the course's notebooks tell it."""


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_beginners_are_shown_with_their_messages(name: str) -> None:
    (path,) = (path for path in COURSE if path.stem == name)
    said = re.sub(r"\s+", " ", " ".join(execute.text_of(nbformat.read(path, as_version=4))))
    for words in MISTAKES[name]:
        assert words in said


def notebook(text: str) -> nbformat.NotebookNode:
    output = nbformat.v4.new_output("stream", text=text)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])])


@pytest.mark.parametrize(
    "stored, now, same",
    [
        ("40 instructions", "41 instructions", False),
        ("18.31 dB", "18.32 dB", True),
        ("18.3 dB", "19.3 dB", False),
        ("error 1.2e-07", "error 3.4e-08", True),
        ("error 1.2e-02", "error 3.4e-02", False),
        ("a line", "another line", False),
        ("a line", "a line\nmore", False),
        ("ld.global (PTX line 177, a.py:3)", "ld.global (PTX line 171, a.py:3)", True),
        ("ld.global (PTX line\n    177, a.py:3)", "ld.global (PTX line\n    171, a.py:3)", True),
        ("ld.global (PTX line 177, a.py:3)", "ld.global (PTX line 177, a.py:4)", False),
        ("seconds on this machine: 1.20", "seconds on this machine: 9.87", True),
    ],
)
def test_what_is_compared(stored: str, now: str, same: bool) -> None:
    assert (execute.difference(notebook(stored), notebook(now)) == "") == same


def test_what_varies_is_not_compared() -> None:
    stored, now = notebook("loss 1.63"), notebook("loss 1.43")
    assert execute.difference(stored, now)
    for one in (stored, now):
        one.cells[0].metadata["tags"] = ["varies"]
    assert not execute.difference(stored, now)

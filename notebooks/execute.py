"""Executes notebooks and stores their outputs: ``python notebooks/execute.py [NOTEBOOK ...]`` (default: all).

``tests/unit/test_notebooks.py`` executes them too and compares what they print with what is stored. Pictures and
numbers that are times may differ from machine to machine, and are not compared.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
TIMES = re.compile(r"^\| (seconds|ms|µs) on this machine.*$", re.MULTILINE)


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs of now; raises if a cell does."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}, record_timing=False).execute()
    notebook.metadata.pop("language_info", None)
    return notebook


def text_of(notebook: nbformat.NotebookNode) -> str:
    """What the cells print, without pictures, times and the numbers of cells."""
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        shown = [f"# cell {number}"]
        for output in cell.outputs:
            text = output.get("text") or "".join(map(str, _texts(output.get("data", {}))))
            if not text.startswith("<Figure"):
                shown.append(text.rstrip("\n"))
        parts.append("\n".join(shown))
    return TIMES.sub("(times)", "\n".join(parts))


def _texts(data: dict) -> list[str]:
    return [data[kind] for kind in ("text/markdown", "text/plain") if kind in data][:1]


def difference(stored: nbformat.NotebookNode, now: nbformat.NotebookNode) -> str:
    """The lines in which two executions differ, or an empty string."""
    lines = (text_of(stored).splitlines(), text_of(now).splitlines())
    return "\n".join(difflib.unified_diff(*lines, "stored", "now", lineterm="", n=1))


if __name__ == "__main__":
    for path in [Path(name).resolve() for name in sys.argv[1:]] or notebooks():
        nbformat.write(executed(path), path)
        print(path.name)

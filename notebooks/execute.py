"""Executes notebooks and stores their outputs: ``python notebooks/execute.py [NOTEBOOK ...]`` (default: all).

``--times`` stores only how long each takes, in ``benchmarks/results/notebooks_cpu.json``, for a table of
notebooks/README.md.

``tests/unit/test_notebooks.py`` executes them too and compares their printed lines with the stored ones, except
pictures, times, and the output of cells with the tag "varies": these train a model, whose last bits depend on the
processor, and after some hundred steps all bits do.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import resource
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
TIMES, VARIES = "seconds on this machine", "varies"
ADDRESS = re.compile(r"0x[0-9a-f]{8,}")
PTX_LINE = re.compile(r"(PTX\s+line\s+)\d+")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb")) + sorted(FOLDER.glob("course/*.ipynb"))


def executed(path: Path, notebook: nbformat.NotebookNode | None = None) -> nbformat.NotebookNode:
    """The notebook with new outputs; raises if a cell does. notebook: the cells to execute instead of the file's."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small: threads of several notebooks would only wait
    notebook = notebook or nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, resources=folder, record_timing=False).execute()
    notebook.metadata.pop("language_info", None)
    return notebook


def text_of(notebook: nbformat.NotebookNode) -> list[str]:
    """The lines that the cells print, without pictures, times, addresses of memory and line numbers of PTX.

    Line numbers vary: traced by another interpreter, a kernel's PTX has comments of other lengths.
    """
    lines = []
    for number, cell in enumerate(notebook.cells):
        printed = ""
        for output in cell.get("outputs", []) if VARIES not in cell.metadata.get("tags", []) else ():
            data = output.get("data", {})
            text = output.get("text") or data.get("text/markdown", data.get("text/plain", "")) + "\n"
            # one print may be stored as several outputs
            if output.get("name") != "stderr" and not text.startswith("<Figure"):
                printed += text
        printed = PTX_LINE.sub(r"\1(number)", printed)
        lines += [f"# cell {number}", *filter(None, printed.splitlines())]
    return [ADDRESS.sub("(address)", line) for line in lines if not line.startswith(TIMES)]


def difference(stored: nbformat.NotebookNode, now: nbformat.NotebookNode) -> str:
    """The lines in which two executions differ, or an empty string.

    Whole numbers must be equal. Numbers with a decimal point may differ by 2 % or in the last digit; values below 10⁻⁴
    may have any value: they are rounding errors, which depend on the processor.
    """
    ours, theirs = text_of(stored), text_of(now)
    if len(ours) == len(theirs) and all(map(_same, ours, theirs)):
        return ""
    return "\n".join(difflib.unified_diff(ours, theirs, "stored", "now", lineterm="", n=1))


def _same(line: str, other: str) -> bool:
    numbers, others = NUMBER.findall(line), NUMBER.findall(other)
    return NUMBER.sub("#", line) == NUMBER.sub("#", other) and all(map(_near, numbers, others))


def _near(number: str, other: str) -> bool:
    if number == other:
        return True
    x, y = float(number), float(other)
    last_digit = 10.0 ** -len(number.partition(".")[2]) if "e" not in number else 0.0
    return abs(x - y) <= max(0.02 * abs(x), 1.01 * last_digit) or max(abs(x), abs(y)) < 1e-4


def store_times(paths: list[Path]) -> None:
    """Executes notebooks, and writes the seconds of each into the record, which keeps those of other notebooks."""
    sys.path.insert(0, str(FOLDER.parent / "benchmarks"))
    from common import RESULTS, host, write

    file = RESULTS / "notebooks_cpu.json"
    record = {"seconds": json.loads(file.read_text())["seconds"] if file.exists() else {}} | host()
    for path in paths:
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        executed(path)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        name = path.relative_to(FOLDER).as_posix()
        record["seconds"][name] = {"wall": time.perf_counter() - begin, "cpu": cpu}
        write(record, file)
        print(name, record["seconds"][name])


if __name__ == "__main__":
    given = [Path(name).resolve() for name in sys.argv[1:] if name != "--times"] or notebooks()
    if "--times" in sys.argv:
        store_times(given)
    else:
        for path in given:
            nbformat.write(executed(path), path)
            print(path.name)

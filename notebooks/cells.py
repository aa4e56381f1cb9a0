"""``%%module NAME`` makes a notebook's cell part of a module, because the DSL compiles only functions in files.

The cell is appended to ``NAME.py`` in a temporary folder and runs as part of that module; other cells import from it.
The code that a reader sees is the code that runs. Tests and benchmarks get the same module with :func:`module`.
"""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
import types
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp(prefix="notebook-cells-"))
"""The folder of the modules; messages name their lines."""
MAGIC = "%%module"
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def add(name: str, text: str) -> types.ModuleType:
    """Appends ``text`` to module ``name``, which it makes if necessary, and runs the text there."""
    path = FOLDER / f"{name}.py"
    if not path.exists():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__file__ = str(path)
        path.write_text("")
    written = path.read_text()
    path.write_text(f"{written}{text}\n")
    # blank lines give the code the line numbers of the file
    exec(compile("\n" * written.count("\n") + text, str(path), "exec"), vars(sys.modules[name]))
    return sys.modules[name]


def module(notebook: str, name: str) -> types.ModuleType:
    """Module ``name`` of a notebook beside this file; no other cell of the notebook runs."""
    if not (FOLDER / f"{name}.py").exists():
        for cell in json.loads((Path(__file__).parent / notebook).read_text())["cells"]:
            first, _, text = "".join(cell["source"]).partition("\n")
            if first.split() == [MAGIC, name]:
                add(name, text)
    return sys.modules[name]


def load_ipython_extension(shell) -> None:
    """Registers ``%%module`` for ``%load_ext cells``."""

    def run(line: str, cell: str) -> None:
        add(line.strip(), cell)

    shell.register_magic_function(run, "cell", MAGIC.lstrip("%"))

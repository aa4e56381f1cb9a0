"""``%%module NAME``: a cell of a notebook that is part of a module, since the DSL compiles only what lives in files.

The cell is appended to ``NAME.py`` in a temporary folder and run as part of that module, from which other cells import.
What a reader sees is what runs. Tests and benchmarks get the same module with :func:`module`.
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
"""Where the modules are: their lines are those that messages name."""
MAGIC = "%%module"
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def add(name: str, text: str) -> types.ModuleType:
    """Appends ``text`` to module ``name``, which is made if there is none, and runs it there."""
    path = FOLDER / f"{name}.py"
    if not path.exists():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__file__ = str(path)
        path.write_text("")
    written = path.read_text()
    path.write_text(f"{written}{text}\n")
    # the same line numbers in the code as in the file
    exec(compile("\n" * written.count("\n") + text, str(path), "exec"), vars(sys.modules[name]))
    return sys.modules[name]


def module(notebook: str, name: str) -> types.ModuleType:
    """Module ``name`` of a notebook beside this file, without executing the rest of the notebook."""
    if not (FOLDER / f"{name}.py").exists():
        for cell in json.loads((Path(__file__).parent / notebook).read_text())["cells"]:
            first, _, text = "".join(cell["source"]).partition("\n")
            if first.split() == [MAGIC, name]:
                add(name, text)
    return sys.modules[name]


def load_ipython_extension(shell) -> None:
    """``%load_ext cells`` makes ``%%module`` known."""

    def run(line: str, cell: str) -> None:
        add(line.strip(), cell)

    shell.register_magic_function(run, "cell", MAGIC.lstrip("%"))

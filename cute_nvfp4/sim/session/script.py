"""Runs a Python file as ``python FILE ARGS…`` would."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path


def run_script(path: str, arguments: Sequence[str]) -> int:
    """Executes the file as ``__main__`` with its folder first on ``sys.path``; returns its exit status.

    Exceptions of the program propagate, except ``SystemExit``. ``sys.argv``, ``sys.path`` and ``__main__`` are restored
    afterwards. Raises ``OSError`` if the file cannot be read, and ``SyntaxError`` if it cannot be compiled.
    """
    source = Path(path).read_bytes()
    code = compile(source, path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __spec__=None, __loader__=None)
    if sys.version_info < (3, 14):  # later modules make their annotations on demand
        main.__dict__.update(__annotations__={})
    before = sys.modules.get("__main__"), sys.argv, list(sys.path)
    sys.modules["__main__"] = main
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    try:
        exec(code, main.__dict__)
        return 0
    except SystemExit as end:
        return exit_status(end)
    finally:
        sys.stdout.flush()
        if before[0] is not None:
            sys.modules["__main__"] = before[0]
        sys.argv, sys.path[:] = before[1], before[2]


def exit_status(end: SystemExit) -> int:
    """Returns the exit status that Python gives a process for ``SystemExit``; prints a message if ``end`` has one."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1

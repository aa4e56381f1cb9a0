"""What a case depends on: files of the package whose functions it executes, and constants that these files import.

A fingerprint covers code: it leaves out comments, docstrings and blank lines, and is the same on every version of
Python. Of a file that cases execute, all code counts. Of a file that these import, directly or not, but of which no
function runs, only statements outside functions count (constants, tables, fields of records). What such a file computes
on import with its own functions is not followed.

Rooms declare which files are executed; ``Executed`` checks that a case keeps to them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "cute_nvfp4"
SIMULATOR = (
    "sim", "sim/checks", "sim/equivalence", "sim/frontend", "sim/host", "sim/isa", "sim/machine", "sim/numerics",
    "sim/tcgen05", "sim/tma", "sim/wgmma",
)  # fmt: skip
"""Rooms of the simulator that decide how a case ends: those that execute PTX, and those that check it."""
HEARS = "sim/observe"
"""The room that observes execution, and counts and shows it: a case runs in it too, but its outcome does not depend on
it. The clock, the profile and the runner of other people's programs take no part at all."""
CHECKED = ("sim/observe/overlap.py", "sim/observe/touched.py")
"""Files of that room that a check uses: which launches may run at the same time, and what they touch."""
SHARED = ("", "ops", "ops/prepared_weight", "planning", "ptx", "quantization", "runtime", "kernels")
"""Rooms that every call goes through. "" is the package's own folder."""
LEFT_OUT = (
    "__init__.py", "__main__.py", "ops/__init__.py", "ops/export.py", "ops/gradients.py", "ops/library.py",
    "ops/operator.py", "ops/quantized_operators.py", "runtime/session.py",
)  # fmt: skip
"""Files of those rooms that no case executes: operators of torch, their tables, export, sessions."""
PACKED = ("gemm", "gemm/packed", "gemm/sm90", "gemm/sm100", "gemm/sm120", "pack", "quantize", "dequantize")
"""Rooms of the kernels of prepared weights, of the preparation of their operands, and of block-scaled operands."""
ASKED = "sim/session/session.py"
"""Says that no session is active. Only a process that has imported sessions calls it, and it changes no case."""
_ARCHITECTURE = {"gemm/sm100": "sm_100a", "gemm/sm120": "sm_120a"}
"""Rooms of kernels that only one architecture executes."""


@cache
def simulator() -> str:
    """A fingerprint of the part of the simulator that decides how a case ends."""
    return _digest({name: _code(name) for name in decides()})


@cache
def sources(rooms: tuple[str, ...], arch: str) -> str:
    """A fingerprint of everything else that cases depend on if they execute kernels of ``rooms`` (below ``kernels``; or
    a file) on ``arch``."""
    files = executed(rooms, arch)
    return _digest({name: _code(name) if name in files else _constants(name) for name in _with_imports(files)})


def decides() -> frozenset[str]:
    """Files of the simulator that decide how a case ends. The file of its public names does not."""
    return (_in_rooms(SIMULATOR) | {*CHECKED}) - {"sim/__init__.py"}


def executed(rooms: Iterable[str], arch: str) -> frozenset[str]:
    """Files outside the simulator that cases may execute, relative to the package."""
    own = [room for room in rooms if _ARCHITECTURE.get(room, arch) == arch]
    files = [room for room in own if room.endswith(".py")]
    kernels = [f"kernels/{room}" for room in own if room not in files]
    return (_in_rooms((*SHARED, *kernels)) - {*LEFT_OUT}) | {*files}


def undeclared(seen: Iterable[str], rooms: Iterable[str], arch: str) -> list[str]:
    """The files of ``seen`` within the package that no fingerprint of the case covers."""
    return sorted({*seen} - _in_rooms((*SIMULATOR, HEARS)) - executed(rooms, arch) - {ASKED})


@cache
def _in_rooms(rooms: tuple[str, ...]) -> frozenset[str]:
    """Files of folders. A folder below is a room of its own, except below the quantization's kernels."""
    found = {path for room in rooms for path in (PACKAGE / room).glob("*.py")}
    found |= {path for room in rooms if room == "kernels/quantize" for path in (PACKAGE / room).rglob("*.py")}
    return frozenset(path.relative_to(PACKAGE).as_posix() for path in found)


# --- fingerprints


def _digest(texts: dict[str, str]) -> str:
    found = hashlib.sha256()
    for name, text in sorted(texts.items()):
        found.update(f"{name}\n{text}\n".encode() if text else b"")
    return found.hexdigest()[:12]


def _with_imports(files: Iterable[str]) -> set[str]:
    """The files, and the files that they import outside the simulator, directly or not."""
    files = {*files}
    read, more = {*files}, [*files]
    while more:
        name = more.pop()
        new = {file for file in _imports(name, name in files) if not file.startswith("sim/")} - read
        read |= new
        more += new
    return read


@cache
def _parsed(name: str) -> tuple[list[str], ast.Module]:
    text = (PACKAGE / name).read_text()
    return text.splitlines(), ast.parse(text)


@cache
def _code(name: str) -> str:
    """A file's text without docstrings, comment lines, and blank lines."""
    lines, tree = _parsed(name)
    return _text(lines, tree, range(1, len(lines) + 1))


def _constants(name: str) -> str:
    """A file's text outside functions, without imports."""
    lines, tree = _parsed(name)
    return _text(lines, tree, [at for node in _loaded(tree) for at in range(node.lineno, (node.end_lineno or 0) + 1)])


def _loaded(node: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """Yields the statements of a module or class that run when it is loaded."""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _loaded(child)
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)):
            yield child


def _text(lines: list[str], tree: ast.Module, wanted: Iterable[int]) -> str:
    """The lines ``wanted`` (from 1), without docstrings, comments and blank lines."""
    docstrings, strings = set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            # lines of a string that look like comments are none
            strings.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    kept = [(at, lines[at - 1].rstrip()) for at in wanted if at not in docstrings]
    return "\n".join(line for at, line in kept if at in strings or (line and not line.lstrip().startswith("#")))


@cache
def _imports(name: str, inside: bool) -> set[str]:
    """Files of the package that a file imports on load, or with ``inside`` also in its functions."""
    found, base, tree = set(), name.split("/")[:-1], _parsed(name)[1]
    for node in ast.walk(tree) if inside else tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            parts = [*base[: len(base) + 1 - node.level], *(node.module or "").split(".")]
        elif node.module and node.module.split(".")[0] == PACKAGE.name:
            parts = node.module.split(".")[1:]
        else:
            continue
        parts = [part for part in parts if part]
        for path in ["/".join(parts), *("/".join([*parts, alias.name]) for alias in node.names)]:
            found |= {file for file in (f"{path}.py", f"{path}/__init__.py") if (PACKAGE / file).is_file()}
    return found - {"__init__.py"}


# --- what is executed

_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


class Executed:
    """Records the package's files of which a function runs: ``with Executed() as seen``. It records from Python 3.12
    on, where a function that it has seen costs nothing more; on earlier versions only with ``slowly``."""

    def __init__(self, slowly: bool = False) -> None:
        self._files: set[str] = set()
        self._slowly, self._known = slowly, set[CodeType]()

    def __enter__(self) -> set[str]:
        if sys.version_info >= (3, 12):
            watch: Any = sys.monitoring
            watch.use_tool_id(watch.PROFILER_ID, "tests.long")
            watch.register_callback(watch.PROFILER_ID, watch.events.PY_START, self._started)
            watch.set_events(watch.PROFILER_ID, watch.events.PY_START)
            watch.restart_events()
        elif self._slowly:
            sys.setprofile(self._called)
        return self._files

    def __exit__(self, *_: object) -> None:
        if sys.version_info >= (3, 12):
            watch: Any = sys.monitoring
            watch.set_events(watch.PROFILER_ID, 0)
            watch.register_callback(watch.PROFILER_ID, watch.events.PY_START, None)
            watch.free_tool_id(watch.PROFILER_ID)
        elif self._slowly:
            sys.setprofile(None)

    def _started(self, code: CodeType, offset: int) -> Any:
        self._add(code)
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]

    def _called(self, frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code not in self._known:
            self._known.add(frame.f_code)
            self._add(frame.f_code)

    def _add(self, code: CodeType) -> None:
        path = Path(code.co_filename)
        # bodies of modules and classes, and their comprehensions, run on load
        function = code.co_flags & inspect.CO_NEWLOCALS and code.co_name not in _COMPREHENSIONS
        if function and PACKAGE in path.parents:
            self._files.add(path.relative_to(PACKAGE).as_posix())

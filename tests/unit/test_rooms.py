"""The rooms of the package: nothing imports upward, nothing in circles, and nothing grows beyond a screen or two."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterable
from functools import cache

import pytest
from support.import_graph import NAME, Import, imports, package

NOUNS = (
    "formats",
    "tensors",
    "scale_layout",
    "weight_layout",
    "weight_layout_fp8",
    "weight_packing",
    "weight_shards",
    "row_scaled",
    "prepared_weight",
    "grouped_rows",
    "operand",
    "reference",
    "dsl_version",
    "errors",
    "target",
    "lazy",
    "pytree",
)
RUNTIME = ("runtime", *NOUNS)
KERNELS = ("kernels", "ptx", *RUNTIME)
PLANNING = ("planning", "quantization", *KERNELS)
OPS = ("ops", *PLANNING)
NN = ("nn", *OPS)
HARNESS = ("harness", "sim", *NN)
DISPLAY = ("display", "sim", *PLANNING)
MAY_IMPORT = {
    # room: the rooms it may import
    **dict.fromkeys(NOUNS, NOUNS),
    "errors": ("errors",),
    "quantization": ("quantization", *NOUNS),
    "ptx": ("ptx", *NOUNS),
    "runtime": RUNTIME,
    "kernels": KERNELS,
    "planning": PLANNING,
    "ops": OPS,
    "nn": NN,
    "integrations": ("integrations", *NN),
    "harness": HARNESS,
    "cli": ("cli", "integrations", *HARNESS),
    "display": DISPLAY,
    "sim": ("sim", "dsl_version", "errors"),
    "__main__": ("cli",),
    "__init__": ("display", *HARNESS),
}
"""Downwards: cli → harness, integrations → nn → ops → planning → kernels → ptx → nouns; runtime is below kernels."""
LAZILY = {"runtime": ("sim",)}
"""What a room may import besides, but not while the package is loaded: where it is asked for."""
ASKED_FOR = (f"{NAME}.runtime.session",)
"""Modules that are loaded only where they are asked for, and so may load what their room imports lazily."""
MAX_LINES, MAX_FUNCTION = 400, 100


def room(module: str) -> str:
    """The folder or file just below the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@cache
def all_imports() -> tuple[Import, ...]:
    files = package().items()
    return tuple(x for m, path in files for x in imports(m, path.read_text(), path.name == "__init__.py", package()))


def upward(some: Iterable[Import]) -> list[str]:
    """Imports of a room that is not below, annotations excepted."""
    found = []
    for x in some:
        source, target = room(x.source), room(x.target)
        lazy = x.when == "call" or x.source in ASKED_FOR
        allowed = MAY_IMPORT[source] + (LAZILY.get(source, ()) if lazy else ())
        if x.when != "types" and target not in allowed and target != "__init__":
            found.append(str(x))
    return found


def circles(some: Iterable[Import]) -> list[list[str]]:
    """Modules that import one another, while they are loaded or in a function; annotations excepted."""
    edges: dict[str, set[str]] = {}
    for x in some:
        # what a package's file imports from below it is loaded before anything can ask for the rest
        if x.when != "types" and x.target != x.source:
            edges.setdefault(x.source, set()).add(x.target)
    found, done, path = [], set(), []

    def walk(module: str) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            path.append(module)
            for target in sorted(edges.get(module, ())):
                walk(target)
            path.pop()
            done.add(module)

    for module in sorted(edges):
        walk(module)
    return found


def long_functions(text: str) -> list[str]:
    """Functions of more than ``MAX_FUNCTION`` lines."""
    functions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef))]
    sizes = {x.name: x.end_lineno - x.lineno + 1 for x in functions}
    return [f"{name}: {size} lines" for name, size in sizes.items() if size > MAX_FUNCTION]


DIVIDED = ("kernels", "sim", "harness")
"""Rooms that are rooms of rooms: a name says what it means in one of those."""
SHARED: dict[tuple[str, str], str] = {
    ("sim.machine", "Group"): "the protocol that instructions see, and the class that keeps it",
    ("sim.machine", "Wave"): "the protocol that instructions see, and the class that keeps it",
    ("sim.session", "Session"): "the protocol that torch's side sees, and the class that keeps it",
}
"""Names of two classes in one room, and why."""


def shared_names(sources: Iterable[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Names that classes of one room share: by room and name the modules. sources: modules, and their texts."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, text in sources:
        parts = module.split(".")[1:]
        # a file that lies in a room of rooms is at home in that one
        home = ".".join(parts[: 2 if parts[0] in DIVIDED and len(parts) > 2 else 1])
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found.setdefault((home, node.name), []).append(module)
    return {key: modules for key, modules in found.items() if len(modules) > 1}


def test_class_names_are_unique_in_a_room() -> None:
    found = shared_names((module, path.read_text()) for module, path in package().items() if module != NAME)
    assert found.keys() == SHARED.keys(), {key: found[key] for key in found if key not in SHARED}


def test_a_shared_class_name_is_noticed() -> None:
    one, other = "class Result: ...", "def f():\n    class Result: ..."
    in_one_room = [(f"{NAME}.kernels.gemm.epilogue", one), (f"{NAME}.kernels.gemm.sm90.arguments", other)]
    assert list(shared_names(in_one_room)) == [("kernels.gemm", "Result")]
    assert not shared_names([in_one_room[0], (f"{NAME}.kernels.gemv.kernel", other)])


def test_every_room_is_known() -> None:
    assert {room(module) for module in package()} == set(MAY_IMPORT)


def test_what_is_asked_for_is_not_loaded_before() -> None:
    assert [str(x) for x in all_imports() if x.target in ASKED_FOR and x.when != "call"] == []


OPEN: dict[str, str] = {}
"""Rooms from which something still goes upward, and what."""


def _rooms(open_: dict[str, str]) -> list:
    marks = {x: pytest.mark.xfail(strict=True, reason=reason) for x, reason in open_.items()}
    return [pytest.param(x, marks=marks.get(x, ())) for x in MAY_IMPORT]


@pytest.mark.parametrize("name", _rooms(OPEN))
def test_nothing_is_imported_upward(name: str) -> None:
    assert upward(x for x in all_imports() if room(x.source) == name) == []


def test_no_circles() -> None:
    assert circles(all_imports()) == []


def test_the_simulator_knows_nothing_of_nvfp4() -> None:
    for module, path in package().items():
        if room(module) == "sim":
            text = re.sub("cute.nvfp4|mxf4nvf4", "", path.read_text().lower())
            assert "nvfp4" not in text, module


LONG: dict[str, str] = {}


@pytest.mark.parametrize("folder", _rooms(LONG))
def test_files_and_functions_are_short(folder: str) -> None:
    for module, path in package().items():
        if room(module) == folder:
            text = path.read_text()
            assert len(text.splitlines()) <= MAX_LINES, module
            assert long_functions(text) == [], module


def one(module: str, text: str) -> list[Import]:
    return imports(f"{NAME}.{module}", text, False, package())


@pytest.mark.parametrize(
    "module,text,noticed",
    [
        ("kernels.gemv.kernel", "from ...ops import gemv", True),
        ("kernels.gemv.kernel", "from ...runtime.signature import INT32", False),
        ("sim.machine.wave", "from cute_nvfp4 import formats", True),
        ("sim.machine.wave", "import cute_nvfp4.errors", False),
        ("runtime.launch", "from ..sim import run", True),
        ("runtime.launch", "def f():\n    from ..sim import run", False),
        ("quantization.blocks", "def f():\n    from ..ops import quantize", True),
        ("quantization.blocks", "if TYPE_CHECKING:\n    from ..ops import quantize", False),
        ("quantization.blocks", "if TYPE_CHECKING:\n    pass\nelse:\n    from ..ops import quantize", True),
    ],
)
def test_an_arrow_upward_is_noticed(module: str, text: str, noticed: bool) -> None:
    assert one(module, text) and bool(upward(one(module, text))) == noticed


def test_a_circle_is_noticed() -> None:
    there, back = one("formats", "from . import errors"), one("errors", "from .formats import NVFP4")
    assert circles([*there, *back]) == [[f"{NAME}.errors", f"{NAME}.formats", f"{NAME}.errors"]]
    lazily = one("errors", "def f():\n    from .formats import NVFP4")
    assert circles([*there, *lazily]) == circles([*there, *back])
    typed = one("errors", "if TYPE_CHECKING:\n    from .formats import NVFP4")
    assert not circles([*there, *typed])


def test_a_long_function_is_noticed() -> None:
    assert long_functions("def f():\n" + "    x = 1\n" * MAX_FUNCTION) == [f"f: {MAX_FUNCTION + 1} lines"]


@pytest.mark.parametrize("name", ["", ".nn", ".display", ".quantization"])
def test_no_public_name_is_that_of_a_module_beside_it(name: str) -> None:
    """Importing such a module would put it in the place of the name."""
    room = importlib.import_module(f"cute_nvfp4{name}")
    beside = {module.name for module in pkgutil.iter_modules(room.__path__)}
    assert beside and not beside & set(room.__all__)

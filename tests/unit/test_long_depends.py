"""What a case of ``tests.long`` depends on: cases that execute more than they declare, and fingerprints of code."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.long import depends
from tests.long.families import FAMILIES
from tests.long.worker import Task, perform


def test_a_case_that_executes_what_no_fingerprint_has_fails(monkeypatch) -> None:
    monkeypatch.setattr(depends, "SHARED", tuple(room for room in depends.SHARED if room != "runtime"))
    ended = perform(Task("dequantize", '{"format":"mxfp4","rows":3,"k":64}', "sm_90a", 1), slowly=True)
    assert ended.outcome == "failed" and re.search("Undeclared: .*runtime/launch.py", ended.error)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_cases_execute_what_is_declared(name: str) -> None:
    family = FAMILIES[name]
    for arch in family.archs:
        if family.draw is not None:
            text = family.text(family.draw(np.random.default_rng(7), arch))
        else:
            text = perform(Task(name, "", arch, 1, part=family.parts(arch)[0])).cases[0][0]
        assert perform(Task(name, text, arch, min(family.schedules, 3)), slowly=True).outcome == "passed"


FILES = {
    "formats.py": "A = 1\n",
    "cli/main.py": "from ..formats import A\n",
    "sim/runner.py": "from .observe.counters import COUNTED\n",
    "sim/__init__.py": "from .runner import run\n",
    "sim/isa/move.py": "def move():\n    return 1\n",
    "sim/checks/scopes.py": "SCOPES = 1\n",
    "sim/observe/counters.py": "COUNTED = 1\n",
    "sim/observe/overlap.py": "MOST = 4\n",
    "sim/observe/touched.py": "",
    "sim/clock/machine.py": "CLOCKS = 1\n",
    "sim/profile/page.py": "WIDTH = 1\n",
    "sim/session/dsl.py": "VERSION = 1\n",
    "kernels/quantize/kernel.py": """from ...formats import A
from ..moe.rows import ROWS
def f():
    from ..gemv.dot import DOT
    # a comment
    return "x"
""",
    "kernels/moe/rows.py": "ROWS = 3\n\n\ndef g():\n    return 1\n",
    "kernels/gemv/dot.py": "DOT = 3\n",
    "kernels/gemm/far.py": "FAR = 3\n",
}


@pytest.mark.parametrize(
    "file, old, new, counts",
    [
        ("kernels/quantize/kernel.py", "# a comment", "# another", False),
        ("kernels/quantize/kernel.py", "def f():", "def f():\n    'What it does.'\n", False),
        ("kernels/quantize/kernel.py", '"x"', '"y"', True),
        ("kernels/quantize/kernel.py", '"x"', '"""x\n# no comment"""', True),
        ("kernels/moe/rows.py", "return 1", "return 2", False),
        ("kernels/moe/rows.py", "ROWS = 3", "ROWS = 4", True),
        ("kernels/gemv/dot.py", "DOT = 3", "DOT = 4", True),
        ("kernels/gemm/far.py", "FAR = 3", "FAR = 4", False),
        ("formats.py", "A = 1", "A = 1\ndef h(): pass", True),
        ("cli/main.py", "import A", "import A as B", False),
        ("sim/runner.py", "", "x = 1\n", False),
    ],
)
def test_a_fingerprint_is_of_the_code_that_a_case_depends_on(tmp_path, monkeypatch, file, old, new, counts) -> None:
    found = _before_and_after(tmp_path, monkeypatch, file, old, new)
    assert (found[0][1] != found[1][1]) == counts


@pytest.mark.parametrize(
    "file, old, new, counts",
    [
        ("sim/isa/move.py", "return 1", "return 2", True),
        ("sim/isa/move.py", "def move():", "# moves\ndef move():", False),
        ("sim/checks/scopes.py", "= 1", "= 2", True),
        ("sim/runner.py", "", "LIMIT = 1\n", True),
        ("sim/observe/overlap.py", "= 4", "= 5", True),
        ("sim/observe/counters.py", "= 1", "= 2", False),
        ("sim/__init__.py", "", "from .observe.counters import COUNTED\n", False),
        ("sim/clock/machine.py", "= 1", "= 2", False),
        ("sim/profile/page.py", "= 1", "= 2", False),
        ("sim/session/dsl.py", "= 1", "= 2", False),
        ("kernels/quantize/kernel.py", '"x"', '"y"', False),
    ],
)
def test_the_simulators_fingerprint_is_of_what_decides_how_a_case_ends(
    tmp_path, monkeypatch, file, old, new, counts
) -> None:
    found = _before_and_after(tmp_path, monkeypatch, file, old, new)
    assert (found[0][0] != found[1][0]) == counts


def test_what_decides_how_a_case_ends_asks_nothing_that_shows_it() -> None:
    """Every room of the simulator decides, or only hears and shows. What decides imports from the others only what the
    checks ask, but for the two files that put a launch together, and its result's class."""
    rooms = {path.parent.relative_to(depends.PACKAGE).as_posix() for path in depends.PACKAGE.glob("sim/**/*.py")}
    shows = rooms - {*depends.SIMULATOR}
    assert {room.split("/")[1] for room in shows} == {"clock", "observe", "profile", "session"}
    asked = {
        (name, file) for name in depends.decides() for file in depends._imports(name, True)
        if file.rsplit("/", 1)[0] in shows and file not in depends.CHECKED
    }  # fmt: skip
    assert {name for name, _ in asked} - {*depends.CHECKED} == {"sim/execution.py", "sim/runner.py"}
    assert {file for name, file in asked if name == "sim/execution.py"} == {"sim/observe/result.py"}


def _before_and_after(tmp_path, monkeypatch, file: str, old: str, new: str) -> list[tuple[str, str]]:
    """The fingerprints of the simulator and of all else, before a change and after it."""
    monkeypatch.setattr(depends, "PACKAGE", tmp_path / depends.PACKAGE.name)
    found = []
    for change in (False, True):
        for name, text in FILES.items():
            path = depends.PACKAGE / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new, 1) if change and name == file else text)
        for kept in (depends._parsed, depends._in_rooms, depends._imports, depends._code):
            kept.cache_clear()
        found.append((depends.simulator.__wrapped__(), depends.sources.__wrapped__(("quantize",), "sm_90a")))
    for kept in (depends._parsed, depends._in_rooms, depends._imports, depends._code):
        kept.cache_clear()
    return found

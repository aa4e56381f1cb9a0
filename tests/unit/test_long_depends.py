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
    "sim/runner.py": "",
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
        ("sim/runner.py", "", "x = 1", False),
    ],
)
def test_a_fingerprint_is_of_the_code_that_a_case_depends_on(tmp_path, monkeypatch, file, old, new, counts) -> None:
    monkeypatch.setattr(depends, "PACKAGE", tmp_path / depends.PACKAGE.name)
    found = []
    for change in (False, True):
        for name, text in FILES.items():
            path = depends.PACKAGE / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new, 1) if change and name == file else text)
        for kept in (depends._parsed, depends._in_rooms, depends._imports, depends._code):
            kept.cache_clear()
        found.append(depends.sources.__wrapped__(("quantize",), "sm_90a"))
    for kept in (depends._parsed, depends._in_rooms, depends._imports, depends._code):
        kept.cache_clear()
    assert (found[0] != found[1]) == counts

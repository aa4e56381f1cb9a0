"""The words of the package: the field's own, and docstrings that name their subject (DESIGN.md, "Words")."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import cute_nvfp4

ROOT = Path(cute_nvfp4.__file__).parent
ROOMS = (
    "cli",
    "harness",
    "display",
    "kernels",
    "integrations",
    "nn",
    "ops",
    "planning",
    "ptx",
    "quantization",
    "runtime",
    "sim",
    "",
)
"""The folders that are checked, with all below them; "" stands for the package's own modules."""
NO_SUBJECT = re.compile(r"(?:Of|Those|That|The same|Its|Theirs|With|Without|For|From|As)\b")
"""A docstring that begins so says something of a thing and not which: "Of a tile." for the bytes of a tile."""


@dataclass(frozen=True)
class Word:
    """A word that the field has another word for: ``pattern`` in lower case, ``instead``, and rooms where it is right.

    allowed: prefixes of paths where the word has the meaning it has in the field.
    """

    pattern: str
    instead: str
    allowed: tuple[str, ...] = ()

    def found(self, path: str, text: str) -> bool:
        """Whether ``text`` of the module ``path`` has the word where it should not; "_" separates words of a name."""
        if any(path.startswith(room) for room in self.allowed):
            return False
        return re.search(self.pattern, text.lower().replace("_", " ")) is not None


WORDS = (
    Word(r"\bpieces?\b", "epilogue tile, section"),
    Word(r"\bknock-?outs?\b", "ablation"),
    Word(r"\b(dealt|deals?)\b", "distributed"),
    Word(r"\bblocks? of threads\b", "CTA"),
    Word(r"\bnumbers? on the device\b", "device scalar"),
    Word(r"\b(not|is|are|last|was|were) looked at\b", "unused, read, checked"),
    Word(r"\bdoubtful\b", "undecided, tie"),
    Word(r"\bquick\b", "table"),
    Word(r"\bthat there (is|are)(?=[.,;:)]|$)", "a noun that says which"),
    # a unit of measure, in the last place, or of the hardware that is modelled
    Word(r"\bunits?\b", "work tile", allowed=("kernels/quantize/block", "planning/rates.py", "ptx/", "sim/")),
)


@dataclass(frozen=True)
class Text:
    """A name, a docstring or a comment of a module, and the line it stands in. explains: whether it is a string that
    stands alone: a docstring, or the explanation of a constant."""

    line: int
    text: str
    explains: bool = False


def texts(source: str) -> Iterator[Text]:
    """What a reader of ``source`` reads besides code: names that it gives, docstrings, comments."""
    tree = ast.parse(source)
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, definitions):
            yield Text(node.lineno, node.name)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(node.lineno, " ".join(node.value.value.split()), explains=True)
        elif isinstance(node, ast.arg):
            yield Text(node.lineno, node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Text(node.lineno, node.id)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string)


def faults(path: str, source: str) -> list[str]:
    """What is wrong with the words of the module ``path``, a line each."""
    found = []
    for one in texts(source):
        found += [
            f"{path}:{one.line}: {one.text[:80]!r}: instead of {word.pattern}: {word.instead}"
            for word in WORDS
            if word.found(path, one.text)
        ]
        if one.explains and NO_SUBJECT.match(one.text):
            found.append(f"{path}:{one.line}: {one.text[:80]!r}: a docstring names its subject first")
    return found


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room or "modules")
def test_words_of_a_room(room):
    modules = sorted((ROOT / room).rglob("*.py") if room else ROOT.glob("*.py"))
    assert modules, f"{room}: got no module, expected a folder of the package"
    found = [fault for path in modules for fault in faults(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('def width():\n    """Of a tile."""', "subject"),
        ('class A:\n    """Those that multiply."""', "subject"),
        ('def other():\n    """The same for a store."""', "subject"),
        ('WIDTH = 8\n"""Of a tile."""', "subject"),
        ('"""Writes a piece of the output."""', "epilogue tile"),
        ("def f(piece_columns): ...", "epilogue tile"),
        ("rows_dealt = 1", "distributed"),
        ("x = 1  # tiles are dealt in turn", "distributed"),
        ('"""A launch of 80 blocks of\nthreads."""', "CTA"),
        ('"""Numbers on the device scale the product."""', "device scalar"),
        ("# padding that is not looked at", "unused"),
        ("# ties are doubtful", "undecided"),
        ("def quick(): ...", "table"),
        ("# the scales that there are", "a noun"),
        ("# a knock-out of the loads", "ablation"),
        ('"""Multiplies a unit."""', "work tile"),
    ],
)
def test_a_fault_is_found(source, said):
    (fault,) = faults("kernels/gemm/example.py", source)
    assert said in fault


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("sim/clock/memory.py", '"""A load and store unit of an SM."""'),
        ("kernels/quantize/block/mx.py", "# half a unit in the last place"),
        ("nn/linear.py", '"""Whether a row exists."""'),
        ("nn/linear.py", "community = quickly = ideal = unity = 1"),
        ("nn/linear.py", "# checked, so that there is room"),
    ],
)
def test_what_is_right_is_left_alone(path, source):
    assert not faults(path, source)

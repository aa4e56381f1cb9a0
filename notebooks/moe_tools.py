"""Helpers of ``04_gated_and_grouped.ipynb``: they run, count and check SwiGLU layers, their gates, and a mixture of
experts.

References are computed here in torch, in float32 or float64, from formulas and not by the library.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cute_nvfp4 import (
    BlockScaledTensor,
    simulating,
)
from cute_nvfp4.runtime.simulating import SimulatedLaunch
from cute_nvfp4.sim import Result
from cute_nvfp4.target import ARCHITECTURES

SM_100A = ARCHITECTURES["sm_100a"]


@dataclass
class Launched:
    """All launches of a block, with their counters."""

    runs: list[SimulatedLaunch]

    @property
    def count(self) -> int:
        return len(self.runs)

    @property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs]

    @property
    def dram_read(self) -> int:
        """Bytes that the modelled L2, empty before each launch, fetched."""
        return sum(r.l2.read_bytes for r in self.results)

    @property
    def dram_written(self) -> int:
        return sum(r.l2.written_bytes + r.l2.dirty_bytes for r in self.results)

    @property
    def multiply_adds(self) -> int:
        return sum(x.multiply_adds for r in self.results for x in r.mma)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of the last launch's kernel."""
        return sum(map(len, self.runs[-1].launch.params))


@contextlib.contextmanager
def launched(**options: Any) -> Iterator[Launched]:
    """``simulating`` with counters, summed over launches."""
    with simulating(counters=True, **options) as runs:
        yield Launched(runs)


def bytes_of(*operands: BlockScaledTensor | torch.Tensor) -> int:
    """Bytes of data and of scales, including padding of scales."""
    tensors = [t for x in operands for t in ([x] if isinstance(x, torch.Tensor) else [x.data, x.scale])]
    return sum(t.numel() * t.element_size() for t in tensors)


def source(function: Any) -> str:
    """The code of a function or class without its docstring."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    if not inspect.isclass(function):
        # whether the source has the DSL's decorator depends on whether the function has been compiled
        text = re.sub(r"\A(@.*\n)+", "", text)
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None
        if documented:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [None] * (last - first + 1)
    return "\n".join(line for line in lines if line is not None)


def block(function: Any, first: str) -> str:
    """The statement of a function that starts with ``first``, with the lines indented under it."""
    lines = source(function).splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith(first))
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = next((i for i in range(start + 1, len(lines)) if not lines[i].startswith(" " * (indent + 1))), len(lines))
    return "\n".join(line[indent:] for line in lines[start:end])


def said(call: Callable[[], Any]) -> str:
    """The type and the words of the error that ``call`` must raise."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def relative(x: torch.Tensor, right: torch.Tensor) -> float:
    """The relative error: the root of Σ(x − right)² / Σ right², in float64."""
    x, right = x.double(), right.double()
    return float((x - right).norm() / right.norm())


def decibels(x: torch.Tensor, right: torch.Tensor) -> float:
    """The signal-to-noise ratio, in dB."""
    return -20 * math.log10(relative(x, right))

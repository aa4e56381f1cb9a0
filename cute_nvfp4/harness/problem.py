"""The harness's view of a problem, and the known problems."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from .errors import HarnessError
from .schema import Case
from .submission import directives

if TYPE_CHECKING:
    import numpy as np
    import torch

DataKind = Literal["public", "full"]
DATA_KINDS = ("public", "full")
MODES = ("test", "benchmark", "leaderboard", "profile")

_ALSO_CALLED = {"modal_nvfp4_dual_gemm": "nvfp4_dual_gemm"}
"""Problems' names here, by other public names, which leaderboards and submissions' first comments use."""
_FOLDER = Path(__file__).parent / "problems"


@dataclass(frozen=True)
class Buffer:
    """One contiguous tensor of a case: its storage shape and dtype, before the problem takes views.

    dtype: the name of a torch dtype that every device can copy; 4- and 8-bit floats are stored as ``uint8``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    output: bool = False


@dataclass(frozen=True)
class Expected:
    """The exact result of one output, and the size of its possible rounding errors. Both are float64.

    magnitude: for a sum of products, the sum of their absolute values; for a function of such sums, how far it moves,
    to first order, if they move by theirs; None if not requested.
    """

    value: np.ndarray
    magnitude: np.ndarray | None


class Problem(Protocol):
    """A problem: its data's layout and contents, the exact answer, and the work that counts as useful."""

    name: str
    folder: Path

    def validate(self, case: Case) -> None:
        """Raises ValueError for a case that the problem does not define."""

    def buffers(self, case: Case) -> Sequence[Buffer]:
        """The storage of a case's inputs and outputs."""

    def generate(self, case: Case, seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """The contents of the input buffers, drawn on the CPU, with the same bits whatever device runs the case."""

    def vary(self, contents: Mapping[str, torch.Tensor], seed: int, kind: DataKind) -> dict[str, torch.Tensor]:
        """Contents of the same kind as those that ``generate`` has drawn, cheaper than new ones."""

    def views(self, tensors: Mapping[str, torch.Tensor]) -> tuple:
        """The protocol's ``data`` tuple: views of the buffers, without copies."""

    def reference(self, case: Case, tensors: Mapping[str, torch.Tensor], *, magnitude: bool = True) -> list[Expected]:
        """The exact outputs, in float64, from input buffers on any device.

        magnitude: if False, the outputs' magnitudes may be None, which saves about half of the work.
        """

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype name of each tensor that ``custom_kernel`` must return."""

    def useful_bytes(self, case: Case) -> int:
        """Bytes that any implementation must move: every operand, scale and result once."""

    def flops(self, case: Case) -> int:
        """Floating-point operations, a multiply-add counted as two."""

    def peer(self, case: Case, device: torch.device) -> tuple[str, Callable[[], object]]:
        """A library call that does the same work in bf16, for comparison, and its name: (name, call)."""


def known_problems() -> list[str]:
    """The names of the problems that the harness can run."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/task.yml"))


def problem_name(name: str) -> str:
    """The name here of a problem that may be called by another public name."""
    return _ALSO_CALLED.get(name, name)


def get_problem(name: str) -> Problem:
    """The problem called ``name``, here or elsewhere.

    Raises:
        HarnessError: no such problem; the message lists the known ones.
    """
    known, asked = known_problems(), name
    name = problem_name(name)
    if name not in known:
        hint = f"; a problem's name comes before the file: {_with_name(asked)}" if asked.endswith(".py") else ""
        raise HarnessError(f"unknown problem {asked!r}; known problems: {', '.join(known)}{hint}")
    return importlib.import_module(f"cute_nvfp4.harness.problems.{name}.reference").PROBLEM


def _with_name(path: str) -> str:
    """The command that judges the submission ``path``, with the problem that its first comment names."""
    source = Path(path).read_text(errors="replace") if Path(path).is_file() else ""
    named = directives(source).get("leaderboard")
    return f"cute-nvfp4 eval {problem_name(named or 'PROBLEM')} {path}"


def mix_seed(seed: int, *others: int) -> int:
    """A new seed from several seeds, the same in all runs and on all machines; their order matters."""
    return random.Random(",".join(str(value) for value in (seed, *others))).getrandbits(48)

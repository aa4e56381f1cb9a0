"""Runs a submission to a folder's problem: the folder's process draws the data and judges the answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...target import DEFAULT_ARCH
from ..arena import Layout, span
from ..checker import Check
from ..errors import CallFailed, HarnessError
from ..process import Answer, Output
from ..runner import Runner
from ..schema import Case
from .described import DESCRIBED, STRUCTURE
from .examination import Examination
from .structure import rebuilt
from .task import FolderProblem

_SEEDS = 1 << 31
"""Seeds are below this: numpy's generators and many references take no larger ones."""


@dataclass(frozen=True)
class Staged:
    """The data of the current call, as the submission's process is told of it, and its place in the arena."""

    case: Case
    layout: Layout


class FolderRunner(Runner):
    """A ``Runner`` for a folder's problem: one call at a time, with any outputs that ``structure`` can carry.

    Data is drawn again for every call, with a seed that the submission does not learn. The submission may write to all
    of it, as in the public evaluator, which hands out clones; the folder's process keeps the data that it judges by.
    """

    def __init__(self, problem: FolderProblem, *arguments: Any, backend: str, arch: str | None, **options: Any) -> None:
        super().__init__(problem, *arguments, backend=backend, arch=arch, **options)
        self._load["problem"] = DESCRIBED.name
        self._examination = Examination(problem, "" if backend == "cuda" else arch or DEFAULT_ARCH)
        self._drawn_now: Staged | None = None

    def __exit__(self, *error: object) -> None:
        self._examination.close()
        super().__exit__(*error)

    def start(self) -> None:
        """Starts the folder's process as well. Raises as ``Runner.start`` does."""
        self._examination.start()
        super().start()

    # the case

    def _told(self, case: Case) -> Case:
        return self._drawn_now.case

    def _stage(self, case: Case, seed: int, calls: int) -> dict[int, Staged]:
        """Has the data of one call drawn, and hands it over."""
        if calls != 1:
            raise HarnessError(f"{calls} calls at once: a folder's problem has one")
        own = {"seed": seed % _SEEDS} if "seed" in case else {}
        sizes = self._examination.draw(case | own, self._patience)
        told = {"sizes": [list(size) for size in sizes]}
        layout = Layout.of(DESCRIBED, told)
        if layout.nbytes > self._arena.calls:
            raise HarnessError(f"the data of {case} has {layout.nbytes >> 30} GiB, more than a case may have")
        for number, first, content in self._examination.drawn(sizes):
            self._arena.write(layout.buffers[number].offset + first, content)
        self._drawn_now = Staged(told, layout)
        if self._home == "cuda":
            self._ask({"op": "stage", "case": told, "index": 0, "batch": 1}, "taking its inputs")
        return {0: self._drawn_now}

    @property
    def _patience(self) -> float:
        """Seconds that the folder's own code may take; without a GPU it works on the CPU."""
        return max(self.timeout, 60.0)

    def _parts(self, case: Case, staged: dict[int, Staged]) -> list[tuple[int, int, str, bool]]:
        """Every tensor of the data, which kernels may read and write."""
        return [
            (slot.offset, slot.nbytes, slot.buffer.name, True)
            for drawn in (staged.values() if self._simulated else ())
            for slot in drawn.layout.buffers
            if slot.nbytes and slot.buffer.name != STRUCTURE
        ]

    # the answer

    def _made(self, answer: Answer | None) -> list[tuple[int, int]]:
        outputs = [out for outputs in (answer.outputs if answer else []) for out in outputs]
        known = [out for out in outputs if out.at is not None and _kind(out.dtype) is not None]
        return [(out.at, span(out.shape, out.stride or (), _kind(out.dtype).itemsize)) for out in known if out.stride]

    def _judge(self, case: Case, staged: dict[int, Staged], answer: Answer) -> Check:
        """The folder's verdict on the value that the call returned."""
        described = answer.outputs
        if self._home == "cuda":
            request = {"op": "collect", "index": 0, "inputs": False}
            described = self._ask(request, "handing over its outputs").outputs
        if len(described) != 1 or len(answer.structures) != 1:
            raise self._refusal("the process sent an answer of the wrong form while running custom_kernel")
        (outputs,), (structure,) = described, answer.structures
        tensors = self._tensors(outputs)
        try:
            rebuilt(structure, tensors)
        except ValueError as error:
            raise self._refusal(f"the process described an output that is not one: {error}") from error
        host = [self._device == "cuda" and out.device == "cpu" for out in outputs]
        verdict = self._examination.check(structure, tensors, host, self._patience)
        message = verdict.message.strip() or ("" if verdict.passed else "the folder's check says no, and nothing else")
        errors = (verdict.errors.get(name, math.nan) for name in ("max_abs", "max_rel"))
        return Check(verdict.passed, "" if verdict.passed else message, *errors)

    def _tensors(self, outputs: Sequence[Output]) -> list[torch.Tensor]:
        """Private copies of the returned tensors."""
        found = []
        for out in outputs:
            if out.type != "Tensor" or not out.strided or _kind(out.dtype) is None:
                raise CallFailed(f"custom_kernel returned a {out.type} {out.dtype}, expected a plain torch.Tensor")
            if out.at is None:
                raise CallFailed(f"an output of {out.dtype} {list(out.shape)} did not come back")
            try:
                found.append(self._arena.read(out.at, out.shape, out.dtype, out.stride))
            except HarnessError as error:
                raise self._refusal(f"the process described an output that is not one: {error}") from error
        return found


def _kind(name: str) -> torch.dtype | None:
    """The dtype ``name``, a string from the submission's process; None if there is none."""
    kind = getattr(torch, name, None)
    return kind if isinstance(kind, torch.dtype) else None

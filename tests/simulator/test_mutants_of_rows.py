"""Mutants of who takes part (numbers of threads, masks, scopes, spaces, meetings) in the kernels that walk rows.

``tests/simulator/mutation`` tries all kinds of mutants on the matrix kernels; these kinds are tried on the others too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support import gemv_problems
from support.fused_problems import check_rmsnorm, check_silu_mul, random
from support.mutants import mutated, outcome, plan_anew
from support.quantize_problems import differences

from cute_nvfp4 import simulating
from cute_nvfp4.planning import quantize as planning
from tests.simulator.mutation.judge import rules
from tests.simulator.mutation.sites import Mutant, mutants

KINDS = (
    *("a warp less at the barrier", "one warp at the barrier", "one warp at the barrier of all"),
    *("lane 0 alone at the warp barrier", "half of the lanes at the warp barrier", "scope of the CTA"),
    *("the other space", "global memory only", "shared memory only", "drop cluster meeting"),
)
X, OTHER, SCALE = random(6, 1024, torch.bfloat16), random(6, 1024, torch.bfloat16, 1), torch.tensor(0.004)


def _gemv(case: gemv_problems.Case) -> Callable[[], bool]:
    problem = gemv_problems.make(case)
    return lambda: not gemv_problems.wrong(problem, problem.run()).any()


def _checked(check: Callable[..., object], *args: object, **options: object) -> Callable[[], bool]:
    def right() -> bool:
        try:
            check(*args, global_scale=SCALE, **options)
        except AssertionError:
            return False
        return True

    return right


CASES: dict[str, tuple[str, Callable[[], Callable[[], bool]]]] = {
    **{
        f"gemv {arch}": (arch, lambda: _gemv(gemv_problems.Case(128, 1024, dtype=torch.float16, alpha=2.0**-14)))
        for arch in ("sm_90a", "sm_100a")
    },
    "gemv pairs": ("sm_90a", lambda: _gemv(gemv_problems.Case(70, 1024, dtype=torch.float16, cluster=2))),
    "quantize": ("sm_90a", lambda: lambda: not differences(X[:4], "nvfp4", "max", global_scale="auto")),
    "rmsnorm": ("sm_100a", lambda: _checked(check_rmsnorm, X, OTHER[0], OTHER, scale_layout="rowmajor")),
    "silu_mul": ("sm_90a", lambda: _checked(check_silu_mul, X, OTHER)),
}
HARMLESS: dict[tuple[str, str, int], str] = {}
"""Mutants that nothing notices, and why they change nothing."""


class Changed:
    """A mutant of one kernel; others stay as they are."""

    def __init__(self, ptx: str, mutant: Mutant) -> None:
        self.ptx, self.mutant = ptx, mutant

    def apply(self, ptx: str) -> tuple[str, int]:
        """The PTX to run, and at how many sites it is changed."""
        return (self.mutant.apply(ptx), 1) if ptx == self.ptx else (ptx, 0)


def _warned(change: Changed | None, right: Callable[[], bool], arch: str) -> Counter[str]:
    """What strict checks warn of, at how many instructions."""
    with mutated(change, arch, strict=True) as runs:
        right()
    return sum((rules(run.result) for run in runs), Counter())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_who_takes_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, make = CASES[name]
    monkeypatch.setattr(planning, "_best_cluster", lambda *_: 8)
    plan_anew(monkeypatch)
    right = make()
    with simulating(arch) as runs:
        assert right()
    tried = 0
    for ptx in dict.fromkeys(run.ptx for run in runs):
        lines = {line for run in runs if run.ptx == ptx for line in run.result.lines}
        for mutant in mutants(ptx):
            if mutant.kind in KINDS and mutant.line in lines:
                tried += 1
                plan_anew(monkeypatch)
                change = Changed(ptx, mutant)
                found = outcome(change, right, arch) or _warned(change, right, arch) - _warned(None, right, arch)
                assert found or (name, mutant.kind, mutant.ordinal) in HARMLESS, f"{mutant.name}: {mutant.old}"
    assert tried

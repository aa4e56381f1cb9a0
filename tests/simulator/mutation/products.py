"""The kernels of sm_90a and sm_120a as subjects, each on a problem that goes round its ring and leaves tails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from support import gated_gemm_problems, gemm_problems, grouped_problems
from support.scratch_flags import keeping_flags, lowered

from cute_nvfp4 import simulating
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.kernels.gemm.sm90.schedules import EqualShares
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.sim import Result
from tests.kernels.prepared_weight import test_packed_gated_gemm as packed_gated
from tests.kernels.prepared_weight import test_packed_gemm as packed
from tests.kernels.prepared_weight import test_packed_groups as packed_groups

from .judge import Subject

_BF16 = torch.bfloat16
_CASE = gemm_problems.Case(200, 136, 1312, tile_n=64, workers=1, store="direct", stages=2, exact=True)
_GATED = gated_gemm_problems.Gated(
    gemm_problems.Case(140, 80, 1056, tile_n=64, workers=1, store="direct", alpha=2.0**-8, exact=True), "relu"
)
_GROUPED = grouped_problems.Grouped(
    ((130, 70, 544), (0, 64, 128), (20, 136, 800)), tile_n=64, workers=2, exact=True, dtype="float16"
)


@dataclass(frozen=True)
class _Few:
    """A case of ``test_packed_gemm`` with a plan of the streaming kernel."""

    m: int = 15
    n: int = 200
    k: int = 1040
    gate: str = ""
    dtype: torch.dtype = _BF16
    out: torch.dtype = torch.float32
    quantized: bool = False
    bias = None
    format = NVFP4
    plan = PackedPlan(StreamConfig(slabs=4, warps_m=2, warps_k=2, stages=4), 3)


def _short(case: Any) -> Any:
    """The case with a ring that it goes round more than once: of a place that nobody uses no change is noticed."""
    return replace(case, k=640, tiling=case.tiling | {"stages": 2})


_GATED_WEIGHTS = replace(
    packed_gated.CUT, k=640, plan=packed_gated.wgmma(5, tile_n=16, schedule=EqualShares(cluster_rows=2), stages=2)
)  # fmt: skip


def _dense(case: gemm_problems.Case) -> Callable[[], None]:
    problem = gemm_problems.make(case)
    return lambda: gemm_problems.check(problem, problem.run())


def _checked(problem: Any) -> Callable[[], None]:
    return lambda: problem.check(problem.run())


def _packed(problem: type, *cases: Any) -> Callable[[], None]:
    """Cases of one kernel; the last is the one whose lines are changed."""
    problems = [problem(case) for case in cases]

    def once() -> None:
        for one in problems:
            assert one.right(one.run())

    return once


_WGMMA = packed.Case(
    24, 300, 640, workers=3, tiling={"tile_n": 16, "stages": 2, "schedule": EqualShares(cluster_rows=2)}, out=_BF16
)
_SHORT = {"n": 424, "k": 208}
"""Units of the streaming kernel as short as its ring, several for each CTA: no stage orders what a CTA does with the
place of the sums for one and for the next."""


_SUBJECTS: dict[str, tuple[str, Callable[[], Callable[[], None]]]] = {
    "wgmma": ("sm_90a", lambda: _packed(packed.Problem, _WGMMA)),
    "wgmma split_k": ("sm_90a", lambda: _packed(packed.Problem, _short(packed.SHARED))),
    "wgmma gated": ("sm_90a", lambda: _packed(packed_gated.Problem, _GATED_WEIGHTS)),
    "wgmma groups": ("sm_90a", lambda: _packed(packed_groups.Problem, _short(packed_groups.CUT))),
    "stream": ("sm_90a", lambda: _packed(packed.Problem, _Few(**_SHORT), _Few())),
    "stream gated": (
        "sm_90a",
        lambda: _packed(packed_gated.Problem, _Few(gate="silu", **_SHORT), _Few(gate="silu")),
    ),
    "sm_120a gemm": ("sm_120a", lambda: _dense(_CASE)),
    "sm_120a wide": ("sm_120a", lambda: _dense(replace(_CASE, tile_n=128))),
    "sm_120a stream_k": ("sm_120a", lambda: _dense(replace(_CASE, scheduler="stream_k", workers=3))),
    "sm_120a mxfp8": ("sm_120a", lambda: _dense(replace(_CASE, a_format="mxfp8", b_format="mxfp8_e5m2", k=672))),
    "sm_120a gated": ("sm_120a", lambda: _checked(gated_gemm_problems.make(_GATED))),
    "sm_120a groups": ("sm_120a", lambda: _checked(grouped_problems.make(_GROUPED))),
}


def names(arch: str) -> tuple[str, ...]:
    """The subjects of an architecture."""
    return tuple(name for name, (mine, _) in _SUBJECTS.items() if mine == arch)


@functools.cache
def subject(name: str) -> Subject:
    """The kernel called so: the last one that its operation launches."""
    arch, make = _SUBJECTS[name]
    once = make()
    with simulating(arch) as runs:
        once()
    kernel = runs[-1].kernel
    assert all(run.ptx == kernel.ptx for run in runs)

    def run(ptx: str, **options: Any) -> tuple[bool, Result]:
        def changed(found: Any) -> Any:
            return replace(found, ptx=ptx) if found.ptx == kernel.ptx else found

        with simulating(arch, kernel=changed, **options) as runs, keeping_flags() as flags:
            try:
                once()
            except AssertionError:
                return False, runs[-1].result
        return lowered(flags), runs[-1].result

    return Subject(name, kernel.ptx, run)

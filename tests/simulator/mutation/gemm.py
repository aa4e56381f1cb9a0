"""The kernels of ``gemm`` as subjects, each on a problem that goes round every ring and leaves tails."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from support import gemm_problems
from support.gemm_problems import Case
from support.scratch_flags import keeping_flags, lowered

from cute_nvfp4 import simulating
from cute_nvfp4.sim import Result

from .judge import Subject
from .sites import Mutant, unfolded

CASES = {
    "gemm plain": Case(130, 100, 1312, tile_n=64, stages=2, workers=1, exact=True),
    "gemm pair": Case(300, 136, 1312, tile_n=64, pair=True, cluster_m=2, stages=2, workers=1, exact=True),
    "gemm multicast": Case(260, 200, 800, tile_n=64, cluster_m=2, cluster_n=2, stages=2, workers=1, exact=True),
    "gemm split_k": Case(130, 200, 1312, tile_n=64, split_k=2, stages=2, workers=1, store="direct", exact=True),
    "gemm stream_k": Case(130, 200, 1312, tile_n=64, scheduler="stream_k", stages=2, workers=3, exact=True),
    "gemm mxfp8": Case(130, 200, 384, tile_n=192, stages=2, workers=1, a_format="mxfp8", b_format="mxfp8_e5m2",
                       exact=True),
}  # fmt: skip
"""A few tiles for fewer clusters, and more steps of K than an unrolled pass of the MMA loop and the stages of the ring;
each copy of an MMA meets data, which is exact, so that one wrong bit shows. A second problem has one tile and few
steps: most of a ring is never used, and with stream-K there are clusters that only help others."""


@contextmanager
def ptx_is(ptx: str) -> Iterator[None]:
    """Within it ``gemm`` runs this PTX instead of its kernels'."""
    with simulating(kernel=lambda kernel: replace(kernel, ptx=ptx)):
        yield


def once(found: Iterable[Mutant]) -> list[Mutant]:
    """Of the copies of a step that the unrolled MMA loop is made of, the first: eight atoms of scales, four MMAs, …"""
    limits = {"tcgen05.cp": 8, "tcgen05.mma": 4, "mma.sync": 4, "ldmatrix": 4, "wgmma.mma_async": 4}

    def wanted(mutant: Mutant) -> bool:
        limit = next((n for opcode, n in limits.items() if mutant.old.startswith(opcode)), None)
        return limit is None or mutant.ordinal <= limit

    return [mutant for mutant in found if wanted(mutant)]


def small(case: Case) -> Case:
    """The second problem, for the same kernel."""
    steps = case.workers if case.scheduler == "stream_k" else case.split_k
    return replace(case, m=3, n=8, k=256 * (steps - 1) + 32)


@functools.cache
def subject(name: str) -> Subject:
    """The kernel called ``name`` in ``CASES``."""
    problems = [gemm_problems.make(case) for case in (CASES[name], small(CASES[name]))]

    def run(ptx: str, **options: object) -> tuple[bool, Result]:
        with ptx_is(ptx), simulating(**options) as runs, keeping_flags() as flags:
            results = []
            for problem in problems:
                c = problem.run()
                if gemm_problems.wrong(problem, c).any() or not (problem.untouched() and lowered(flags)):
                    return False, runs[-1].result
                results.append(runs[-1].result)
            return True, results[0]

    with simulating() as runs:
        for problem in problems:
            problem.run()
    assert len({run.ptx for run in runs}) == 1
    return Subject(name, unfolded(runs[0].ptx), run)

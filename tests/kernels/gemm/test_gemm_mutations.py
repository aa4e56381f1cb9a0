"""The suite notices a broken GEMM: wrong counts in the pipeline graph, wrong masks, and a changed PTX instruction each
give a wrong result or a named error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cutlass import Int16, Int32
from support import gemm_problems
from support.gemm_problems import Case
from support.mutants import plan_anew

import cute_nvfp4.runtime.compile
from cute_nvfp4 import simulating
from cute_nvfp4.errors import OperandError, SimError
from cute_nvfp4.kernels.gemm import tile_scheduler as scheduler
from cute_nvfp4.kernels.gemm.pipeline_graph import Edge
from cute_nvfp4.kernels.gemm.sm100 import loader, memory_plan
from cute_nvfp4.kernels.gemm.sm100 import mainloop as mma
from cute_nvfp4.sim import Schedule, adversarial
from tests.simulator.mutation import survivors
from tests.simulator.mutation.gemm import CASES, once, small, subject
from tests.simulator.mutation.judge import judge, reached
from tests.simulator.mutation.sites import Mutant, mutants

PAIR_MULTICAST = Case(600, 200, 800, pair=True, cluster_m=4, cluster_n=2, tile_n=64, stages=2, workers=1, exact=True)
PAIR_COLUMNS = Case(300, 200, 800, pair=True, cluster_m=2, cluster_n=2, tile_n=64, stages=2, workers=1, exact=True)
ODD_TILES = Case(130, 500, 288, tile_n=192, workers=1, exact=True)
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel from before, and none left for others."""
    monkeypatch.setenv("CUTE_NVFP4_CACHE", "0")
    monkeypatch.setattr(cute_nvfp4.runtime.compile, "_memory", {})
    plan_anew(monkeypatch)


# the default; one that parts the CTAs of a cluster and runs their MMAs one by one; the extremes
SCHEDULES = (Schedule(), Schedule(0, "random", "eager", "random", "lazy"), *adversarial(4)[1:])


def noticed(case: Case) -> str:
    """What is reported when gemm() runs ``case`` and a small problem with its kernel: "", "wrong", or an error."""
    for problem in map(gemm_problems.make, (case, small(case))):
        for schedule in SCHEDULES:
            try:
                with simulating(schedule=schedule, step_limit=60_000):
                    c = problem.run()
            except (SimError, OperandError) as error:
                return type(error).__name__
            if gemm_problems.wrong(problem, c).any():
                return "wrong"
    return ""


# --- counts of the graph


def counts(edge: str, full: int = 0, empty: int = 0, tx_bytes: int = 0) -> Patch:
    """Adds to what the graph derives for ``edge``."""

    def changed(found: Edge) -> Edge:
        if found.name != edge:
            return found
        new_full = replace(found.full, terms=(*found.full.terms, ("wrong", full)))
        new_empty = replace(found.empty, terms=(*found.empty.terms, ("wrong", empty)))
        return replace(found, full=replace(new_full, tx_bytes=found.full.tx_bytes + tx_bytes), empty=new_empty)

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = memory_plan.pipeline_graph
        wrong = lambda config, rings: tuple(map(changed, original(config, rings)))  # noqa: E731
        monkeypatch.setattr(memory_plan, "pipeline_graph", wrong)

    return patch


GRAPH = {
    "a loader too many": ("gemm plain", counts("operands", full=1)),
    "no loader": ("gemm plain", counts("operands", full=-1)),
    "sixteen bytes too many": ("gemm plain", counts("operands", tx_bytes=16)),
    "scales of B forgotten": ("gemm plain", counts("operands", tx_bytes=-2048)),
    "an MMA too many": ("gemm plain", counts("operands", empty=1)),
    "a commit too many": ("gemm plain", counts("accumulators", full=1)),
    "a warp of the epilogue forgotten": ("gemm plain", counts("accumulators", empty=-1)),
    "a warp of the epilogue too many": ("gemm plain", counts("accumulators", empty=1)),
    "bytes of one CTA of a pair": ("gemm pair", counts("operands", tx_bytes=-(128 * 128 + 32 * 128 + 4096))),
    "epilogue of one CTA of a pair": ("gemm pair", counts("accumulators", empty=-4)),
    "MMAs along M forgotten": ("gemm multicast", counts("operands", empty=-1)),
    "MMAs of others forgotten": ("gemm multicast", counts("operands", empty=-2)),
    "its own MMA counted twice": ("gemm multicast", counts("operands", empty=1)),
    "sums of half a column forgotten": ("gemm split_k", counts("partials", tx_bytes=-256)),
    "sums of a column too many": ("gemm split_k", counts("partials", tx_bytes=512)),
    "sums read by three warps": ("gemm split_k", counts("partials", empty=-1)),
    "sums read by five warps": ("gemm split_k", counts("partials", empty=1)),
}


@pytest.mark.sweep(2)
@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("name", GRAPH)
def test_wrong_counts_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, patch = GRAPH[name]
    patch(monkeypatch)
    assert noticed(CASES[kernel])


# --- masks and places


def masks(change: Callable) -> Patch:
    """``change``: (A and SFA, B, SFB) to others."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = loader.multicast_masks
        monkeypatch.setattr(loader, "multicast_masks", lambda c, place: loader.LoadMasks(*change(*original(c, place))))

    return patch


def commits(change: Callable) -> Patch:
    """``change``: (config, work, (readers of a stage, CTAs of the MMA)) to other masks."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = mma.commit_masks
        monkeypatch.setattr(
            mma, "commit_masks", lambda c, place: mma.CommitMasks(*change(c, place, original(c, place)))
        )

    return patch


def attribute(module: object, name: str, value: object) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(module, name, value)


def uneven_share(total, parts, index):
    """Without what is left over."""
    each = total // parts
    return scheduler.Share(index * each, each)


def own_bit(config, work, found) -> tuple:
    cm, cn = config.cluster
    rank = work.part * (cm * cn) + work.y * cm + work.x
    return Int16(Int32(1) << rank), found[1]


PLACES = {
    "masks of A and B swapped": (CASES["gemm multicast"], masks(lambda a, b, sfb: (b, a, sfb))),
    "scales of B to one column of pairs": (PAIR_MULTICAST, masks(lambda a, b, sfb: (a, b, b))),
    "A to the CTAs of B's scales": (PAIR_MULTICAST, masks(lambda a, b, sfb: (sfb, b, sfb))),
    "stages freed in one CTA": (CASES["gemm multicast"], commits(own_bit)),
    "stages freed in the MMA's CTAs": (PAIR_MULTICAST, commits(lambda c, work, found: (found[1], found[1]))),
    "accumulators announced to all that read": (PAIR_COLUMNS, commits(lambda c, work, found: (found[0], found[0]))),
    "scales of tiles that start within an atom": (ODD_TILES, attribute(mma, "ATOM_ROWS", 64)),
    "steps left over by a split": (
        replace(CASES["gemm stream_k"], workers=5),
        attribute(scheduler, "share", uneven_share),
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("name", PLACES)
def test_wrong_places_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, patch = PLACES[name]
    patch(monkeypatch)
    assert noticed(case)


@pytest.mark.parametrize("case", [PAIR_MULTICAST, ODD_TILES], ids=str)
def test_the_kernels_themselves_are_right(case: Case) -> None:
    assert noticed(case) == ""


# --- one changed instruction


def executed(name: str) -> list[Mutant]:
    """The mutants of lines that the kernel's problems execute."""
    one = subject(name)
    lines = reached(one)
    return once([m for m in mutants(one.ptx) if m.line in lines])


def unexplained(name: str, chosen: list[Mutant]) -> list[str]:
    """Those that are neither noticed nor explained."""
    assert chosen
    left = [m for m in chosen if not survivors.explained(name, m)[0]]
    return [f"{m.name}: {m.old}" for m in left if not judge(subject(name), m).by]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CASES)
def test_a_sample_of_mutants(name: str) -> None:
    verdict = judge(subject(name), None)
    assert not verdict.by, verdict.message
    assert not unexplained(name, executed(name)[12::80])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_explanations_are_of_mutants_that_exist(name: str) -> None:
    known = {(name, m.kind, m.ordinal) for m in executed(name)}
    assert {k for k in (*survivors.HARMLESS, *survivors.NOT_NOTICED) if k[0] == name} <= known


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", CASES)
def test_all_mutants(name: str) -> None:
    assert not unexplained(name, executed(name))

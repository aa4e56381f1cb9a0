"""``strict=True``: warnings of what the ISA asks for and NVIDIA's kernels leave out, each beside a kernel in order."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module, wait
from support.gemm_problems import Case, make
from support.mutants import Change, at, drop, mutated
from test_checks import INIT, MEMORY, THREAD

STRICT = ("read-proxy-fence", "lane-signal", "tensor-fence", "allocation-permit")
COPY = """@%q1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    @%q1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [cell], [%p0], 128, [bar];"""
START = INIT.format(1, "fence.mbarrier_init.release.cluster;") + "mov.u32 %r20, bar;"
OWN = "mbarrier.arrive.shared.b64 _, [bar];"


def found(body: str, strict: bool = True) -> list[str]:
    room = np.zeros(4096, np.uint32)
    result = launch_kernel(module(THREAD + body, 1, MEMORY), [room], checks=True, strict=strict)
    return [f.rule for f in result.findings if f.rule in STRICT]


@pytest.mark.parametrize("issuer", [False, True])
@pytest.mark.parametrize("fence, expected", [("", ["read-proxy-fence"]), ("fence.proxy.async.shared::cta;", [])])
def test_a_copy_over_what_threads_have_read(fence: str, expected: list[str], issuer: bool) -> None:
    """Those who read may fence, or who issues the copy."""
    between = "bar.sync 1;" + fence if issuer else fence + "bar.sync 1;"
    body = START + COPY + wait("%r20", "0") + "ld.shared.b32 %r12, [%r7];" + between + COPY + wait("%r20", "1")
    assert found(body) == expected and found(body, strict=False) == []


@pytest.mark.parametrize("sync, expected", [("", ["lane-signal"]), ("bar.warp.sync -1;", []), ("bar.sync 1;", [])])
@pytest.mark.parametrize("signal", ["@%q1 " + OWN, "@%q1 st.release.gpu.global.b32 [%p0+256], %r1;"])
def test_one_lane_signals_for_others(signal: str, sync: str, expected: list[str]) -> None:
    body = START + "st.shared.b32 [%r7], %r1;" + sync + signal
    assert found(body) == expected and found(body, strict=False) == []


def test_each_lane_signals_for_itself() -> None:
    assert found(START.replace("[bar], 1;", "[bar], 32;") + "st.shared.b32 [%r7], %r1;" + OWN) == []


FENCES = [
    (None, ()),
    (at("tcgen05.relinquish_alloc_permit", drop()), ("allocation-permit",)),
    (at("tcgen05.fence::before_thread_sync", drop()), ("tensor-fence",)),
    (at("tcgen05.fence::after_thread_sync", drop(), slice(0, 1)), ("tensor-fence",)),
    (at("tcgen05.fence::after_thread_sync", drop(), slice(1, 2)), ("tensor-fence",)),
]


@pytest.mark.parametrize("change, expected", FENCES, ids=["none", "permit", "before", "of the MMA", "of the epilogue"])
def test_tensor_fences(change: Change | None, expected: tuple[str, ...]) -> None:
    problem = make(Case(130, 100, 800, tile_n=64, stages=2, workers=1, exact=True))
    with mutated(change, strict=True) as runs:
        problem.run()
    assert {f.rule for f in runs[-1].result.findings} & set(STRICT) == set(expected)

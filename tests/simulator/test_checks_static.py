"""Rules read off the code: each finds its mistake, and says nothing of the code without it."""

from __future__ import annotations

import pytest
from ptx_lab import module, wait

from cute_nvfp4.sim import Program
from cute_nvfp4.sim.checks.static import findings

MEMORY = ".shared .align 16 .b8 cell[64]; .shared .align 8 .b64 bar[2];"
INIT = "mov.u32 %r1, %tid.x; mov.u32 %r5, bar; setp.eq.u32 %q1, %r1, 0; @%q1 mbarrier.init.shared.b64 [bar], 1;"
COPY = "@%q1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [cell], [%p0], 64, [bar];"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r3];"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 32;"


def found(body: str, strict: bool = True) -> list[tuple[str, str]]:
    program = Program.parse(module(body, 1, MEMORY))
    (name,) = program.kernels
    return [(f.severity, f.rule) for f in findings(program.kernel(name), strict)]


@pytest.mark.parametrize(
    "good,bad,finding",
    [
        (
            INIT + "fence.mbarrier_init.release.cluster; bar.sync 0;" + COPY,
            INIT + "bar.sync 0; @%q2 bra L; fence.mbarrier_init.release.cluster; L:" + COPY,
            ("hazard", "mbarrier-init-fence"),
        ),
        (
            INIT + "fence.proxy.async; barrier.cluster.arrive.relaxed; barrier.cluster.wait;",
            INIT + "barrier.cluster.arrive.relaxed; barrier.cluster.wait;",
            ("hazard", "mbarrier-init-fence"),
        ),
        (INIT + "bar.sync 0;" + wait("%r5", "0"), None, None),
        (
            ALLOC + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;",
            ALLOC,
            ("hazard", "tensor-memory-freed"),
        ),
        (
            LOAD + "tcgen05.wait::ld.sync.aligned; st.global.b32 [%p0], %r2;",
            LOAD + "st.global.b32 [%p0], %r2; tcgen05.wait::ld.sync.aligned;",
            ("warning", "tensor-load-wait"),
        ),
        (
            "L: mbarrier.try_wait.parity.shared.b64 %q2, [bar], 0; @!%q2 bra L;",
            "mbarrier.try_wait.parity.shared.b64 %q2, [bar], 0;",
            ("warning", "wait-answer-read"),
        ),
        ("bar.sync 1, 64; barrier.cta.arrive 2, 96;", "bar.sync 1, 48;", ("hazard", "barrier-thread-count")),
    ],
)
def test_rules(good: str, bad: str | None, finding: tuple[str, str] | None) -> None:
    assert found(good) == []
    if bad is not None:
        assert finding in found(bad)


def test_findings_name_kernel_and_instruction() -> None:
    program = Program.parse(module("bar.sync 1, 48;", 0))
    (finding,) = findings(program.kernel("kernel"))
    assert str(finding).startswith("hazard: kernel: `bar.sync 1, 48` (PTX line ")
    assert "48 threads are no whole number of warps [barrier-thread-count]" in str(finding)


def test_the_count_of_a_reducing_barrier_is_its_third_operand() -> None:
    text = "setp.eq.u32 %q1, %r1, 0; barrier.red.and.pred %q2, 1, COUNT, %q1;"
    assert found(text.replace("COUNT", "64")) == []
    assert found(text.replace("COUNT", "40")) == [("hazard", "barrier-thread-count")]


def test_computing_before_the_wait_is_told_only_if_asked_for() -> None:
    """Packing is no use: ptxas makes no instruction of it. What is packed is."""
    packs = LOAD + "mov.b64 %rd1, {%r2, %r2}; USE tcgen05.wait::ld.sync.aligned; st.global.b64 [%p0], %rd1;"
    assert found(packs.replace("USE", "")) == []
    used = packs.replace("USE", "add.s64 %rd1, %rd1, 1;")
    assert found(used, strict=False) == [] and found(used) == [("warning", "tensor-load-wait")]

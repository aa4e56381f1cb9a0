"""Loads of tensor memory that may still be under way when their warp tells others that it has read."""

from __future__ import annotations

import pytest
from ptx_lab import wait
from test_checks import go

from cute_nvfp4.sim import Race

START = """@%q1 mbarrier.init.shared.b64 [bar], 32; mov.u32 %r20, bar; setp.ne.u32 %q4, %r3, 0;
    @%q4 bra J; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 32; J: bar.sync 0;
    ld.shared.b32 %r15, [cell]; setp.eq.u32 %q5, %r3, 4; @%q5 bra OTHER; @%q4 bra E;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r15], {%r1}; tcgen05.wait::st.sync.aligned;"""
LOAD, WAIT = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r16}, [%r15];", "tcgen05.wait::ld.sync.aligned;"
PACK, USE = "mov.b64 %rd3, {%r16, %r16};", "cvt.u32.u64 %r17, %rd3; add.u32 %r17, %r17, 1;"
ARRIVE = "mbarrier.arrive.shared.b64 _, [bar];"
END = """bra E; OTHER: WAITS tcgen05.st.sync.aligned.32x32b.x1.b32 [%r15], {%r1}; tcgen05.wait::st.sync.aligned;
    E: bar.sync 1; @%q4 bra X; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r15, 32; X:"""
"""Warp 4, which has the same lanes of tensor memory as warp 0, writes when warp 0 has arrived."""


def races(*steps: str, strict: bool = False) -> bool:
    body = START + " ".join(steps) + END.replace("WAITS", wait("%r20", "0"))
    try:
        go(body, block=160, strict=strict)
    except Race as error:
        assert "tcgen05.ld" in str(error) and "tcgen05.st" in str(error), str(error)
        return True
    return False


@pytest.mark.parametrize("strict", [False, True])
def test_the_wait_comes_before_the_arrival(strict: bool) -> None:
    """Packing in front of the arrival finishes nothing; a computation does, for the register must be there."""
    assert not races(LOAD, WAIT, ARRIVE, strict=strict)
    assert not races(LOAD, PACK, WAIT, ARRIVE, USE, strict=strict)
    assert races(LOAD, ARRIVE, WAIT, strict=strict)
    assert races(LOAD, PACK, ARRIVE, WAIT, USE, strict=strict)
    assert races(LOAD, PACK, ARRIVE, USE, strict=strict)
    assert not races(LOAD, PACK, USE, ARRIVE, WAIT, strict=strict)


def test_other_ways_to_tell() -> None:
    """A release, and an arrival at a named barrier, which does not wait."""
    assert races(LOAD, PACK, "fence.acq_rel.cta; @%q1 st.release.cta.shared.b32 [cell+64], 1;", ARRIVE, WAIT, USE)
    assert not races(LOAD, PACK, WAIT, "bar.warp.sync -1;", ARRIVE, USE)

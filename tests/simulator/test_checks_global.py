"""Global memory that threads of many clusters access: each cluster has its own clocks."""

from __future__ import annotations

import pytest
from test_checks import go

from cute_nvfp4.sim import Race


@pytest.mark.parametrize("sync", ["bar.warp.sync -1;", "bar.sync 0;"])
@pytest.mark.parametrize("writer", range(3))
def test_one_word_that_clusters_read_together(writer: int, sync: str) -> None:
    """Equal threads of three CTAs read the word; one of them stores it. What orders its own read orders no other."""
    body = f"setp.eq.and.u32 %q4, %r17, {writer}, %q1; {{}} ld.global.b32 %r12, [%p0]; {sync}"
    body += "@%q4 st.global.b32 [%p0], 5;"
    go(body.format("@%q4"), grid=(3, 1, 1))
    with pytest.raises(Race, match="is read by another cluster"):
        go(body.format(""), grid=(3, 1, 1))


def flag(order: str, at: int) -> str:
    """Waits until the word at byte ``at`` is not 0."""
    return f"L{at}: ld.{order}.gpu.global.b32 %r13, [%p0+{at}]; setp.eq.u32 %q5, %r13, 0; @%q5 bra L{at};"


def test_a_release_has_what_its_thread_knew_then() -> None:
    """CTA 0 hears of CTA 1, releases, and then hears of CTA 2, which has stored. CTA 3 acquires one of its releases."""
    tell = "st.{}.gpu.global.b32 [%p0+{}], 1;".format
    ctas = (
        flag("acquire", 512) + tell("release", 516) + flag("acquire", 520) + tell("release", 524),
        tell("release", 512),
        "st.global.b32 [%p0], 5;" + tell("release", 520),
        flag("FIRST", 524) + flag("acquire", 516) + "ld.global.b32 %r12, [%p0];",
    )
    body = "@!%q1 bra E;" + "".join(f"setp.eq.u32 %q6, %r17, {j}; @%q6 bra C{j};" for j in range(4))
    body += "".join(f"C{j}: {text} bra E;" for j, text in enumerate(ctas)) + "E:"
    go(body.replace("FIRST", "acquire"), grid=(4, 1, 1))
    with pytest.raises(Race, match="is written by another cluster"):
        go(body.replace("FIRST", "relaxed"), grid=(4, 1, 1))


@pytest.mark.parametrize("other", [65535, 65536])
def test_clusters_whose_numbers_have_more_than_16_bits(other: int) -> None:
    """CTA 0 stores a word that another CTA loads, with and without a release and an acquire between."""
    body = f"setp.eq.u32 %q4, %r17, {other}; @%q4 bra B; setp.ne.u32 %q4, %r17, 0; @%q4 bra E;"
    body += "st.global.b32 [%p0], 5; st.{}.gpu.global.b32 [%p0+512], 1; bra E;"
    body += f"B: {flag('acquire', 512)} ld.global.b32 %r12, [%p0]; E:"
    go(body.format("release"), 1, grid=(other + 1, 1, 1))
    with pytest.raises(Race, match=r"is written by another cluster \(number 0\)"):
        go(body.format("relaxed"), 1, grid=(other + 1, 1, 1))


def test_what_is_known_of_a_cluster_whose_number_has_the_same_16_bits() -> None:
    """Thread 0 of CTA 65536 hears of thread 1 of CTA 0, which has stored, through CTA 1."""
    body = "setp.gt.u32 %q4, %r17, 1; setp.lt.and.u32 %q4, %r17, 65536, %q4; @%q4 bra E;"
    body += "min.u32 %r14, %r17, 2; mul.wide.u32 %rd3, %r14, 4; add.s64 %rd3, %p0, %rd3; setp.eq.u32 %q5, %r14, 0;"
    body += "selp.u32 %r15, 1, 0, %q5; setp.ne.u32 %q6, %r1, %r15; @%q6 bra E;"
    body += "@!%q5 bra L; st.global.b32 [%p0], 5; bra D;"
    body += "L: ld.acquire.gpu.global.b32 %r13, [%rd3+508]; setp.eq.u32 %q5, %r13, 0; @%q5 bra L;"
    body += "D: setp.eq.u32 %q5, %r14, 2; @%q5 ld.global.b32 %r12, [%p0]; st.release.gpu.global.b32 [%rd3+512], 1; E:"
    go(body, 2, grid=((1 << 16) + 1, 1, 1))

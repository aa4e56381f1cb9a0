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

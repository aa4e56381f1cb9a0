"""``ld.global.nc`` and ``ldu`` of what the launch writes: hazards in whatever order, beside loads that may."""

from __future__ import annotations

import pytest
from test_checks import go

from cute_nvfp4.sim import Race

NC, LDU, PLAIN = "ld.global.nc.b32 %r12, [%rd2];", "ldu.global.b32 %r12, [%rd2];", "ld.global.b32 %r12, [%rd2];"
WRITES = {
    "store": "st.global.b32 [%rd2], %r1;",
    "atomic": "red.relaxed.gpu.global.add.u32 [%rd2], 1;",
    "bulk copy": "bar.warp.sync -1; @%q1 cp.async.bulk.global.shared::cta.bulk_group [%p0], [cell], 128;"
    "@%q1 cp.async.bulk.commit_group; @%q1 cp.async.bulk.wait_group 0; bar.warp.sync -1;",
}
START = "st.shared.b32 [%r7], %r1; fence.proxy.async.shared::cta; bar.warp.sync -1;"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("load", [NC, LDU])
def test_what_the_launch_writes(load: str, write: str, strict: bool) -> None:
    """Each lane reads the word that it writes, or the warp copies: all is ordered."""
    for body in ("{load} {write}", "{write} {load}", "{load} bar.sync 0; {write} bar.sync 0; {load}"):
        body = START + body.format(load="LOAD", write=WRITES[write])
        go(body.replace("LOAD", PLAIN), strict=strict)
        with pytest.raises(Race, match="same launch") as error:
            go(body.replace("LOAD", load), strict=strict)
        assert "[constant-changes]" in str(error.value) and "byte" in str(error.value)


def test_other_words_of_the_tensor() -> None:
    """What nobody writes may be read so, beside what is written; wide loads touch more words."""
    body = "st.global.b32 [%rd2], %r1; add.s64 %rd3, %rd2, 128; ld.global.nc.b32 %r12, [%rd3];"
    go(body)
    wide = (
        "setp.eq.u32 %q4, %r1, 1; @%q4 st.global.b32 [%p0+12], %r1; ld.global.nc.v4.b32 {%r12,%r13,%r14,%r15}, [%p0{}];"
    )
    go(wide.replace("{}", "+16"))
    with pytest.raises(Race, match="constant-changes"):
        go(wide.replace("{}", ""))


def test_another_cta_writes() -> None:
    body = "@%q3 bra A; st.global.b32 [%rd2], %r1; bra E; A: {} E:"
    with pytest.raises(Race, match="constant-changes"):
        go(body.format(NC), grid=(2, 1, 1))

"""Every qualifier that an instruction accepts is executed, checked, or ignored for a reason (qualifiers.md)."""

from __future__ import annotations

import pytest
from ptx_lab import launch_kernel, module
from test_checks import CLUSTER, MEMORY, ROOM, THREAD, go
from test_checks_cluster_start import MEET

from cute_nvfp4.sim import InvalidLanes, Race, UnsupportedInstruction
from tests.simulator import qualifiers

WORDS = [(chapter, word) for chapter, words in qualifiers.accepted().items() for word in words - {""}]


def test_every_word_has_a_fate() -> None:
    assert len(WORDS) > 400
    assert not [(chapter, word) for chapter, word in WORDS if qualifiers.fate(chapter, word) is None]


def test_every_row_has_words_and_a_reason() -> None:
    used = {qualifiers.fate(*one) for one in WORDS}
    assert not [row for row in qualifiers.FATES if row not in used or not row.what]


def test_a_word_without_a_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in qualifiers.FATES if row.words != "nc"]
    monkeypatch.setattr(qualifiers, "FATES", rows)
    assert [one for one in WORDS if qualifiers.fate(*one) is None] == [("memory", "nc")]


def test_the_page_is_what_the_builders_say() -> None:
    assert qualifiers.PAGE.read_text() == qualifiers.page(), "run python -m tests.simulator.qualifiers"


@pytest.mark.parametrize(
    "text",
    [
        "membar.level;",
        "ld.weak.gpu.global.b32 %r1, [%p0];",
        "ld.volatile.gpu.global.b32 %r1, [%p0];",
        "ld.shared.nc.b32 %r1, [%r2];",
        "ld.relaxed.gpu.global.nc.b32 %r1, [%p0];",
        "st.global.nc.b32 [%p0], %r1;",
        "st.global.ca.b32 [%p0], %r1;",
        "ld.global.wt.b32 %r1, [%p0];",
        "fence.acq_rel.sync_restrict::shared::cta.cluster;",
        "discard.global.L2 [%p0], 128;",
    ],
)
def test_forms_that_do_not_exist_or_do_more_than_is_modelled(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        launch_kernel(module(text, 1), [ROOM.copy()])


def test_lanes_that_part_at_a_uniform_branch() -> None:
    """``.uni``: "guaranteed to be non-divergent"."""
    body = THREAD + "setp.lt.u32 %q4, %r1, {}; @%q4 bra.uni E; st.global.b32 [%rd2], %r1; E:"
    launch_kernel(module(body.format(32), 1, MEMORY), [ROOM.copy()])
    launch_kernel(module(body.format(7).replace(".uni", ""), 1, MEMORY), [ROOM.copy()])
    with pytest.raises(InvalidLanes, match=r"goes another way .* in spite of \.uni"):
        launch_kernel(module(body.format(7), 1, MEMORY), [ROOM.copy()])


def test_bytes_expected_at_another_cta() -> None:
    """mbarrier.expect_tx is a use of the mbarrier: its CTA must have started, and its initialisation be seen."""
    body = "@%q1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; FIRST mov.u32 %r20, bar;"
    body += "xor.b32 %r13, %r19, 1; mapa.shared::cluster.u32 %r14, %r20, %r13;"
    body += "@%q1 mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r14], 0;" + MEET
    go(body.replace("FIRST", MEET), **CLUSTER)
    with pytest.raises(Race, match="access-before-start"):
        go(body.replace("FIRST", ""), **CLUSTER)

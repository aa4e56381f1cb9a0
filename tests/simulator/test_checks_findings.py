"""What the checks go on past: warnings, classes that are allowed, hazards that are collected."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module, wait
from test_checks import FREE, INIT, MEMORY, OUT, THREAD

from cute_nvfp4 import simulating
from cute_nvfp4.sim import CopiesInFlight, LaunchError, MbarrierMisuse, Race, Result
from cute_nvfp4.sim.checks.report import Labels

TAIL = "@%q1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64;"
COPY = "@%q1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [cell], [%p0], 64, [bar];"
FENCE = "fence.mbarrier_init.release.cluster;"
STORE = """st.shared.b32 [%r7], %r1; fence.proxy.async.shared::cta; bar.sync 1;
    @%q1 cp.async.bulk.global.shared::cta.bulk_group [%p0+512], [cell], 128; cp.async.bulk.commit_group;"""
SKEWED = "st.shared.b32 [%r7], %r1; ld.shared.b32 %r12, [%r9];" + OUT


def result(body: str, block: int = 32, **options) -> Result:
    room = np.zeros(4096, np.uint32)
    return launch_kernel(module(THREAD + body, 1, MEMORY), [room], block=(block, 1, 1), checks=True, **options)


def test_a_phase_that_nobody_waits_for_is_a_warning() -> None:
    """The tail of a producer: it expects bytes of a copy that it never issues."""
    (found,) = result(INIT.format(1, FENCE) + TAIL).findings
    assert (found.severity, found.rule) == ("warning", "unfinished-phase")
    assert found.instruction.startswith("@%q1 mbarrier.arrive.expect_tx") and found.line > 0
    assert "64 bytes still to come" in found.message and f"PTX line {found.line}" in found.message
    assert result(INIT.format(1, FENCE) + TAIL + COPY + wait("%r5", "0")).findings == ()


def test_a_phase_with_its_copy_under_way_stays_a_hazard() -> None:
    with pytest.raises(
        CopiesInFlight, match=r"bytes of an asynchronous copy \(of `@%q1 cp\.async\.bulk\.shared.*on the"
    ):
        result(INIT.format(1, FENCE) + TAIL + COPY)
    over = INIT.format(1, FENCE) + TAIL + COPY + COPY.replace("64, [bar]", "32, [bar]") + wait("%r5", "0")
    with pytest.raises((MbarrierMisuse, CopiesInFlight, Race)):
        result(over)


def test_a_bulk_store_at_the_exit_is_named() -> None:
    with pytest.raises(
        CopiesInFlight, match=r"issued by CTA \(0, 0, 0\), warp 0 at `@%q1 cp\.async\.bulk\.global"
    ) as e:
        result(STORE)
    assert "(PTX line" in str(e.value) and str(e.value).endswith("[bulk-store-at-exit]")


def test_an_allowed_class_is_a_warning() -> None:
    (found,) = result(STORE, allow=["bulk-store-at-exit"]).findings
    assert (found.severity, found.rule) == ("warning", "bulk-store-at-exit")
    with pytest.raises(CopiesInFlight):
        result(STORE, allow=["race"])
    with pytest.raises(LaunchError, match="got 'bulk', expected one of race, race-in-warp"):
        result(STORE, allow=["bulk"])


def test_hazards_are_collected() -> None:
    with pytest.raises(Race, match=r"\[race-in-warp\]"):
        result(SKEWED + STORE)
    both = result(SKEWED + "bar.warp.sync -1;" + STORE, on_hazard="collect")
    assert [f.rule for f in both.findings] == ["race-in-warp", "bulk-store-at-exit"]
    assert len(both.hazards) == 2 and both.warnings == ()
    some = result(SKEWED + "bar.warp.sync -1;" + STORE, on_hazard="collect", allow=["race-in-warp"])
    assert [f.severity for f in some.findings] == ["warning", "hazard"]
    with pytest.raises(LaunchError, match="on_hazard: got 'go', expected one of raise, collect"):
        result(STORE, on_hazard="go")


def test_what_stops_a_launch_has_what_was_found_before() -> None:
    with pytest.raises(MbarrierMisuse) as error:
        result(SKEWED + "mbarrier.arrive.shared.b64 _, [bar];", on_hazard="collect")
    assert [f.rule for f in error.value.findings] == ["race-in-warp"]


def test_findings_are_told_by_class() -> None:
    body = SKEWED + SKEWED.replace("%r9", "%r9+0").replace("%r7", "%r7+0") + "bar.warp.sync -1;"
    found = result(body.replace(OUT, OUT + "\n"), on_hazard="collect")
    (text,) = found.hazards
    assert text.endswith(f", and {len(found.findings) - 1} more [race-in-warp]") and len(found.findings) > 1


ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 32; {} ld.shared.b32 %r15, [cell]; {}"


def test_the_result_of_an_allocation_is_read_by_its_warp() -> None:
    assert result(ALLOC.format("bar.warp.sync -1;", FREE)).findings == ()
    with pytest.raises(Race, match=r"bar\.warp\.sync .* would have to come between \[alloc-result\]"):
        result(ALLOC.format("", FREE))
    (found,) = result(ALLOC.format("", FREE), allow=["alloc-result"]).findings
    assert (found.severity, found.instruction) == ("warning", "ld.shared.b32 %r15, [cell]")


def test_tensor_memory_freed_while_others_use_it() -> None:
    use = """setp.ne.u32 %q4, %r3, 0; @%q4 bra J; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 32;
    J: bar.sync 0; ld.shared.b32 %r15, [cell]; shl.b32 %r14, %r3, 21; add.s32 %r13, %r15, %r14;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], {%r1}; tcgen05.wait::st.sync.aligned; MEET @%q4 bra E;"""
    assert result(use.replace("MEET", "bar.sync 1;") + FREE + "E:", block=128).findings == ()
    with pytest.raises(Race, match=r"and freed by CTA \(0, 0, 0\), warp 0 at `tcgen05\.dealloc.*\n.*\[free-in-use\]"):
        result(use.replace("MEET", "") + FREE + "E:", block=128)


def test_simulating_knows_the_classes() -> None:
    with simulating(allow=["race-in-warp"], on_hazard="collect"):
        pass
    with (
        pytest.raises(LaunchError, match="got 'races', expected one of race, race-in-warp"),
        simulating(allow=["races"]),
    ):
        pass


def test_lanes_write_what_another_cluster_has_stored_in_bulk() -> None:
    """One epoch stands for all bytes of the bulk store, one for each lane's."""
    body = """@!%q3 bra ONE; st.shared.b32 [%r7], %r1; fence.proxy.async; bar.warp.sync -1;
    @%q1 cp.async.bulk.global.shared::cta.bulk_group [%p0], [cell], 128;
    @%q1 cp.async.bulk.commit_group; @%q1 cp.async.bulk.wait_group 0; bra END; ONE: st.global.b32 [%rd2], %r1; END:"""
    result(body.replace("[%rd2]", "[%rd2+128]"), grid=(2, 1, 1))
    with pytest.raises(Race, match="CTA"):
        result(body, grid=(2, 1, 1))


def test_a_message_names_no_wrong_instruction_when_labels_run_out() -> None:
    """Labels have 16 bits, and the last is that of all further instructions."""
    labels, code = Labels(), [object() for _ in range((1 << 16) + 9)]
    given = [labels.label(i) for i in code]
    assert [labels.label(i) for i in code] == given and given[-12:] == [65534] + 11 * [65535]
    assert all(labels.instruction(label) is i for label, i in zip(given, code) if label < 65535)
    assert labels.instruction(given[-1]).where() == "an earlier instruction"

"""Loads of shared memory that nobody has written: a hazard where the value decides something, else a warning."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module
from test_checks import MEMORY, THREAD

from cute_nvfp4.sim import Hazard, Race, Result, UninitializedRead

READ = "st.shared.b32 [%r7], %r1; ld.shared.b32 %r12, [%r7+256];"
"""Nobody writes the 128 bytes at 256; %r12 is one of their words."""
SAFE = "setp.lt.u32 %q4, %r1, 64; selp.b32 %r13, 5, %r12, %q4;"
A_ROWS = """and.b32 %r14, %r1, 15; shl.b32 %r14, %r14, 4; add.s32 %r14, %r4, %r14;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r20, %r21}, [%r14]; mov.b32 %r22, 0;
    mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r24, %r25, %r26, %r27}, {%r20, %r21}, {%r1},
    {%r22, %r22, %r22, %r22};"""


def result(body: str, block: int = 32, grid: int = 1, **options) -> tuple[Result, np.ndarray]:
    room = np.arange(4096, dtype=np.uint32)
    text = module(THREAD + body, 1, MEMORY)
    out = launch_kernel(text, [room], block=(block, 1, 1), grid=(grid, 1, 1), checks=True, **options)
    return out, room


@pytest.mark.parametrize(
    "good,bad",
    [
        ("@!%q4 st.global.b32 [%rd2], %r12;", "@%q4 st.global.b32 [%rd2], %r12;"),
        ("st.global.b32 [%rd2], %r13;", "max.f32 %r13, %r12, 0f3F800000; st.global.b32 [%rd2], %r13;"),
        ("shfl.sync.bfly.b32 %r14, %r13, 1, 31, -1; st.global.b32 [%rd2], %r14;", "SHFL"),
        ("st.shared.b32 [%r7+512], %r12;", "STORED"),
        ("mul.lo.s32 %r14, %r12, 0; add.s32 %r14, %r14, %r7; ld.shared.b32 %r15, [%r14];", "ADDRESS"),
        ("setp.eq.s32 %q5, %r13, 5; @%q5 bra L; st.global.b32 [%rd2], %r12; L:", "BRANCH"),
    ],
)
def test_a_value_that_goes_somewhere(good: str, bad: str) -> None:
    bad = {
        "SHFL": "shfl.sync.bfly.b32 %r14, %r12, 1, 31, -1; st.global.b32 [%rd2], %r14;",
        "STORED": "st.shared.b32 [%r7+512], %r12; ld.shared.b32 %r14, [%r7+512]; st.global.b32 [%rd2], %r14;",
        "ADDRESS": "and.b32 %r14, %r12, 4; add.s32 %r14, %r14, %r7; ld.shared.b32 %r15, [%r14+256];",
        "BRANCH": "setp.lt.s32 %q5, %r12, 0; @%q5 bra L; mov.b32 %r14, 1; L:",
    }.get(bad, bad)
    (found,) = result(READ + SAFE + good)[0].findings
    assert (found.severity, found.rule) == ("warning", "uninitialized-read")
    assert "byte 256 of the shared memory" in found.message and "nobody has written it; no address" in found.message
    with pytest.raises(
        UninitializedRead, match=r"nobody has written it;\n  its value decides .*\[uninitialized-read\]"
    ):
        result(READ + SAFE + bad)


def test_a_row_of_a_matrix_reaches_its_row_of_the_product() -> None:
    """Of 16 rows of 16 bytes only the first 8 are written; of the accumulators the last two belong to the others."""
    write = "setp.lt.u32 %q5, %r1, 32; st.shared.b32 [%r7], 0; bar.warp.sync -1;"
    store = "st.global.b32 [%rd2], %r24; st.global.b32 [%rd2+512], %r25;"
    (found,) = result(write + A_ROWS + store)[0].findings
    assert found.severity == "warning" and "ldmatrix" in found.instruction
    with pytest.raises(UninitializedRead, match="ldmatrix"):
        result(write + A_ROWS + store + "st.global.b32 [%rd2+1024], %r26;")


def test_the_launch_is_run_once_as_far_as_memory_shows() -> None:
    body = READ + "ld.global.b32 %r14, [%rd2]; st.global.b32 [%rd2+1024], %r14; red.global.add.u32 [%p0+2048], 1;"
    out, room = result(body + "st.global.b32 [%rd2], 7;", block=64, grid=3, warps_per_wave=2, allow=["race"])
    assert {f.rule for f in out.findings} == {"race", "uninitialized-read"}
    assert room[512] == 512 + 3 * 64 and (room[:64] == 7).all()


def test_a_bulk_store_of_what_was_loaded_and_kept() -> None:
    keep = READ + "st.shared.b32 [%r7+512], %r12; fence.proxy.async.shared::cta; bar.sync 1;"
    copy = "@%q1 cp.async.bulk.global.shared::cta.bulk_group [%p0], [cell+AT], 128; cp.async.bulk.commit_group;"
    copy += "cp.async.bulk.wait_group.read 0;"
    assert [f.severity for f in result(keep + copy.replace("AT", "0"))[0].findings] == ["warning"]
    with pytest.raises(UninitializedRead, match="decides what is stored at byte"):
        result(keep + copy.replace("AT", "512"))


def test_what_stops_the_kernel_first() -> None:
    with pytest.raises(Race) as error:
        result(READ + "st.global.b32 [%p0], %r1;")
    assert [f.rule for f in error.value.findings] == ["uninitialized-read"]
    allowed = result(READ + "st.global.b32 [%rd2], %r12;", allow=["uninitialized-read"])[0]
    assert [f.severity for f in allowed.findings] == ["warning"]
    collected = result(READ + "st.global.b32 [%rd2], %r12;", on_hazard="collect")[0]
    assert [f.severity for f in collected.findings] == ["hazard"]


def test_an_atomic_on_what_nobody_wrote_is_a_hazard_at_once() -> None:
    with pytest.raises(Hazard):
        result(READ + "red.shared.add.u32 [%r7+256], 1;")


TENSOR = """tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 32; bar.sync 0; ld.shared.b32 %r15, [cell];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r15], {%r1}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r12}, [%r15+COLUMN]; tcgen05.wait::ld.sync.aligned;
    setp.lt.u32 %q4, %r1, 64; selp.b32 %r13, 5, %r12, %q4; STORE
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r15, 32;"""


def test_tensor_memory() -> None:
    """Of the 32 columns the first is written."""
    safe, uses = ("st.global.b32 [%rd2], " + r for r in ("%r13;", "%r12;"))
    assert not result(TENSOR.replace("COLUMN", "0").replace("STORE", uses))[0].findings
    (found,) = result(TENSOR.replace("COLUMN", "3").replace("STORE", safe))[0].findings
    assert (found.severity, found.rule) == ("warning", "uninitialized-read")
    assert "tensor memory of CTA (0, 0, 0), lanes 0..15, column 3" in found.message
    with pytest.raises(UninitializedRead, match="its value decides what is stored at byte 0 of"):
        result(TENSOR.replace("COLUMN", "3").replace("STORE", uses))


def test_tensor_memory_of_an_earlier_owner() -> None:
    """Columns that were written, freed and allocated again hold what nobody has written since."""
    twice = TENSOR.replace("COLUMN", "0").replace("STORE", "") + "bar.sync 0;" + TENSOR.replace("COLUMN", "0")
    twice = twice[::-1].replace("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r15], {%r1};"[::-1], "", 1)[::-1]
    with pytest.raises(UninitializedRead, match="its value decides"):
        result(twice.replace("STORE", "st.global.b32 [%rd2], %r12;"))
    assert result(twice.replace("STORE", "st.global.b32 [%rd2], %r13;"))[0].findings[0].severity == "warning"

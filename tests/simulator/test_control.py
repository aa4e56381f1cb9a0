"""Branches, loops, exits, barriers, scopes, and the errors of control flow."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ptx_lab import apply, launch_kernel, module

from cute_nvfp4.sim import (
    BarrierMisuse,
    Deadlock,
    GlobalMemory,
    Launch,
    LaunchError,
    Program,
    PtxSyntaxError,
    StepLimit,
    Trap,
    UndefinedRegister,
    UnsupportedInstruction,
    run,
)

THREAD = "mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %p0;"


def test_nested_divergent_loops() -> None:
    a = np.arange(200, dtype="u4")
    code = """mov.b32 %r10, 0; mov.b32 %r11, 0; OUTER: setp.ge.u32 %q1, %r11, %a; @%q1 bra DONE; mov.b32 %r12, 0;
    INNER: setp.ge.u32 %q2, %r12, %r11; @%q2 bra NEXT; add.s32 %r10, %r10, %r12; add.s32 %r12, %r12, 1; bra.uni INNER;
    NEXT: add.s32 %r11, %r11, 7; bra OUTER; DONE: mov.b32 %x, %r10;"""
    (x,) = apply(code, [a], ["u4"])
    assert x.tolist() == [sum(sum(range(i)) for i in range(0, n, 7)) for n in a.tolist()]


def test_scoped_names_do_not_meet() -> None:
    a = np.arange(64, dtype="u4")
    loop = "{ .reg .b32 t; .reg .pred p; mov.b32 t, %a; L: add.s32 t, t, -3; setp.gt.s32 p, t, 0; @p bra L;"
    loop += "add.s32 %r10, %r10, t; }"
    (x,) = apply(f"mov.b32 %r10, 0; {loop} {loop} mov.b32 %x, %r10;", [a], ["i4"])

    def one(v: int) -> int:
        v -= 3
        while v > 0:
            v -= 3
        return v

    assert x.tolist() == [2 * one(v) for v in a.tolist()]


def test_divergent_exit_and_barrier_of_the_rest() -> None:
    out = np.zeros(96, "u4")
    body = (
        THREAD
        + """setp.ge.u32 %q1, %r1, 70; @%q1 exit; st.shared.b32 [cell], %r1; bar.sync 0; ld.shared.b32 %r2, [cell];
    add.s32 %r2, %r2, 1; st.global.b32 [%rd1], %r2;"""
    )
    launch_kernel(module(body, 1, ".shared .align 4 .b8 cell[4];"), [out], block=(96, 1, 1), checks=False)
    assert out.tolist() == [70] * 70 + [0] * 26


def test_branch_table() -> None:
    a = np.arange(64, dtype="u4")
    code = """and.b32 %r9, %a, 3; T: .branchtargets A, B, C, B; brx.idx %r9, T;
    A: mov.b32 %x, 10; bra END; B: mov.b32 %x, 20; bra END; C: mov.b32 %x, 30; END:"""
    (x,) = apply(code, [a], ["u4"])
    assert x.tolist() == [[10, 20, 30, 20][v & 3] for v in range(64)]


def test_producers_and_consumers_with_named_barriers() -> None:
    """Warp 0 fills a buffer round after round, warp 1 sums it: two named barriers, arrive on one side, sync on the
    other."""
    out = np.zeros(32, "u4")
    body = """mov.u32 %r1, %tid.x; and.b32 %r9, %r1, 31; mov.u32 %r3, cell; shl.b32 %r4, %r9, 2; add.s32 %r5, %r3,
    %r4; mov.b32 %r6, 0; mov.b32 %r7, 0; setp.ge.u32 %q1, %r1, 32; @%q1 bra CONSUME;
    P: add.s32 %r8, %r6, %r9; st.shared.b32 [%r5], %r8; bar.arrive 1, 64; bar.sync 2, 64; add.s32 %r6, %r6, 1;
    setp.lt.u32 %q2, %r6, 10; @%q2 bra P; bra END; CONSUME: bar.sync 1, 64; xor.b32 %r10, %r4, 4; add.s32 %r11, %r3,
    %r10; ld.shared.b32 %r8, [%r11]; add.s32 %r7, %r7, %r8; bar.arrive 2, 64; add.s32 %r6, %r6, 1; setp.lt.u32 %q2,
    %r6, 10; @%q2 bra CONSUME; mad.wide.u32 %rd1, %r9, 4, %p0; st.global.b32 [%rd1], %r7; END:"""
    launch_kernel(module(body, 1, ".shared .align 4 .b8 cell[128];"), [out], block=(64, 1, 1))
    assert out.tolist() == [sum(i + (t ^ 1) for i in range(10)) for t in range(32)]


def test_barrier_reductions() -> None:
    out = np.zeros(128, "u4")
    body = (
        THREAD
        + """setp.lt.u32 %q1, %r1, 50; bar.red.popc.u32 %r2, 0, %q1; bar.red.and.pred %q2, 0, %q1; bar.red.or.pred
    %q3, 0, %q1; selp.b32 %r3, 1000, 0, %q2; selp.b32 %r4, 2000, 0, %q3; add.s32 %r2, %r2, %r3; add.s32 %r2, %r2, %r4;
    st.global.b32 [%rd1], %r2;"""
    )
    launch_kernel(module(body, 1), [out], block=(128, 1, 1))
    assert set(out.tolist()) == {2050}


def test_a_spinning_warp_lets_the_other_one_run() -> None:
    out = np.zeros(2, "u4")
    body = """mov.u32 %r1, %tid.x; setp.ge.u32 %q1, %r1, 32; @%q1 bra SETTER;
    SPIN: ld.acquire.gpu.global.b32 %r2, [%p0]; setp.eq.b32 %q2, %r2, 0; @%q2 bra SPIN; st.global.b32 [%p0+4], %r2;
    bra END; SETTER: st.release.gpu.global.b32 [%p0], 9; END:"""
    launch_kernel(module(body, 1), [out], block=(64, 1, 1))
    assert out.tolist() == [9, 9]


def test_deadlock_says_who_waits() -> None:
    body = "mov.u32 %r1, %tid.x; setp.lt.u32 %q1, %r1, 32; @%q1 bra A; bar.sync 1, 64; bra END; A: bar.sync 2, 64; END:"
    with pytest.raises(Deadlock) as error:
        launch_kernel(module(body, 0), [], block=(64, 1, 1))
    assert "warp 1 waits at barrier 1" in str(error.value) and "waits at barrier 2: `bar.sync 2, 64`" in str(
        error.value
    )
    assert "32 thread(s) of the CTA here, 64 wanted, 64 alive" in str(error.value)


def test_a_deadlock_names_every_warp_that_waits() -> None:
    """Of each CTA's 32 warps fourteen wait at barriers of their own, 17 at barrier 15; the last has exited."""
    body = """mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.u32 %q1, %r2, 31; @%q1 bra END;
    add.u32 %r2, %r2, 1; min.u32 %r2, %r2, 15; bar.sync %r2, 992; END:"""
    with pytest.raises(Deadlock) as error:
        launch_kernel(module(body, 0), [], block=(1024, 1, 1), grid=(2, 1, 1))
    text = str(error.value)
    for warp in range(14):
        assert f"  CTAs (0, 0, 0), (1, 0, 0), warp {warp} wait at barrier {warp + 1}: `bar.sync" in text
    assert "  CTAs (0, 0, 0), (1, 0, 0), warps 14-30 wait at barrier 15" in text
    assert "544 thread(s) of the CTA here, 992 wanted, 992 alive" in text
    assert "62 of 64 warps wait, 2 have exited" in text


@pytest.mark.parametrize("barrier", ["bar.sync 16;", "mov.u32 %r1, -1; bar.arrive %r1, 64;"])
def test_a_barrier_that_does_not_exist(barrier: str) -> None:
    with pytest.raises(BarrierMisuse, match="does not exist, a CTA has 16"):
        launch_kernel(module(barrier, 0), [], block=(64, 1, 1))


def test_step_limit() -> None:
    with pytest.raises(StepLimit, match=r"1001 blocks executed without an end.*step_limit=1000"):
        launch_kernel(module("L: add.s32 %r1, %r1, 1; bra L;", 0), [], step_limit=1000)


def test_a_loop_whose_state_never_comes_back_ends_at_the_instruction_limit() -> None:
    """It counts to 2³¹, too far to see the same state twice."""
    body = """mov.u32 %r1, 0;
    L: add.s32 %r1, %r1, 1; and.b32 %r2, %r1, 1; setp.eq.u32 %q1, %r2, 0; @%q1 bra M;
    add.s32 %r3, %r3, 2; add.s32 %r3, %r3, 3;
    M: setp.ne.u32 %q2, %r1, 0x80000000; @%q2 bra L;"""
    with pytest.raises(StepLimit) as error:
        launch_kernel(module(body, 0), [], instruction_limit=500)
    text = str(error.value)
    assert re.search(r"\d+ blocks executed without an end, 50\d instructions \(instruction_limit=500\)", text)
    assert re.search(r"in a loop of \d instructions, from `add.s32 %r1, %r1, 1.* to `@%q2 bra L", text)
    assert "raise instruction_limit" in text


@pytest.mark.parametrize(
    "code,why",
    [
        ("frobnicate.b32 %r1, %r2;", "does not know `frobnicate.b32`"),
        ("max.f32 %r1, %r2, %r3, %r4, %r5;", "takes 3 operands here, not 5"),
        ("add.s32 %r1, %r2;", "takes 3 operands here, not 2"),
        ("add.rn.s32 %r1, %r2, %r3;", "expected one of"),
        ("add.s32.wrong %r1, %r2, %r3;", "modifier .wrong of `add` is not modelled"),
        ("max.u32 %r1, %r2, %r3, %r4;", "takes 3 operands here, not 4"),
        ("add.s64 %rd1, %rd2, %r3;", "register %r3 has 32 bits, the instruction wants 64"),
        ("cvt.f32.f64 %r1, %rd1;", "a narrowing conversion needs a rounding mode"),
        ("cvt.rn.f32.f64 %r1, %r2;", "register %r2 has 32 bits"),
        ("cvt.rni.s32.f32 %r1, %rd2;", "register %rd2 has 64 bits"),
        ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16;", "sparse wgmma is not modelled"),
        ("call.uni (%r1), helper, (%r2);", "calls of device functions"),
        ("bra NOWHERE;", "label NOWHERE is not defined"),
    ],
)
def test_refused(code: str, why: str) -> None:
    with pytest.raises(UnsupportedInstruction) as error:
        launch_kernel(module(code, 0), [])
    assert why in str(error.value) and code.rstrip(";") in str(error.value) and "PTX line" in str(error.value)


def test_unreadable_text() -> None:
    with pytest.raises(PtxSyntaxError, match="got the undeclared %nowhere, expected a special"):
        Program.parse(module("mov.b32 %r1, %nowhere;", 0))
    with pytest.raises(PtxSyntaxError, match="got the end of the module, expected"):
        Program.parse(module("mov.b32 %r1, %r2;", 0)[:-20])


def test_launch_and_kernel_must_fit() -> None:
    program = Program.parse(module("ret;", 1).replace("{\n", ".reqntid 64, 1, 1\n{\n", 1))
    with pytest.raises(LaunchError, match="parameters of"):
        run(program, Launch("kernel", (1, 1, 1), (64, 1, 1), ()), GlobalMemory())
    with pytest.raises(LaunchError, match="compiled for CTAs of"):
        run(program, Launch("kernel", (1, 1, 1), (32, 1, 1), (bytes(8),)), GlobalMemory())
    with pytest.raises(LaunchError, match="no kernel 'other'"):
        run(program, Launch("other", (1, 1, 1), (64, 1, 1), (bytes(8),)), GlobalMemory())
    with pytest.raises(LaunchError, match="not a multiple of the cluster"):
        run(program, Launch("kernel", (3, 1, 1), (64, 1, 1), (bytes(8),), cluster=(2, 1, 1)), GlobalMemory())
    with pytest.raises(LaunchError, match="bytes of shared memory a CTA, an SM of sm_100a gives at most"):
        run(program, Launch("kernel", (1, 1, 1), (64, 1, 1), (bytes(8),), dynamic_smem=240000), GlobalMemory())


def test_line_information_is_in_errors() -> None:
    text = module(".loc 1 42 7 \nld.global.b32 %r1, [%p0+400];", 1).replace(
        ".visible", '.file 1 "/src/kernel.py"\n.visible'
    )
    from cute_nvfp4.sim import OutOfBounds

    with pytest.raises(OutOfBounds, match=r"/src/kernel.py:42"):
        launch_kernel(text, [np.zeros(4, "u4")])


def test_special_registers_in_three_dimensions() -> None:
    out = np.zeros(2 * 3 * 60, "u4")
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ctaid.x; mov.u32 %r5,
    %ctaid.y; mov.u32 %r6, %nctaid.x; mad.lo.u32 %r7, %r2, 10, %r1; mad.lo.u32 %r7, %r3, 20, %r7; mad.lo.u32 %r8, %r5,
    %r6, %r4; mad.lo.u32 %r9, %r8, 60, %r7; mad.wide.u32 %rd1, %r9, 4, %p0; mad.lo.u32 %r10, %r8, 1000, %r7;
    st.global.b32 [%rd1], %r10;"""
    launch_kernel(module(body, 1), [out], grid=(2, 3, 1), block=(10, 2, 3))
    assert out.tolist() == [1000 * c + t for c in range(6) for t in range(60)]


def test_trap_is_an_error() -> None:
    body = "mov.u32 %r1, %tid.x; setp.ne.u32 %q1, %r1, 3; @%q1 bra END; trap; END:"
    with pytest.raises(Trap, match="trap executed: `trap`"):
        launch_kernel(module(body, 0), [])


@pytest.mark.parametrize(
    "use",
    [
        "st.global.b32 [%p0], %r7;",
        "st.global.b32 [%rd7], %r1;",
        "ld.global.b32 %r1, [%rd7];",
        "@%q7 bra END; st.global.b32 [%p0], 1; END:",
    ],
)
def test_undefined_registers_that_matter(use: str) -> None:
    with pytest.raises(UndefinedRegister, match=r"register %(r|rd|q)7 has never been written"):
        launch_kernel(module(use, 1), [np.zeros(4, "u4")], checks=True)


def test_undefined_registers_that_do_not_matter() -> None:
    out = np.zeros(1, "u4")
    launch_kernel(module("prmt.b32 %r1, %r7, 5, 0x7654; st.global.b32 [%p0], %r1;", 1), [out], checks=True)
    assert out[0] == 5

"""The registers of a CTA: setmaxnreg waits for them, and a CTA that asks for more than it has is a deadlock."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import Deadlock, GlobalMemory, Launch, Program, adversarial, run
from cute_nvfp4.sim.machine.registers import registers_at_launch

ONE_CTA = ".maxntid 640, 1, 1 .minnctapersm 1"


def kernel(body: str, directives: str, index: str = "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 7;") -> str:
    """``body`` knows its thread %r1 and warpgroup %r2; every thread stores its index at the end."""
    store = "mad.wide.u32 %rd1, %r1, 4, %p0; st.global.b32 [%rd1], %r1;"
    text = module(f"{index} setp.eq.u32 %q0, %r2, 0; {body} {store}", 1)
    return text.replace(")\n{", f") {directives}\n{{", 1).replace("sm_100a", "sm_90a")


def roles(fewer: int, more: int) -> str:
    """The first warpgroup gives registers away, the others ask for more."""
    keeps, asks = f"setmaxnreg.dec.sync.aligned.u32 {fewer};", f"setmaxnreg.inc.sync.aligned.u32 {more};"
    return f"@%q0 bra LOAD; {asks} bra NEXT; LOAD: {keeps} NEXT:"


def ends(ptx: str, threads: int, **options) -> None:
    """Runs the kernel to its end."""
    out = np.zeros(threads, "u4")
    launch_kernel(ptx, [out], block=(threads, 1, 1), **options)
    assert (out == np.arange(threads)).all()


def test_a_cta_that_asks_for_more_registers_than_it_got_is_a_deadlock() -> None:
    with pytest.raises(Deadlock) as error:
        ends(kernel(roles(40, 112), ONE_CTA), 640)
    text = str(error.value)
    assert "at `setmaxnreg.inc.sync.aligned.u32 112`" in text
    assert "its threads have 96 and ask for 112; the pool of the CTA got 61440" in text
    assert "(96 for each of 640 threads), and 62464 are needed" in text


def test_a_cta_whose_registers_do_goes_on_under_every_schedule() -> None:
    for schedule in adversarial(3):
        ends(kernel(roles(24, 112), ONE_CTA), 640, schedule=schedule)


@pytest.mark.parametrize(
    ("threads", "directives", "fewer", "most"),
    [
        (384, ".maxntid 384, 1, 1 .minnctapersm 1", 40, 232),
        (384, ".reqntid 384, 1, 1 .minnctapersm 1", 24, 240),
        (256, ".reqntid 256, 1, 1 .maxnreg 128", 40, 216),
        (256, ".maxnreg 100", 40, 168),
        (256, ".maxntid 256, 1, 1 .minnctapersm 2", 24, 232),
        (256, ".maxntid 640, 1, 1 .minnctapersm 1", 40, 152),
    ],
)
def test_what_fits_is_what_the_cta_got(threads: int, directives: str, fewer: int, most: int) -> None:
    ends(kernel(roles(fewer, most), directives), threads)
    with pytest.raises(Deadlock, match="the pool of the CTA got"):
        ends(kernel(roles(fewer, most + 8), directives), threads)


@pytest.mark.parametrize("directives", ["", ".maxntid 640, 1, 1", ".reqntid 640, 1, 1", ".minnctapersm 1"])
def test_without_a_bound_the_instruction_does_nothing(directives: str) -> None:
    """ptxas: 'setmaxnreg' ignored; unable to determine register count at entry."""
    ends(kernel(roles(232, 240), directives), 640)


def test_a_warp_waits_until_others_have_done_their_work() -> None:
    """The first warpgroup works before it gives its registers away; each CTA has a pool of its own."""
    late = "@%q0 bra LOAD; setmaxnreg.inc.sync.aligned.u32 216; bar.arrive 1, 256; bra NEXT;"
    late += "LOAD: mov.u32 %r3, 0; WORK: add.u32 %r3, %r3, 1; setp.lt.u32 %q1, %r3, 200; @%q1 bra WORK;"
    late += "setmaxnreg.dec.sync.aligned.u32 40; bar.sync 1, 256; setmaxnreg.dec.sync.aligned.u32 24; NEXT:"
    index = "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 7; mov.u32 %r4, %ctaid.x; mad.lo.u32 %r1, %r4, 256, %r1;"
    out = np.zeros(768, "u4")
    ptx = kernel(late, ".reqntid 256, 1, 1 .maxnreg 128", index)
    launch_kernel(ptx, [out], block=(256, 1, 1), grid=(3, 1, 1))
    assert (out == np.arange(768)).all()


def test_the_compiled_count_goes_before_the_bound() -> None:
    """A GPU would have run 80 registers a thread, not the 96 that the directives allow."""
    out, memory = np.zeros(640, "u4"), GlobalMemory()
    memory.add(out, "out")
    program = Program.parse(kernel(roles(24, 112), ONE_CTA))
    launch = Launch("kernel", (1, 1, 1), (640, 1, 1), (int(out.ctypes.data).to_bytes(8, "little"),))
    run(program, launch, memory)
    with pytest.raises(Deadlock, match="got 51200"):
        run(program, dataclasses.replace(launch, registers=80), memory)


PTXAS = [(160, 2, 168), (160, 3, 128), (33, 7, 128), (288, 1, 168), (416, 1, 128), (480, 1, 128), (672, 1, 80)]
PTXAS += [(100, 3, 168), (384, 3, 56), (1024, 1, 64), (640, 1, 96), (384, 1, 168), (128, 1, 256)]


@pytest.mark.parametrize(("threads", "ctas", "registers"), PTXAS)
def test_the_bound_is_what_ptxas_gives(threads: int, ctas: int, registers: int) -> None:
    """As `ptxas -v` of CUDA 13.0 prints for a kernel that asks for 232 registers; 255 are 256 where they are given."""
    for kind, more in product(("maxntid", "reqntid"), ("", ".maxnreg 40")):
        program = Program.parse(kernel("", f".{kind} {threads}, 1, 1 .minnctapersm {ctas} {more}"))
        assert registers_at_launch(program.kernels["kernel"], 0) == (40 if more else registers)

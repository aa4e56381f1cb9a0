"""The clock: in which block an instruction of the machine code is issued, and which accesses find theirs."""

from __future__ import annotations

import numpy as np
from clock_lab import clocked, h200, needs_ptxas
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import Program
from cute_nvfp4.sim.clock import tools
from cute_nvfp4.sim.clock.loops import loops_around
from cute_nvfp4.sim.clock.matching import match
from cute_nvfp4.sim.clock.notes import Passes, Request
from cute_nvfp4.sim.clock.sass import Placed, Slot, numbered, read
from cute_nvfp4.sim.clock.steps import stepper


def test_a_block_lives_where_its_barrier_is():
    """ptxas has moved most of a block behind its barrier into the code of one warp, whose own barrier stays there: the
    others would wait for that one before they come to the first."""
    listed = [(0, "UCGABAR_ARV", 0), (1, "BAR", 1), *((2, "IADD3", 1),) * 5, (3, "LDS", 1), (4, "EXIT", 2)]
    placed = [
        Placed(Slot(base, base, "", source, 1, 7, 7, (), address=16 * n), segment)
        for n, (source, base, segment) in enumerate(listed)
    ]
    slots, holders, coverage = match(placed, [[0, 2], [1, 3], [4]], lambda chain, without: False)
    assert holders == (0, 1, 2) and [[s.base for s in block] for block in slots] == [
        ["UCGABAR_ARV"],
        ["BAR", *["IADD3"] * 5, "LDS"],
        ["EXIT"],
    ]
    assert coverage.moved == 5


def test_what_ptxas_puts_in_front_of_a_loop_is_issued_there():
    """Most of the loop's block 1 lies in front of the loop, where block 0 lives, and some of block 0 is made again in
    the loop: the first is issued once, and the loop keeps its own."""
    listed = [
        *((0, "MOV", 0, 0), (0, "ISETP", 0, 0), (0, "IADD3", 0, 0)),
        *((1, base, 1, 0) for base in ("LDC", "LEA", "SHF", "LOP3")),
        *((1, "UTMALDG", 2, 1), (0, "IADD3", 2, 1), (1, "UIADD3", 2, 1), (2, "EXIT", 3, 0)),
    ]
    placed = [
        Placed(Slot(base, base, "", source, 1, 7, 7, (), address=16 * n), segment, loops=loops)
        for n, (source, base, segment, loops) in enumerate(listed)
    ]
    slots, holders, coverage = match(placed, [[0], [1], [2]], lambda chain, without: chain == 1, [0, 1, 0])
    assert holders == (0, 1, 2) and [[s.base for s in block] for block in slots] == [
        ["MOV", "ISETP", "IADD3", "LDC", "LEA", "SHF", "LOP3"],
        ["UTMALDG", "UIADD3"],
        ["EXIT"],
    ]
    assert coverage.moved == 4 and coverage.copies == 1


def test_loops_of_code():
    """Node 2 loops through 3 in the loop of 1 and 4. Node 6 waits behind the code and goes back into its middle: it
    loops alone, and the code from there to it does not."""
    after = {0: {1}, 1: {2}, 2: {3, 6}, 3: {2, 4}, 4: {1, 5}, 5: set(), 6: {6, 3}, 7: {5}}
    around = loops_around(after, 0)
    assert [sorted(around[node]) for node in range(8)] == [[], [1], [1, 2], [1, 2], [1], [], [1, 2, 6], []]


@needs_ptxas
def test_machine_code_says_what_lies_in_a_loop():
    text = module(
        "mov.u32 %r1, 0; L: ld.volatile.global.u32 %r2, [%p0]; add.u32 %r3, %r3, %r2; add.u32 %r1, %r1, 1; "
        "setp.lt.u32 %q0, %r1, %r2; @%q0 bra L; st.global.u32 [%p0], %r3;",
        1,
    ).replace("sm_100a", "sm_90a")
    (kernel,) = Program.parse(text).kernels.values()
    cubin, _ = tools.assemble(numbered(text, kernel), "sm_90a")
    depth = {p.slot.base: p.loops for p in read(tools.disassemble(cubin), kernel.name)}
    assert (depth["LDG"], depth["STG"], depth["EXIT"]) == (1, 0, 0)


@needs_ptxas
def test_tensor_maps_are_made_of_words():
    """The machine code of tensormap.replace writes words and reads few; the lanes of a warp copy a map together."""
    clock = clocked("map")
    notes = [
        note for visits in clock.recorder.visits.values() for v in visits for n in v.happened.values() for note in n
    ]
    assert not any(isinstance(note, Passes) for note in notes)
    (copied,) = (note for note in notes if isinstance(note, Request))
    assert (copied.kind, copied.sectors) == ("store", 4)
    assert clock.timing().coverage["events"] == 1


def test_a_wait_for_scoreboards():
    """DEPBAR with a list waits for all of them; DEPBAR.LE for copies."""
    listed, copies = (
        Slot("DEPBAR", *words, 0, 1, 7, 7, ()) for words in (("DEPBAR", "{5,3,0}"), ("DEPBAR.LE", "SB0, 0x4"))
    )
    step = stepper(h200())
    assert (step(listed).kind, step(listed).waits) == ("plain", (5, 3, 0))
    assert (step(copies).kind, step(copies).waits) == ("copies_wait", ())


def test_local_memory_is_declared_for_the_assembler_too() -> None:
    """``.loc`` and ``.file`` are left out, for a place of our own; ``.local`` begins like one of them."""
    body = """.loc 1 5 3
        mov.u64 %rd1, depot; cvta.local.u64 %rd1, %rd1;
        .loc 1 6 3
        st.u32 [%rd1], 7; ld.u32 %r1, [%rd1]; st.global.u32 [%p0], %r1;"""
    text = module(body, 1, "\n.local .align 4 .b8 depot[16];\n")
    (kernel,) = Program.parse(text).kernels.values()
    out = numbered(text, kernel)
    assert (
        ".local .align 4 .b8 depot[16]" in out and ".loc 1 5 3" not in out and out.count(".loc 1 ") == len(kernel.code)
    )


@needs_ptxas
def test_a_kernel_with_local_memory_has_a_time() -> None:
    text = module(
        "mov.u64 %rd1, depot; cvta.local.u64 %rd1, %rd1; st.volatile.u32 [%rd1], 7; ld.volatile.u32 %r1, [%rd1]; "
        "st.global.u32 [%p0], %r1;",
        1,
        "\n.local .align 4 .b8 depot[16];\n",
    )
    out = np.zeros(1, "u4")
    result = launch_kernel(text.replace("sm_100a", "sm_90a"), [out], clock="h200")
    assert out[0] == 7 and result.timing.microseconds > 1

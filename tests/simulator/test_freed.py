"""The memory of a launch is freed with the last reference to it, without the cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from ptx_lab import launch_kernel, module
from support.gemm_problems import Case, make

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.shadow import Planes
from cute_nvfp4.sim.machine.wave import Wave
from cute_nvfp4.sim.observe.trace import Trace

LARGE = (Wave, Planes, Clocks)
"""Classes that own the memory of a wave, or refer to it."""
TURNS = """mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2;
mov.u32 %r6, %ctaid.x; mad.lo.u32 %r7, %r6, 512, %r2; cvt.u64.u32 %rd1, %r7; add.u64 %rd1, %p0, %rd1;
ld.global.b32 %r4, [%rd1]; st.shared.b32 [%r3], %r4; WAIT ld.shared.b32 %r5, [s]; st.global.b32 [%rd1], %r5;"""


@contextmanager
def nothing_left() -> Iterator[None]:
    """Asserts that no object of ``LARGE`` remains of the block, though nothing collects garbage in it."""
    gc.collect()
    before = {id(o) for o in gc.get_objects() if type(o) in LARGE}
    gc.disable()
    try:
        yield
        left = [type(o).__name__ for o in gc.get_objects() if type(o) in LARGE and id(o) not in before]
    finally:
        gc.enable()
    assert not left


def turn(wait: str = "bar.sync 0;", **options) -> None:
    """A word of each thread goes through shared memory."""
    text = module(TURNS.replace("WAIT", wait), 1, ".shared .align 4 .b8 s[512];")
    launch_kernel(text, [np.arange(512, dtype=np.uint32)], grid=(4, 1, 1), block=(128, 1, 1), **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"checks": True, "strict": True, "warps_per_wave": 4}, {"counters": True}, {"clock": "b200"}],
    ids=lambda options: " ".join(options) or "plain",
)
def test_a_launch(options: dict) -> None:
    with nothing_left():
        turn(**options)


def test_a_trace_keeps_no_wave() -> None:
    trace = Trace()
    with nothing_left():
        turn(trace=trace)


@pytest.mark.parametrize(("wait", "text"), [("", "[race-in-warp]"), ("bar.sync 0, 256;", "nothing can run")])
def test_a_launch_that_stops(wait: str, text: str) -> None:
    """The error, which lives on, keeps nothing either."""
    with nothing_left():
        with pytest.raises(SimError) as caught:
            turn(wait, checks=True, strict=True)
    assert text in str(caught.value)


def test_a_poll_that_no_loop_repeats() -> None:
    poll = "mbarrier.init.shared.b64 [s], 1; mbarrier.test_wait.parity.shared.b64 %q1, [s], 1;"
    with nothing_left():
        launch_kernel(module(poll, 0, ".shared .align 8 .b8 s[8];"), [], block=(1, 1, 1), checks=True)


def test_a_gemm() -> None:
    with nothing_left():
        make(Case(130, 136, 544)).run()

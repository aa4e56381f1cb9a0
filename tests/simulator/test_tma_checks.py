"""Hazards of tensor copies: a kernel that is in order, and the same with one step left out.

A tile of 32 x 64 bytes is loaded; each warp takes words from where the other one puts its own; the tile is stored, and
overwritten by the next one.
"""

from __future__ import annotations

import numpy as np
import pytest
import tma_lab as lab
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import BrokenRule, CopiesInFlight, MissingProxyFence, Race, Schedule, UninitializedRead
from cute_nvfp4.sim.errors import Deadlock
from cute_nvfp4.sim.machine.schedule import adversarial
from cute_nvfp4.sim.tma import TensorMap

MEMORY = ".shared .align 1024 .b8 sm[2048]; .shared .align 8 .b64 bar; .reg .b32 %tile;"
BOX = TensorMap(0, "u32", (16, 64), (64,), (16, 32), (1, 1), "64B")
LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r4], [%p0, {0, %tile}], [%r5];"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%p1, {0, %tile}], [%r4];"
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 2048;"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %q3, [%r5], %r12; @!%q3 bra W;"
BODY = f"""
    mov.u32 %r3, %tid.x; mov.u32 %r4, sm; mov.u32 %r5, bar; setp.eq.u32 %q0, %r3, 0; mov.u32 %tile, 0; mov.u32 %r12, 0;
    shl.b32 %r6, %r3, 4; add.u32 %r7, %r4, %r6; xor.b32 %r6, %r6, 512; add.u32 %r10, %r4, %r6;
    @%q0 mbarrier.init.shared.b64 [%r5], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
    T: @!%q0 bra W; {EXPECT} {LOAD}
    {WAIT}
    ld.shared.b32 %r8, [%r10]; ld.shared.b32 %r9, [%r10+1024]; bar.sync 2;
    st.shared.b32 [%r7], %r8; st.shared.b32 [%r7+1024], %r9;
    fence.proxy.async.shared::cta; bar.sync 1;
    @!%q0 bra N; {STORE} cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    N: add.u32 %tile, %tile, 32; xor.b32 %r12, %r12, 1; setp.lt.u32 %q1, %tile, 64; @%q1 bra T;
    cp.async.bulk.wait_group 0;
"""
HOW = [Schedule(), *adversarial(3)]


def go(body: str, how: Schedule | None = None) -> np.ndarray:
    source, out = (lab.aligned((np.arange(1024, dtype=np.uint32) * k).tobytes()) for k in (1, 0))
    maps = [lab.encoded(BOX, source), lab.encoded(BOX, out)]
    launch_kernel(module(body, 4, MEMORY), [*maps, source, out], block=(64, 1, 1), checks=True, schedule=how or HOW[0])
    return out.view("u4")


@pytest.mark.parametrize("how", HOW, ids=range(len(HOW)))
def test_the_kernel_in_order(how):
    want = np.arange(1024, dtype=np.uint32).reshape(2, 2, 2, 32, 4)
    # Of each half of a tile, the first words of the first and the last 32 units are exchanged. The swizzle moves units
    # inside of 512 bytes, in the same way there and back.
    want[..., 0] = want[:, :, ::-1, :, 0].copy()
    np.testing.assert_array_equal(go(BODY, how), want.ravel())


@pytest.mark.parametrize(
    ("hazard", "text", "drop", "put"),
    [
        (Race, "mbarrier", WAIT, "W:"),
        ((Race, Deadlock, CopiesInFlight), "mbarrier", EXPECT, "mbarrier.arrive.shared.b64 _, [%r5];"),
        (Deadlock, "64 bytes still to come", ", 2048;", ", 2112;"),
        (MissingProxyFence, "asynchronous proxy", "fence.proxy.async.shared::cta; bar", "bar"),
        (BrokenRule, "fence.mbarrier_init", "fence.mbarrier_init.release.cluster;", ""),
        (Race, "cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group.read 0;", ""),
        (Race, "cp.async.bulk.wait_group.read", "wait_group.read 0;", "wait_group.read 1;"),
        (Race, "cp.async.bulk.wait_group.read", "cp.async.bulk.commit_group; cp", "cp"),
        (Race, "nothing orders", "bar.sync 1;", ""),
        (Race, "nothing orders", "bar.sync 2;", ""),
        (Race, "nothing orders", "bar.sync 0;", ""),
    ],
)
def test_one_step_left_out(hazard, text, drop, put):
    assert BODY.count(drop) == 1
    for how in HOW:
        with pytest.raises(hazard, match=text):
            go(BODY.replace(drop, put), how)


def test_a_cta_waits_for_its_last_store():
    one = BODY.replace("%tile, 64;", "%tile, 32;").replace("cp.async.bulk.wait_group 0;", "")
    go(one)
    with pytest.raises(CopiesInFlight):
        go(one.replace("cp.async.bulk.wait_group.read 0;", ""))


def test_a_tile_that_nobody_loaded():
    with pytest.raises(UninitializedRead):
        go(BODY.replace(EXPECT, "mbarrier.arrive.shared.b64 _, [%r5];").replace(LOAD, ""))

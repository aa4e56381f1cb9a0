"""Cluster launch control: a persistent grid steals the clusters that have not started."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module, wait

from cute_nvfp4.sim import adversarial

BODY = (
    """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mov.u32 %r20, bar; mov.u32 %r21, resp; mov.b32 %r6, 0;
    mov.u32 %r22, %cluster_ctarank;
    setp.ne.u32 %q1, %r2, 0; @%q1 bra LOOP; mbarrier.init.shared.b64 [bar], 1;
    fence.mbarrier_init.release.cluster; LOOP: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mad.wide.u32 %rd1, %r1, 4, %p0; @%q1 bra ASK; atom.global.add.u32 %r5, [%rd1], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
    ASK: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%q1 bra GOT; setp.ne.u32 %q3, %r22, 0; @%q3 bra GOT;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%r21],
    [%r20]; GOT:"""
    + wait("%r20", "%r6")
    + """xor.b32 %r6, %r6, 1; ld.shared.v2.b64 {%rd2, %rd3}, [resp];
    { .reg .b128 h; mov.b128 h, {%rd2, %rd3}; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %q2, h;
    @%q2 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, h; }
    add.s32 %r1, %r1, %r22; @%q2 bra LOOP;"""
)


@pytest.mark.parametrize("schedule", adversarial(6), ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_every_cluster_runs_once(size: int, schedule) -> None:
    """16 CTAs of which few are resident: each is worked on exactly once, whoever does it."""
    done = np.zeros(16, "u4")
    declared = ".shared .align 8 .b64 bar; .shared .align 16 .b8 resp[16];"
    launch_kernel(
        module(BODY, 1, declared),
        [done],
        grid=(16, 1, 1),
        block=(32, 1, 1),
        cluster=(size, 1, 1),
        schedule=schedule,
        warps_per_wave=4,
    )
    assert done.tolist() == [1] * 16

"""Stores of two CTAs into the same 16 bytes of a third one's memory: a race in one half, and none in two halves."""

import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import Race

MEMORY = ".shared .align 1024 .b8 sm[1024]; .shared .align 8 .b64 bar;"
STORES = """
    mov.u32 %r0, sm; mov.u32 %r1, bar; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %q0, %r2, 0;
    setp.ne.u32 %q1, %r3, 0; @%q0 bra S; mbarrier.init.shared.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster; @%q1 bra S; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    S: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @!%q1 bra R; mov.u32 %r4, 0; mapa.shared::cluster.u32 %r5, %r0, %r4; mapa.shared::cluster.u32 %r6, %r1, %r4;
    shl.b32 %r7, %r2, 4; add.u32 %r5, %r5, %r7; sub.u32 %r7, %r3, 1; shl.b32 %r7, %r7, 3; add.u32 %r5, %r5, %r7;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r5], {%r2, %r3}, [%r6]; bra E;
    R: W: mbarrier.try_wait.parity.shared.b64 %q2, [%r1], 0; @!%q2 bra W;
    shl.b32 %r7, %r2, 4; add.u32 %r5, %r0, %r7; ld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r5];
    cvt.u64.u32 %rd1, %r7; add.s64 %rd1, %rd1, %p0; st.global.v4.b32 [%rd1], {%r8, %r9, %r10, %r11};
    E: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""


def go(body):
    out = np.zeros(256, np.uint32)
    launch_kernel(module(body, 1, MEMORY), [out], grid=(3, 1, 1), cluster=(3, 1, 1), checks=True)
    return out[:128].reshape(32, 4).tolist()


def test_values_stored_beside_each_other():
    assert go(STORES) == [[j, 1, j, 2] for j in range(32)]
    with pytest.raises(Race, match=r"st\.async"):
        go(STORES.replace("shl.b32 %r7, %r7, 3;", "mov.u32 %r7, 0;"))

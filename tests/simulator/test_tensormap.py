"""Tensor maps that the device changes: replaced in shared memory, copied to global memory, used."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module
from tma_lab import aligned

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim.tma import TensorMap

DECLARE = ".shared .align 128 .b8 sm[1024]; .shared .align 128 .b8 map[128]; .shared .align 8 .b64 bar;"


def run(
    replacements: str, initial: TensorMap, data: np.ndarray, coords: str, size: int
) -> tuple[np.ndarray, TensorMap]:
    """The map is copied to shared memory, changed there, copied to global memory, and a box is loaded with it."""
    held, out = aligned(initial.encode()), aligned(bytes(1024))
    body = f"""
    mov.u32 %r0, sm; mov.u32 %r1, bar; mov.u32 %r2, %tid.x; setp.ne.u32 %q0, %r2, 0; mov.u32 %r4, map;
    shl.b32 %r6, %r2, 2; cvt.u64.u32 %rd6, %r6; add.s64 %rd7, %rd6, %p0; ld.global.b32 %r8, [%rd7];
    add.u32 %r7, %r4, %r6; st.shared.b32 [%r7], %r8; bar.warp.sync -1;
    @%q0 bra X; mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; {replacements}
    X: bar.warp.sync -1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%p0], [%r4], 128;
    fence.proxy.tensormap::generic.acquire.gpu [%p0], 128;
    @%q0 bra W; mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], {size};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r0], [%p0, {coords}], [%r1];
    W: mbarrier.try_wait.parity.shared.b64 %q1, [%r1], 0; @!%q1 bra W;
    mov.u32 %r9, 0;
    D: add.u32 %r10, %r6, %r9; add.u32 %r11, %r0, %r10; ld.shared.b32 %r12, [%r11]; cvt.u64.u32 %rd8, %r10;
    add.s64 %rd8, %rd8, %p1; st.global.b32 [%rd8], %r12; add.u32 %r9, %r9, 128; setp.lt.u32 %q2, %r9, 1024; @%q2 bra D;
    """
    # All of the buffer is shown, written or not.
    launch_kernel(module(body, 3, DECLARE), [held, out, data], checks=False)
    return out, TensorMap.decode(held.tobytes())


def test_a_changed_map_is_used():
    """Address, sizes and stride: rows beyond the new size are out of bounds."""
    data = aligned(np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8).tobytes())
    initial = TensorMap(0, "f16", (16, 2), (64,), (16, 8), (1, 1))
    out, after = run(
        f"""mov.u64 %rd9, {data.ctypes.data}; tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r4], %rd9;
        mov.u32 %r9, 5; tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r4], 1, %r9;
        mov.u64 %rd9, 96; tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r4], 0, %rd9;""",
        initial,
        data,
        "{0, 1}",
        256,
    )
    want = np.zeros((8, 32), np.uint8)
    want[:4] = [data[96 * r : 96 * r + 32] for r in range(1, 5)]
    np.testing.assert_array_equal(out[:256].reshape(8, 32), want)
    assert after == TensorMap(data.ctypes.data, "f16", (16, 5), (96,), (16, 8), (1, 1))


def test_fields_by_name():
    data = aligned(bytes(4096))
    initial = TensorMap(data.ctypes.data, "f16", (16, 8), (64,), (16, 8), (1, 1))
    _, after = run(
        """tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r4], 11;
        tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r4], 0, 4;
        tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%r4], 1, 2;
        tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r4], 2;
        tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%r4], 1;""",
        initial,
        data,
        "{0, 0}",
        64,
    )
    assert after == TensorMap(data.ctypes.data, "tf32", (16, 8), (64,), (4, 8), (1, 2), "64B", nan_fill=True)


def test_types_and_swizzles_of_sm_100a():
    """A map of padded 4-bit elements, whose rows of 128 take 64 bytes of memory and 128 of shared memory."""
    data = aligned(np.random.default_rng(1).integers(0, 256, 4096, dtype=np.uint8).tobytes())
    initial = TensorMap(data.ctypes.data, "b4x16", (128, 8), (64,), (128, 8), (1, 1), "128B")
    out, after = run(
        """tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r4], 14;
        tensormap.replace.tile.swizzle_atomicity.shared::cta.b1024.b32 [%r4], 1;""",
        initial,
        data,
        "{0, 0}",
        512,
    )
    assert after == TensorMap(data.ctypes.data, "b4x16_p64", (128, 8), (64,), (128, 8), (1, 1), swizzle="128B_ATOM_32B")
    for row in range(8):
        for group in range(8):
            at = 128 * row + (16 * group ^ row % 4 << 5)
            np.testing.assert_array_equal(out[at : at + 8], data[64 * row + 8 * group :][:8])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("constant below 16", "tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r4], 16;"),
        ("constant below 4", "tensormap.replace.tile.swizzle_atomicity.shared::cta.b1024.b32 [%r4], 4;"),
        ("atomicity 1 goes with", "tensormap.replace.tile.swizzle_atomicity.shared::cta.b1024.b32 [%r4], 1;"),
        ("atomicity 3, which", "tensormap.replace.tile.swizzle_atomicity.shared::cta.b1024.b32 [%r4], 3;"),
        ("ordinal", "tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r4], 4, %rd9;"),
        ("not a multiple of 128", "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r4+64], 1;"),
        ("3 dimensions, the instruction 2", "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r4], 2;"),
        ("bytes of 64 dimensions|no tensor map|not a multiple of 16", "st.shared.b32 [%r4+28], %r8;"),
    ],
)
def test_what_is_refused(text, code):
    data = aligned(bytes(4096))
    initial = TensorMap(data.ctypes.data, "f16", (16, 8), (64,), (16, 8), (1, 1))
    if code.startswith("st."):
        code = "mov.u32 %r8, 0x01000000; st.shared.b32 [%r4+52], %r8;"
    with pytest.raises(SimError, match=text):
        run(code, initial, data, "{0, 0}", 256)

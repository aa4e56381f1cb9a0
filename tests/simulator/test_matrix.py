"""mma.sync, ldmatrix and stmatrix: fragments by the formulas of the ISA, products by exact integers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import InvalidLanes

#: type -> (numpy type of an element, bits)
TYPES = {
    "f16": (np.float16, 16),
    "bf16": (ml_dtypes.bfloat16, 16),
    "e4m3": (ml_dtypes.float8_e4m3fn, 8),
    "e5m2": (ml_dtypes.float8_e5m2, 8),
    "s8": (np.int8, 8),
    "u8": (np.uint8, 8),
    "tf32": (np.float32, 32),
}


def position_a(lane: int, i: int, bits: int) -> tuple[int, int]:
    """Row and column of element ``i`` of A (ISA, figures of m16n8k8 tf32, m16n8k16 16-bit, m16n8k32 8-bit)."""
    group, t = lane >> 2, lane & 3
    if bits == 32:
        return group + 8 * (i % 2), t + 4 * (i // 2)
    if bits == 16:
        return (group if i < 2 or 4 <= i < 6 else group + 8), t * 2 + (i & 1) + (8 if i >= 4 else 0)
    return (group if i < 4 or 8 <= i < 12 else group + 8), t * 4 + (i & 3) + (16 if i >= 8 else 0)


def position_b(lane: int, i: int, bits: int) -> tuple[int, int]:
    group, t = lane >> 2, lane & 3
    if bits == 32:
        return t + 4 * i, group
    if bits == 16:
        return t * 2 + (i & 1) + (8 if i >= 2 else 0), group
    return t * 4 + (i & 3) + (16 if i >= 4 else 0), group


def random_matrix(rng, shape, name: str) -> np.ndarray:
    """Small integers, exact in every type, so that any order of summation gives the same result."""
    dtype, _ = TYPES[name]
    if name in ("s8", "u8"):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
    return rng.integers(-6, 7, shape).astype("f4").astype(dtype)


def registers(matrix: np.ndarray, position, count: int, bits: int) -> np.ndarray:
    """(32, count) words of a fragment."""
    out = np.zeros((32, count * 32 // bits), matrix.dtype)
    for lane in range(32):
        for i in range(out.shape[1]):
            out[lane, i] = matrix[position(lane, i, bits)]
    return np.ascontiguousarray(out).view("u4")


@pytest.mark.parametrize(
    "shape,a,b,d",
    [
        ("m16n8k16", "f16", "f16", "f32"),
        ("m16n8k16", "bf16", "bf16", "f32"),
        ("m16n8k16", "f16", "f16", "f16"),
        ("m16n8k32", "e4m3", "e4m3", "f32"),
        ("m16n8k32", "e5m2", "e4m3", "f32"),
        ("m16n8k32", "s8", "s8", "s32"),
        ("m16n8k32", "u8", "s8", "s32"),
        ("m16n8k8", "tf32", "tf32", "f32"),
    ],
)
def test_mma(shape: str, a: str, b: str, d: str) -> None:
    rng, k, bits = np.random.default_rng(1), int(shape.split("k")[1]), TYPES[a][1]
    ma, mb = random_matrix(rng, (16, k), a), random_matrix(rng, (k, 8), b)
    c = rng.integers(-20, 20, (16, 8)).astype({"f32": "f4", "s32": "i4", "f16": "f2"}[d])
    ra, rb = registers(ma, position_a, 4, bits), registers(mb, position_b, 2, bits)
    at = lambda lane, i: ((lane >> 2) + 8 * (i >> 1), (lane & 3) * 2 + (i & 1))  # noqa: E731
    rc = np.array([[c[at(lane, i)] for i in range(4)] for lane in range(32)], c.dtype).view("u4")
    words = rc.shape[1]
    out = np.zeros((32, words), "u4")
    body = "mov.u32 %r30, %tid.x; mad.wide.u32 %rd1, %r30, 16, %p0; mad.wide.u32 %rd2, %r30, 8, %p1;"
    body += f"mad.wide.u32 %rd3, %r30, {4 * words}, %p2; mad.wide.u32 %rd4, %r30, {4 * words}, %p3;"
    body += "".join(f"ld.global.b32 %r{j}, [%rd1+{4 * j}];" for j in range(4))
    body += "".join(f"ld.global.b32 %r{4 + j}, [%rd2+{4 * j}];" for j in range(2))
    body += "".join(f"ld.global.b32 %r{6 + j}, [%rd3+{4 * j}];" for j in range(words))
    acc, res = (", ".join(f"%r{s + j}" for j in range(words)) for s in (6, 10))
    body += (
        f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{d} {{{res}}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{{acc}}};"
    )
    body += "".join(f"st.global.b32 [%rd4+{4 * j}], %r{10 + j};" for j in range(words))
    launch_kernel(module(body, 4), [ra, rb, rc, out])
    want = ma.astype("f8") @ mb.astype("f8") + c
    got = out.view(c.dtype)
    assert all(got[lane, i] == want[at(lane, i)] for lane in range(32) for i in range(4))


def test_mma_of_some_lanes_is_an_error() -> None:
    body = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r0,%r1,%r2,%r3},"
    body += "{%r4,%r5,%r6,%r7}, {%r8,%r9}, {%r0,%r1,%r2,%r3};"
    with pytest.raises(InvalidLanes, match="all 32 lanes must"):
        launch_kernel(module(body, 0), [], block=(16, 1, 1))


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count: int, trans: str) -> None:
    tiles = np.random.default_rng(2).integers(0, 65536, (count, 8, 8), dtype="u2")
    fragments, back = np.zeros((32, count), "u4"), np.zeros((count, 8, 8), "u2")
    regs = "{" + ", ".join(f"%r{10 + j}" for j in range(count)) + "}"
    words = count * 32
    copy = "".join(f"ld.global.b32 %r2, [%p0+{4 * j}]; st.shared.b32 [tile+{4 * j}], %r2;" for j in range(words))
    store = "".join(f"st.global.b32 [%rd2+{4 * j}], %r{10 + j};" for j in range(count))
    clear = "".join(f"st.shared.b32 [tile+{4 * j}], 0;" for j in range(words))
    out = "".join(f"ld.shared.b32 %r2, [tile+{4 * j}]; st.global.b32 [%p2+{4 * j}], %r2;" for j in range(words))
    body = f"""mov.u32 %r1, %tid.x; mad.wide.u32 %rd2, %r1, {4 * count}, %p1; {copy} bar.warp.sync -1;
    mov.u32 %r3, tile; and.b32 %r4, %r1, {8 * count - 1}; mad.lo.u32 %r5, %r4, 16, %r3;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {regs}, [%r5]; {store} bar.warp.sync -1; {clear}
    bar.warp.sync -1; stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r5], {regs}; bar.warp.sync -1; {out}"""
    launch_kernel(module(body, 3, ".shared .align 16 .b8 tile[512];"), [tiles, fragments, back])
    for j, tile in enumerate(tiles):
        matrix = tile.T if trans else tile
        for lane in range(32):
            low, high = matrix[lane >> 2, 2 * (lane & 3)], matrix[lane >> 2, 2 * (lane & 3) + 1]
            assert fragments[lane, j] == int(high) << 16 | int(low)
    assert np.array_equal(back, tiles)


def test_cp_async_copies_and_fills_with_zeros() -> None:
    data, out = np.random.default_rng(3).integers(0, 2**32, 128, dtype="u4"), np.zeros(128, "u4")
    body = """mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 16, %p0; mad.wide.u32 %rd2, %r1, 16, %p1; mov.u32 %r2,
    tile; mad.lo.u32 %r3, %r1, 16, %r2; min.u32 %r4, %r1, 16; cp.async.cg.shared.global.L2::128B [%r3], [%rd1], 16,
    %r4; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r3];
    st.global.v4.b32 [%rd2], {%r5, %r6, %r7, %r8};"""
    start = np.zeros(600, "u1")
    at = -start.ctypes.data % 16
    source = start[at : at + 512].view("u4")
    source[:] = data
    room = np.zeros(600, "u1")
    at = -room.ctypes.data % 16
    target = room[at : at + 512].view("u4")
    launch_kernel(module(body, 2, ".shared .align 16 .b8 tile[512];"), [source, target])
    want = data.view("u1").reshape(32, 16).copy()
    for lane in range(32):
        want[lane, min(lane, 16) :] = 0
    assert np.array_equal(target.view("u1").reshape(32, 16), want)
    del out

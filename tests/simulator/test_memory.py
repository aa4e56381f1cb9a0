"""Loads, stores, atomics, shared and local memory, and every memory error."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import MbarrierMisuse, Misaligned, OutOfBounds, ReadOnlyWrite

ADDRESS = "mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, {0}, %p0; mad.wide.u32 %rd2, %r1, {0}, %p1;"


def aligned(count: int, dtype: str, align: int = 128) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    raw = np.zeros(count * size + align, "u1")
    start = -raw.ctypes.data % align
    return raw[start : start + count * size].view(dtype)


def filled(count: int, dtype: str = "u4") -> np.ndarray:
    out = aligned(count, dtype)
    out[:] = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, count, dtype=dtype)
    return out


@pytest.mark.parametrize(
    "load,store,unit",
    [
        ("ld.global.nc.L1::no_allocate.L2::evict_first.L2::256B.v8.b32", "st.global.v8.b32", 8),
        ("ld.global.L1::evict_last.v4.b32", "st.global.L1::no_allocate.v4.b32", 4),
        ("ld.relaxed.gpu.global.v2.b32", "st.release.sys.global.v2.b32", 2),
        ("ld.volatile.global.b32", "st.volatile.global.b32", 1),
    ],
)
def test_vectors(load: str, store: str, unit: int) -> None:
    a, b = filled(32 * unit), aligned(32 * unit, "u4")
    regs = "{" + ", ".join(f"%r{10 + j}" for j in range(unit)) + "}" if unit > 1 else "%r10"
    body = ADDRESS.format(4 * unit) + f"{load} {regs}, [%rd1]; {store} [%rd2], {regs};"
    result = launch_kernel(module(body, 2), [a, b], counters=True)
    assert np.array_equal(a, b)
    read, written = result.memory
    assert (
        read.width == written.width == 4 * unit and read.sectors == written.sectors == 4 * unit and read.requests == 1
    )
    if unit == 8:
        assert read.policy == ("nc", "L1::no_allocate", "L2::evict_first", "L2::256B")


def test_v4_b64_is_256_bits_and_v4_b64_shared_is_refused() -> None:
    from cute_nvfp4.sim import UnsupportedInstruction

    a, b = filled(128, "u8"), aligned(128, "u8")
    body = (
        ADDRESS.format(32)
        + "ld.global.v4.b64 {%rd5, %rd6, %rd7, %rd8}, [%rd1]; st.global.v4.b64 [%rd2], {%rd5, %rd6, %rd7, %rd8};"
    )
    launch_kernel(module(body, 2), [a, b])
    assert np.array_equal(a, b)
    with pytest.raises(UnsupportedInstruction, match=r"wider than an access of \.shared can be"):
        launch_kernel(module("ld.shared.v4.b64 {%rd5, %rd6, %rd7, %rd8}, [%r1];", 0), [])


def test_narrow_loads_extend() -> None:
    a, b = filled(32, "u1"), aligned(64, "i4")
    body = (
        "mov.u32 %r1, %tid.x; cvt.u64.u32 %rd3, %r1; add.s64 %rd1, %p0, %rd3; mad.wide.u32 %rd2, %r1, 8, %p1;"
        "ld.global.s8 %r2, [%rd1]; ld.global.u8 %r3, [%rd1]; st.global.b32 [%rd2], %r2; st.global.b32 [%rd2+4], %r3;"
    )
    launch_kernel(module(body, 2), [a, b])
    assert b[::2].tolist() == a.view("i1").tolist() and b[1::2].tolist() == a.tolist()


def test_shared_memory_generic_addresses_and_barriers() -> None:
    a, b = filled(256), aligned(256, "u4")
    body = """mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %p0; mad.wide.u32 %rd2, %r1, 4, %p1; ld.global.b32 %r2,
    [%rd1]; mov.u32 %r3, buffer; shl.b32 %r4, %r1, 2; add.s32 %r5, %r3, %r4; st.shared.b32 [%r5], %r2; bar.sync 0;
    sub.s32 %r6, 1020, %r4; add.s32 %r7, %r3, %r6; cvt.u64.u32 %rd3, %r7; cvta.shared.u64 %rd4, %rd3;
    ld.b32 %r8, [%rd4]; st.b32 [%rd2], %r8;"""
    launch_kernel(module(body, 2, ".shared .align 16 .b8 buffer[1024];"), [a, b], block=(256, 1, 1))
    assert np.array_equal(b, a[::-1])


def test_dynamic_shared_memory_is_per_cta() -> None:
    out = aligned(64, "u4")
    text = module(
        """mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, dynamic; shl.b32 %r4, %r1, 2; add.s32 %r5, %r3, %r4;
        mad.lo.u32 %r6, %r2, 100, %r1; st.shared.b32 [%r5], %r6; bar.sync 0; xor.b32 %r7, %r4, 124; add.s32 %r5, %r3,
        %r7; ld.shared.b32 %r8, [%r5]; mad.lo.u32 %r9, %r2, 32, %r1; mad.wide.u32 %rd1, %r9, 4, %p0; st.global.b32
        [%rd1], %r8;""",
        1,
    ).replace(".visible", ".extern .shared .align 1024 .b8 dynamic[];\n.visible")
    launch_kernel(text, [out], grid=(2, 1, 1), smem=128)
    assert out.tolist() == [31 - t for t in range(32)] + [131 - t for t in range(32)]


def test_local_memory_is_per_thread() -> None:
    out = aligned(64, "u4")
    body = """mov.u32 %r1, %tid.x; mov.u64 %rd3, stack; mul.lo.u32 %r2, %r1, 7; st.local.b32 [%rd3+4], %r2;
    st.local.b32 [stack], %r1; and.b32 %r4, %r1, 1; mul.wide.u32 %rd4, %r4, 4; add.s64 %rd5, %rd3, %rd4; ld.local.b32
    %r3, [%rd5]; mad.wide.u32 %rd1, %r1, 4, %p0; st.global.b32 [%rd1], %r3;"""
    launch_kernel(module(body, 1, ".local .align 8 .b8 stack[8];"), [out], block=(64, 1, 1))
    assert out.tolist() == [t * 7 if t & 1 else t for t in range(64)]


def test_of_several_stores_to_one_address_the_last_lane_wins() -> None:
    out = aligned(4, "u4")
    launch_kernel(module("mov.u32 %r1, %tid.x; st.global.b32 [%p0], %r1;", 1), [out], block=(128, 1, 1), checks=False)
    assert out.tolist() == [127, 0, 0, 0]


@pytest.mark.parametrize("space", ["global", "shared::cta"])
def test_atomics(space: str) -> None:
    """Order is (warp, lane): each op starts from 5 and meets every lane of 64 once."""
    ops = {
        "add.u32": lambda m, v: (m + v) & 0xFFFFFFFF,
        "min.s32": min,
        "max.s32": max,
        "and.b32": lambda m, v: m & v,
        "or.b32": lambda m, v: m | v,
        "xor.b32": lambda m, v: m ^ v,
        "exch.b32": lambda m, v: v,
        "inc.u32": lambda m, v: 0 if m >= v else m + 1,
        "dec.u32": lambda m, v: v if m == 0 or m > v else m - 1,
    }
    for op, fn in ops.items():
        cell, old = aligned(1, "u4"), aligned(64, "u4")
        cell[0] = 5
        to = "%p0" if space == "global" else "%r20"
        before = "ld.global.b32 %r21, [%p0]; mov.u32 %r20, buffer; st.shared.b32 [%r20], %r21; bar.sync 0;"
        after = "bar.sync 0; ld.shared.b32 %r22, [%r20]; st.global.b32 [%p0], %r22;"
        body = ADDRESS.format(4) + "add.s32 %r3, %r1, 9;" + (before if space != "global" else "")
        body += f"atom.relaxed.gpu.{space}.{op} %r2, [{to}], %r3; st.global.b32 [%rd2], %r2;" + (
            after if space != "global" else ""
        )
        launch_kernel(module(body, 2, ".shared .align 4 .b8 buffer[4];"), [cell, old], block=(64, 1, 1))
        value, seen = 5, []
        for v in range(9, 73):
            seen.append(value)
            value = fn(value, v)
        assert old.tolist() == seen and cell[0] == value, op


def test_float_and_packed_reductions_and_cas() -> None:
    f, h, c = aligned(2, "f4"), aligned(2, "f2"), aligned(1, "u4")
    f[:] = 0
    h[:] = 0
    body = """mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %r2, %r1; red.global.add.f32 [%p0], %r2; red.global.v2.f32.add
    [%p0], {%r2, %r2}; mov.b32 %r3, 0x40003C00; red.global.add.noftz.f16x2 [%p1], %r3; atom.global.cas.b32 %r4, [%p2],
    %r1, 77;"""
    body = body.replace("red.global.v2.f32.add", "red.global.add.v2.f32")
    launch_kernel(module(body, 3), [f, h, c])
    assert f.tolist() == [2 * sum(range(32)), sum(range(32))] and h.tolist() == [32.0, 64.0] and c[0] == 77


def test_misaligned_names_the_thread() -> None:
    a, b = filled(64), aligned(64, "u4")
    body = ADDRESS.format(4) + "ld.global.v2.b32 {%r2, %r3}, [%rd1]; st.global.b32 [%rd2], %r2;"
    with pytest.raises(
        Misaligned, match=r"`ld.global.v2.b32.*not a multiple of 8.*byte 4 of tensor 't0'.*thread \(1, 0, 0\)"
    ):
        launch_kernel(module(body, 2), [a, b])


def test_out_of_bounds_before_between_and_after() -> None:
    space = aligned(96, "u4")
    a, b = space[:32], space[64:]
    for index, words in (
        (-1, "4 bytes before tensor 't0'"),
        (32, "0 bytes past the end of tensor 't0'"),
        (96, "past the end of tensor 't1'"),
        ((1 << 18) + 96, "no device memory: it lies .* past the end of tensor .t1. .*missing device=.cuda"),
        (-1 << 18, "belongs to no device memory: it lies 1048576 bytes before tensor 't0'"),
    ):
        body = f"ld.global.b32 %r2, [%p0+{4 * index}];"
        with pytest.raises(OutOfBounds, match=words) as error:
            launch_kernel(module(body, 2), [a, b])
        assert ("missing device" in str(error.value)) == (abs(index) >= 1 << 18)
    with pytest.raises(OutOfBounds, match="byte 1024 of shared memory, which has 1024 bytes"):
        launch_kernel(module("ld.shared.b32 %r1, [buffer+1024];", 0, ".shared .align 4 .b8 buffer[1024];"), [])


def test_lanes_in_several_tensors() -> None:
    a, b, out = filled(16), filled(16), aligned(32, "u4")
    body = """mov.u32 %r1, %tid.x; setp.lt.u32 %q1, %r1, 16; selp.b64 %rd3, %p0, %p1, %q1; and.b32 %r2, %r1, 15;
    mad.wide.u32 %rd1, %r2, 4, %rd3; ld.global.b32 %r3, [%rd1]; mad.wide.u32 %rd2, %r1, 4, %p2; st.global.b32 [%rd2],
    %r3;"""
    launch_kernel(module(body, 3), [a, b, out])
    assert out.tolist() == a.tolist() + b.tolist()


def test_inactive_lanes_may_hold_any_address() -> None:
    a = filled(8)
    before = a.copy()
    body = (
        "mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %p0; setp.lt.u32 %q1, %r1, 8; @%q1 ld.global.b32 %r2, [%rd1];"
    )
    body += "add.s32 %r2, %r2, 1; @%q1 st.global.b32 [%rd1], %r2;"
    launch_kernel(module(body, 1), [a])
    assert np.array_equal(a, before + np.uint32(1))


def test_read_only_atomics_are_refused() -> None:
    with pytest.raises(ReadOnlyWrite, match=r"`red\.global\.add\.u32"):
        launch_kernel(module("red.global.add.u32 [%p0], 1;", 1), [filled(4)], readonly=(0,))


def test_sectors_per_request_of_a_strided_load() -> None:
    a = filled(32 * 16)
    result = launch_kernel(
        module("mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 64, %p0; ld.global.b32 %r2, [%rd1];", 1),
        [a],
        counters=True,
    )
    (load,) = result.memory
    assert load.sectors_per_request == 32 and load.bytes == 128 and result.distinct_bytes == {"load": 32 * 32}


def test_lanes_in_different_spaces_through_generic_addresses() -> None:
    a, out = filled(32), aligned(32, "u4")
    body = (
        ADDRESS.format(4)
        + """st.shared.b32 [cell], 77; bar.warp.sync -1; mov.u64 %rd3, cell; cvta.shared.u64 %rd4, %rd3;
    setp.lt.u32 %q1, %r1, 10; selp.b64 %rd5, %rd1, %rd4, %q1; ld.b32 %r2, [%rd5]; st.global.b32 [%rd2], %r2;"""
    )
    launch_kernel(module(body, 2, ".shared .align 4 .b8 cell[4];"), [a, out])
    assert out.tolist() == a.tolist()[:10] + [77] * 22


def test_a_parameter_array_with_an_index_per_lane() -> None:
    out = aligned(32, "u4")
    body = """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; mul.wide.u32 %rd3, %r2, 4; mov.b64 %rd4, table;
    add.s64 %rd5, %rd4, %rd3;
    ld.param.b32 %r3, [%rd5]; mad.wide.u32 %rd1, %r1, 4, %p0; st.global.b32 [%rd1], %r3;"""
    text = module(body, 1).replace(".param .u64 p0", ".param .u64 p0, .param .align 4 .b8 table[16]")
    table = np.array([5, 6, 7, 8], "u4")
    launch_kernel(text, [out], [table.tobytes()])
    assert out.tolist() == [5, 6, 7, 8] * 8
    with pytest.raises(OutOfBounds, match="byte 24 of the kernel's parameters, which has 24 bytes"):
        launch_kernel(text.replace("and.b32 %r2, %r1, 3", "and.b32 %r2, %r1, 7"), [out], [table.tobytes()])


SHARED = ".shared .align 16 .b8 cell[256]; .shared .align 8 .b64 bar; .reg .b32 %a;"


@pytest.mark.parametrize("space", ["shared", "local", "shared::cluster"])
@pytest.mark.parametrize("address", ["selp.b32 %a, %r3, -16, %q1;", "selp.b32 %a, %r3, 16777216, %q1;"])
def test_warps_that_take_no_part_may_hold_any_address(space: str, address: str) -> None:
    """One address a warp: of warp 1, whose address is nowhere, no lane loads."""
    out = np.zeros(64, "u4")
    where = "local" if space == "local" else "shared"
    body = f"""mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.u32 %q1, %r2, 0; mov.u32 %r3, room; {address}
    mov.b32 %r4, 5; @%q1 st.{space}.b32 [%a], 9; @%q1 ld.{space}.b32 %r4, [%a];
    mad.wide.u32 %rd1, %r1, 4, %p0; st.global.b32 [%rd1], %r4;"""
    text = module(body, 1, f".{where} .align 4 .b8 room[4]; .reg .b32 %a;")
    launch_kernel(text, [out], block=(64, 1, 1))
    assert out.tolist() == [9] * 32 + [5] * 32


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize(
    "code,what",
    [
        ("cp.async.ca.shared.global [%a+4096], [%p0], 16;", "byte 4096 of shared memory"),
        ("cp.async.ca.shared.global [%a+-16], [%p0], 16;", "byte -16 of shared memory"),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a+-16], [%p0], 16, [bar];", "bytes -16"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%p0+-64], [%a], 16;", "64 bytes before tensor 't0'"),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%a+-4], 1, [bar];", "bytes -4 to 0 of shared"),
        ("mbarrier.init.shared.b64 [%a+-8], 1;", "0x3f8 in the shared memory"),
        ("mbarrier.init.shared.b64 [%a+512], 1;", "which has 264 bytes"),
        ("mbarrier.arrive.shared.b64 _, [%a+-8];", "0x3f8"),
        ("st.shared::cluster.b32 [%a+-2147483648], 1;", "CTA rank -128|byte -2147483648|CTA rank 128"),
        ("ld.shared.b32 %r1, [%a+-2147483648];", "CTA rank -128|byte -2147483648|CTA rank 128"),
        ("red.global.add.u32 [%p0+-4], 1;", "4 bytes before tensor 't0'"),
    ],
)
def test_addresses_beside_what_there_is(code: str, what: str, checks: bool) -> None:
    """Every instruction that takes an address says where it was, with checks on as well as off."""
    body = f"""mov.u32 %r2, %tid.x; mov.u32 %a, cell; setp.ne.u32 %q1, %r2, 0; @%q1 bra END;
    mbarrier.init.shared.b64 [bar], 1; st.shared.v4.b32 [%a], {{%r2, %r2, %r2, %r2}}; fence.proxy.async;
    {code} cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0; END:"""
    for cluster in (1, 2):
        with pytest.raises((OutOfBounds, MbarrierMisuse), match=what) as error:
            options = {"grid": (cluster, 1, 1), "cluster": (cluster, 1, 1)}
            launch_kernel(module(body, 1, SHARED), [aligned(64, "u4")], checks=checks, **options)
        assert code.rstrip(";") in str(error.value)


@pytest.mark.parametrize("space", ["global", "shared"])
def test_registers_of_128_bits(space: str) -> None:
    """Loaded, stored, unpacked and chosen; hints about the cache take their operands."""
    a, b = filled(64, "u8"), aligned(64, "u8")
    through = "st.shared.b128 [%r2], %w0; ld.shared.b128 %w1, [%r2];" if space == "shared" else "mov.b128 %w1, %w0;"
    body = f"""{ADDRESS.format(16)} mov.u32 %r2, cell; mad.lo.u32 %r2, %r1, 16, %r2; ld.global.b128 %w0, [%rd1];
    {through} setp.lt.u32 %q1, %r1, 9; mov.b128 {{%rd5, %rd6}}, %w1; mov.b128 %w2, {{%rd6, %rd5}};
    @%q1 mov.b128 %w1, %w2; st.global.b128 [%rd2], %w1;
    applypriority.global.L2::evict_normal [%rd1], 128;
    createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %rd7, [%rd1], 1024, 2048;"""
    launch_kernel(module(body, 2, ".reg .b128 %w<3>; .shared .align 16 .b8 cell[512];"), [a, b], checks=True)
    want = a.reshape(32, 2).copy()
    want[:9] = want[:9, ::-1]
    assert np.array_equal(b.reshape(32, 2), want)

"""Counters: banks, sectors, engines, waits, matrix work. Known patterns, and scalar loops as reference."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from cute_nvfp4.sim.observe import banks
from cute_nvfp4.sim.observe.heartbeat import Heartbeat
from tests.simulator import test_tcgen05_kernels as tensor
from tests.simulator.ptx_lab import launch_kernel, module
from tests.simulator.test_mbarrier import BARRIER, RING, wait

SM = ".shared .align 128 .b8 sm[8192];"


def counted(body: str, tensors=(), declarations: str = SM, **options):
    return launch_kernel(module(body, len(tensors), declarations), list(tensors), counters=True, **options)


def shared_access(code: str, stride: int) -> str:
    return f"mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r2, %r1, {stride}, %r2; {code}"


V2, V4 = "{%r10, %r11}", "{%r10, %r11, %r12, %r13}"


@pytest.mark.parametrize(
    ("code", "stride", "passes", "ideal"),
    [
        ("ld.shared.b32 %r10, [%r2];", 4, 1, 1),
        ("ld.shared.b32 %r10, [%r2];", 8, 2, 1),
        ("ld.shared.b32 %r10, [%r2];", 4 * 32, 32, 1),
        ("ld.shared.b32 %r10, [%r2];", 4 * 33, 1, 1),
        ("ld.shared.b32 %r10, [%r2];", 0, 1, 1),
        ("ld.shared.u8 %h1, [%r2];", 1, 1, 1),
        ("st.shared.b16 [%r2], %h1;", 2, 1, 1),
        ("st.shared.b16 [%r2], %h1;", 128, 32, 1),
        (f"ld.shared.v2.b32 {V2}, [%r2];", 8, 2, 2),
        (f"ld.shared.v2.b32 {V2}, [%r2];", 16, 4, 2),
        (f"ld.shared.v2.b32 {V2}, [%r2];", 8 * 17, 2, 2),
        ("st.shared.b64 [%r2], %rd1;", 128, 32, 2),
        (f"st.shared.v4.b32 [%r2], {V4};", 16, 4, 4),
        (f"st.shared.v4.b32 [%r2], {V4};", 32, 8, 4),
        (f"ld.shared.v4.b32 {V4}, [%r2];", 128, 32, 4),
        (f"ld.shared.v4.b32 {V4}, [%r2];", 16 * 9, 4, 4),
        (f"ld.shared.v4.b32 {V4}, [%r2];", 0, 4, 4),
    ],
)
def test_bank_conflicts_of_known_strides(code: str, stride: int, passes: int, ideal: int) -> None:
    (access,) = counted(shared_access(code, stride)).memory
    assert (access.requests, access.passes, access.ideal_passes) == (1, passes, ideal)
    assert access.conflicts == passes - ideal


@pytest.mark.parametrize(
    ("count", "row", "passes", "ideal"),
    [("x1", 16, 1, 1), ("x1", 128, 8, 1), ("x2", 128, 16, 2), ("x4", 16, 4, 4), ("x4", 128, 32, 4), ("x4", 144, 4, 4)],
)
@pytest.mark.parametrize("base", ["ldmatrix", "stmatrix"])
def test_a_matrix_of_eight_rows_is_a_phase(base: str, count: str, row: int, passes: int, ideal: int) -> None:
    registers = "{" + ", ".join(f"%r{10 + j}" for j in range(int(count[1]))) + "}"
    operands = f"{registers}, [%r2]" if base == "ldmatrix" else f"[%r2], {registers}"
    (access,) = counted(shared_access(f"{base}.sync.aligned.m8n8.{count}.shared.b16 {operands};", row)).memory
    assert (access.passes, access.ideal_passes) == (passes, ideal)


def test_lanes_that_do_not_take_part_cause_no_conflict() -> None:
    code = shared_access("setp.lt.u32 %q1, %r1, 5; @%q1 ld.shared.b32 %r10, [%r2];", 128)
    (access,) = counted(code).memory
    assert (access.passes, access.ideal_passes) == (5, 1)


def scalar_passes(addresses, lanes, width: int) -> tuple[int, int]:
    """Word by word, from the text of the programming guide."""
    share = {8: 16, 16: 8}.get(width, 32)
    total = ideal = 0
    for start in range(0, 32, share):
        words_of_bank: dict[int, set[int]] = {}
        for lane in range(start, start + share):
            if lanes[lane]:
                for byte in range(int(addresses[lane]), int(addresses[lane]) + width):
                    words_of_bank.setdefault(byte // 4 % 32, set()).add(byte // 4)
        total += max((len(w) for w in words_of_bank.values()), default=0)
        ideal += bool(words_of_bank)
    return total, ideal


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_banks_agree_with_a_scalar_loop(width: int) -> None:
    rng = np.random.default_rng(width)
    address = rng.integers(0, 4096 // width, (60, 32)) * width
    address[:20] = rng.integers(0, 8, (20, 32)) * width
    lanes = rng.random((60, 32)) < rng.random((60, 1))
    lanes[0], lanes[1] = False, True
    got = banks.passes(address, lanes, width)
    assert list(zip(*got)) == [scalar_passes(a, m, width) for a, m in zip(address, lanes)]


BULK = (
    """
    mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mov.u32 %r3, bar; setp.ne.u32 %q1, %r1, 0; @%q1 bra READY;
    mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 768;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%p0], 512, [%r3];
    add.u32 %r4, %r2, 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%p0], 256, [%r3];
    READY: bar.sync 0;"""
    + wait("%r3", "0")
    + """ @%q1 bra END; fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%p1], [%r2], 768;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%p2], [%r2], 64;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ld.global.b32 %r5, [%p0]; END:"""
)
ROOM = ".shared .align 128 .b8 sm[1024]; .shared .align 8 .b64 bar[1];"


def aligned(count: int) -> np.ndarray:
    raw = np.zeros(count + 32, "u4")
    start = -raw.ctypes.data % 128 // 4
    return raw[start : start + count]


def test_bulk_copies_are_counted_in_bytes_and_distinct_sectors() -> None:
    a, b, c = aligned(128), aligned(192), aligned(16)
    a[:] = np.arange(128)
    result = counted(BULK, [a, b, c], ROOM)
    assert np.array_equal(b, np.concatenate([a, a[:64]])) and np.array_equal(c, a[:16])
    first, second, store, reduction = result.engines
    assert (first.engine, first.operations, first.global_read, first.shared_written) == ("tma", 1, 512, 512)
    assert (second.global_read, second.shared_written, second.global_written) == (256, 256, 0)
    assert (store.engine, store.shared_read, store.global_written, store.global_read) == ("store", 768, 768, 0)
    assert (reduction.shared_read, reduction.global_read, reduction.global_written) == (64, 64, 64)
    # The second copy and the thread's load touch sectors that the first one has touched.
    assert result.distinct_bytes == {"load": 512, "store": 768, "atomic": 64}
    assert (result.l2.read_bytes, result.l2.refetched_bytes) == (512 + 64, 0)
    assert (result.l2.written_bytes, result.l2.dirty_bytes) == (0, 768 + 64)


MULTICAST = (
    """
    mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mov.u32 %r3, bar; mov.u32 %r9, %cluster_ctarank; mov.b16 %h1, 3;
    setp.ne.u32 %q1, %r1, 0; @%q1 bra READY;
    mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.ne.u32 %q2, %r9, 0; or.pred %q2, %q1, %q2; @%q2 bra WAIT;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2], [%p0], 256, [%r3], %h1;
    WAIT:"""
    + wait("%r3", "0")
    + " barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
)


def test_a_multicast_reads_once_and_writes_every_destination() -> None:
    result = counted(MULTICAST, [aligned(64)], ROOM, grid=(2, 1, 1), cluster=(2, 1, 1))
    (copy,) = result.engines
    assert (copy.operations, copy.global_read, copy.shared_written) == (1, 256, 512)
    assert result.distinct_bytes == {"load": 256}


def test_cp_async_counts_only_what_it_reads() -> None:
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, sm; mad.lo.u32 %r2, %r1, 16, %r2; mad.wide.u32 %rd1, %r1, 16, %p0;
    cp.async.cg.shared.global [%r2], [%rd1], 16; setp.lt.u32 %q1, %r1, 4; selp.b32 %r3, 8, 0, %q1;
    cp.async.ca.shared.global [%r2], [%rd1], 16, %r3; cp.async.wait_all;"""
    result = counted(body, [aligned(128)])
    whole, partial = result.engines
    assert (whole.engine, whole.operations, whole.global_read, whole.shared_written) == ("copy", 32, 512, 512)
    assert (partial.operations, partial.global_read, partial.shared_written) == (32, 4 * 8, 512)
    loads = [m for m in result.memory if m.space == "global"]
    assert [(m.requests, m.sectors, m.bytes) for m in loads] == [(1, 16, 512), (1, 2, 32)]
    assert all((m.passes, m.ideal_passes) == (4, 4) for m in result.memory if m.space == "shared")


@pytest.mark.parametrize("ctas", [1, 5])
def test_waits_at_a_barrier_are_steps_of_others(ctas: int) -> None:
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, 0; setp.lt.u32 %q1, %r1, 32; @%q1 bra LOOP; bar.sync 0; bra END;
    LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %q2, %r2, 20; @%q2 bra LOOP; bar.sync 0; END:"""
    (barrier,) = counted(body, block=(96, 1, 1), grid=(ctas, 1, 1)).waits
    # Two warps of a CTA wait while the third goes round: twenty blocks, and the one with its barrier.
    assert (barrier.parked, barrier.steps) == (2 * ctas, 2 * ctas * 21)


def test_nobody_waits_at_a_barrier_that_opens_at_once() -> None:
    assert counted("bar.sync 0; bar.sync 0;", block=(128, 1, 1)).waits == []


def test_mbarrier_waits_by_instruction() -> None:
    result = launch_kernel(module(RING, 1, BARRIER), [np.zeros(32, "u4")], block=(64, 1, 1), counters=True)
    producer, consumer = (w for w in result.waits if "try_wait" in w.instruction)
    # A ring of one and ten values: the first one finds the place free, and is there when the consumer comes.
    assert (producer.parked, consumer.parked) == (9, 9)
    assert producer.steps >= producer.parked and consumer.steps >= consumer.parked


def test_matrix_work_of_mma_sync() -> None:
    d, a, b = "{%f0, %f1, %f2, %f3}", "{%r10, %r11, %r12, %r13}", "{%r14, %r15}"
    body = f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d}, {a}, {b}, {d};" * 3
    (mma,) = counted(body, (), ".reg .f32 %f<4>;", block=(64, 1, 1)).mma
    assert (mma.kind, mma.operations, mma.multiply_adds) == ("mma.sync f16", 6, 6 * 16 * 8 * 16)


def tensor_kernel(pair: bool, **options):
    """Four steps of K = 16 of an f16 product of M x 64 in every CTA, or every pair of CTAs; D is zeros."""
    group, m = ("cta_group::2", 256) if pair else ("cta_group::1", 128)
    images, out = np.zeros((4, tensor.IMAGE), "u1"), np.zeros((4, 128, 64), "u4")
    zeros = np.zeros((128, 64), "u2")
    a, b = tensor.place(images[0], 0, zeros, "f16"), tensor.place(images[0], tensor.B_AT, zeros[:64], "f16")
    bits = tensor.idesc_bits("f16", "f16", "f16", m, 64)
    work = tensor.mma(f"tcgen05.mma.{group}.kind::f16", a, b, bits, 4)
    text = module(tensor.kernel(work, 64, pair), 2, tensor.DECLARED)
    shape = {"grid": (4, 1, 1), "block": (128, 1, 1), "cluster": (1 + pair, 1, 1), "smem": tensor.IMAGE + 32}
    return launch_kernel(text, [images, out], **shape, **options)


@pytest.mark.parametrize("schedule", tensor.SCHEDULES, ids=str)
@pytest.mark.parametrize("pair", [False, True])
def test_matrix_work_of_tensor_cores(pair: bool, schedule) -> None:
    result = tensor_kernel(pair, counters=True, schedule=schedule)
    issues, m = (2, 256) if pair else (4, 128)
    (mma,) = result.mma
    assert (mma.kind, mma.operations) == ("tcgen05.mma f16", 4 * issues)
    assert mma.multiply_adds == 4 * issues * m * 64 * 16
    first, *rest = (e for e in result.engines if ".mma" in e.instruction)
    # 32 bytes of K a row of A and of B; D is read by all but the first, which overwrites it.
    accumulator = issues * m * 64 * 4
    assert first.shared_read == issues * (m + 64) * 32 and first.operations == issues
    assert (first.tensor_read, first.tensor_written) == (0, accumulator)
    assert [e.tensor_read for e in rest] == [accumulator] * 3


def test_without_counters_there_are_instructions_only() -> None:
    a, b, c = aligned(128), aligned(192), aligned(16)
    result = launch_kernel(module(BULK, 3, ROOM), [a, b, c])
    assert result.instructions and result.opcodes
    assert (result.memory, result.distinct_bytes, result.engines, result.waits, result.mma) == ([], {}, [], [], [])
    assert result.l2 is None


def test_a_long_launch_says_how_far_it_has_come() -> None:
    """Sixteen CTAs in waves of four, on a clock that goes a second at each look."""
    loop = "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %q1, %r1, 700; @%q1 bra L; st.global.u32 [%p0], %r1;"
    lines, clock = [], count()
    heartbeat = Heartbeat(lines.append, every=1.0, now=lambda: float(next(clock)))
    launch_kernel(module(loop, 1), [np.zeros(1, "u4")], grid=(16, 1, 1), warps_per_wave=4, others=[heartbeat])
    assert lines == [
        "kernel: 4 of 16 CTAs done in 3 s, about 9 s more",
        "kernel: 8 of 16 CTAs done in 6 s, about 6 s more",
    ]

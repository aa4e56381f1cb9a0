"""Small kernels for the tests of the clock, each with something that takes time."""

from __future__ import annotations

import functools

import pytest
from ptx_lab import module, wait
from tma_lab import aligned

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim import GlobalMemory, Launch, Program
from cute_nvfp4.sim.clock import tools
from cute_nvfp4.sim.clock.machine import Machine, machine
from cute_nvfp4.sim.clock.timing import Clock
from cute_nvfp4.sim.machine.events import Client
from cute_nvfp4.sim.machine.executor import execute
from cute_nvfp4.sim.machine.launched import Run
from cute_nvfp4.sim.machine.schedule import Schedule
from cute_nvfp4.sim.observe.timing import Timing


def needs_ptxas(test):
    """Leaves a test out where there is no ptxas: ``pip install nvidia-cuda-nvcc`` has one."""
    try:
        tools.tool("ptxas")
    except SimError:
        return pytest.mark.skip(reason="no ptxas")(test)
    return test


def kernel(body: str, params: int, declarations: str = "", scalars: int = 0) -> str:
    return module(body, params, declarations, scalars).replace("sm_100a", "sm_90a")


THREAD = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r4, %r2, %r3, %r1;"
ADDRESS = f"{THREAD} mul.wide.u32 %rd0, %r4, 16; add.s64 %rd1, %p0, %rd0; add.s64 %rd2, %p1, %rd0;"
V4 = "{%r10, %r11, %r12, %r13}"
COPY = f"{ADDRESS} ld.global.v4.b32 {V4}, [%rd1]; st.global.v4.b32 [%rd2], {V4};"
AGAIN = (
    f"{ADDRESS} ld.global.cg.v4.b32 {V4}, [%rd1]; st.global.v4.b32 [%rd2], {V4}; fence.acq_rel.gpu;"
    f"ld.global.cg.v4.b32 {V4}, [%rd1]; add.u32 %r10, %r10, %r11; atom.global.add.u32 %r14, [%rd2], %r10;"
    f"st.global.b32 [%rd2+4], %r14;"
)
NEAR = (
    f"{ADDRESS} ld.global.v4.b32 {V4}, [%rd1]; add.u32 %r15, %r10, %r11; xor.b64 %rd1, %rd1, 16;"
    f"ld.global.v4.b32 {V4}, [%rd1];"
    "xor.b32 %r15, %r15, %r12; cvt.u64.u32 %rd5, %r15; add.s64 %rd1, %rd1, %rd5;"
    f"ld.global.v4.b32 {V4}, [%rd1]; add.u32 %r15, %r15, %r13; st.global.b32 [%rd2], %r15;"
)
PARTS = f"{ADDRESS} mov.b32 %r10, 7;" + "".join(f"st.global.b32 [%rd2+{4 * j}], %r10;" for j in range(4))
SHARED = (
    f"{ADDRESS} mov.u32 %r5, sm; shl.b32 %r6, %r1, 4; add.u32 %r5, %r5, %r6;"
    "cp.async.cg.shared.global [%r5], [%rd1], 16; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;"
    f"xor.b32 %r5, %r5, 16; ld.shared.v4.b32 {V4}, [%r5]; bar.sync 0;"
    f"st.shared.v4.b32 [%r5], {V4}; bar.sync 0; ld.shared.b32 %r11, [%r5+4]; st.global.b32 [%rd2], %r11;"
)
BULK = f"""
mov.u32 %r0, sm; mov.u32 %r1, bar; mov.u32 %r2, %tid.x; setp.ne.u32 %q0, %r2, 0;
@%q0 bra I; mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; I: bar.sync 0;
@%q0 bra W;
mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], 4096;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%p0], 4096, [%r1];
W: {wait("%r1", "0")}
@%q0 bra E;
mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], 4096;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%p0], 4096, [%r1];
{wait("%r1", "1")}
fence.proxy.async.shared::cta;
cp.async.bulk.global.shared::cta.bulk_group [%p1], [%r0], 4096;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
E:
"""
ROW = f"""
mov.u32 %r0, sm; mov.u32 %r1, bar; mov.u32 %r2, %tid.x; setp.ne.u32 %q0, %r2, 0; @%q0 bra E;
mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], 2048;
{
    "".join(
        f"add.u32 %r3, %r0, {128 * k}; add.s64 %rd6, %p0, {128 * k};"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd6], 128, [%r1];"
        for k in range(16)
    )
}
{wait("%r1", "0")}
E:
"""
CLUSTER = f"""
mov.u32 %r1, bar; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %q0, %r2, 0;
@%q0 bra I; mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
I: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
@%q0 bra E;
xor.b32 %r4, %r3, 1; mapa.shared::cluster.u32 %r5, %r1, %r4;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
{wait("%r1", "0")}
E: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
FAR = f"""
mov.u32 %r1, bar; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %q0, %r2, 0;
@%q0 bra I; mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r1], 1024;
I: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %r6, sm; shl.b32 %r7, %r2, 4; add.u32 %r6, %r6, %r7;
xor.b32 %r4, %r3, 1; mapa.shared::cluster.u32 %r5, %r1, %r4; mapa.shared::cluster.u32 %r8, %r6, %r4;
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r8], {{%r2, %r2, %r2, %r2}}, [%r5];
{wait("%r1", "0")}
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
LOCAL = f"""
mov.u32 %r1, bar; mov.u32 %r2, %tid.x; setp.ne.u32 %q0, %r2, 0;
@%q0 bra I; mbarrier.init.shared.b64 [%r1], 64;
I: bar.sync 0; mbarrier.arrive.shared.b64 %rd5, [%r1];
{wait("%r1", "0")}
st.global.b32 [%p0], %r2;
"""

FLAG = f"""
{ADDRESS} mov.u32 %r5, %ctaid.x; setp.ne.u32 %q0, %r5, 0; mov.b32 %r6, 0; @%q0 bra L;
W: ld.global.cg.b32 %r7, [%rd1]; cvt.u64.u32 %rd5, %r7; add.s64 %rd1, %rd1, %rd5; add.u32 %r6, %r6, 1;
st.global.b32 [%rd2], %r7;
setp.lt.u32 %q1, %r6, 50; @%q1 bra W;
st.release.gpu.global.b32 [%p1], 1; bra E;
L: ld.acquire.gpu.global.b32 %r7, [%p1]; setp.eq.u32 %q1, %r7, 0; @%q1 bra L;
st.global.b32 [%rd2], %r7;
E:
"""
"""CTA 0 goes through memory for long, and raises a flag that the other one polls."""

MAP = f"""
mov.u32 %r1, sm; mov.u32 %r2, %tid.x; mov.u32 %r3, 7; mov.u64 %rd9, 4096; setp.ne.u32 %q0, %r2, 0; @%q0 bra C;
{
    "".join(
        f"tensormap.replace.tile.global_{field}.shared::cta.b1024.{value};"
        for field, value in (
            ("address", "b64 [%r1], %rd9"),
            ("dim", "b32 [%r1], 0, %r3"),
            ("dim", "b32 [%r1], 1, %r3"),
            ("stride", "b64 [%r1], 0, %rd9"),
            ("stride", "b64 [%r1], 1, %rd9"),
        )
    )
}
C: bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%p0], [%r1], 128;
fence.proxy.tensormap::generic.acquire.gpu [%p0], 128;
"""
"""A warp changes a tensor map in shared memory, and puts it where copies find it."""


def _repeat(*lines: str, times: int = 24) -> str:
    return "".join(line.replace("#", str(10 + j % 8)) for j in range(times) for line in lines)


_PIPES = {
    "alu": "lop3.b32 %r#, %r#, %r1, %r4, 0x96;",
    "fma": "fma.rn.f32 %f#, %f#, %f1, %f2;",
    "imad": "mad.lo.s32 %r#, %r#, %r1, %r4;",
    "half": "fma.rn.f16x2 %r#, %r#, %r1, %r4;",
    "fp64": "fma.rn.f64 %g#, %g#, %g1, %g2;",
    "xu": "ex2.approx.ftz.f32 %f#, %f#;",
    "convert": "cvt.rn.f16x2.f32 %r#, %f#, %f1;",
    "lsu": "shfl.sync.bfly.b32 %r#, %r#, 1, 31, -1;",
    "redux": "redux.sync.add.s32 %r#, %r#, -1;",
    "vote": "setp.lt.s32 %q1, %r#, %r4; vote.sync.ballot.b32 %r#, %q1, -1;",
    "mma16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f10,%f11,%f12,%f13}, {%r10,%r11,%r12,%r13}, "
    "{%r14,%r15}, {%f10,%f11,%f12,%f13};",
    "mma8": "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f10,%f11,%f12,%f13}, {%r10,%r11}, {%r14}, "
    "{%f10,%f11,%f12,%f13};",
    "imma": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r20,%r21,%r22,%r23}, {%r10,%r11,%r12,%r13}, "
    "{%r14,%r15}, {%r20,%r21,%r22,%r23};",
}
_SUM = "mov.b32 %r9, 0;" + "".join(
    f"xor.b32 %r9, %r9, %r{10 + j}; mov.b32 %r8, %f{10 + j}; xor.b32 %r9, %r9, %r8; cvt.rn.f32.f64 %f3, %g{10 + j};"
    "mov.b32 %r8, %f3; xor.b32 %r9, %r9, %r8; xor.b32 %r9, %r9, %r20;"
    for j in range(8)
)


def pipe(name: str) -> str:
    """A kernel of 24 instructions of one kind, in chains that ptxas cannot shorten."""
    begin = f"{ADDRESS} ld.global.v4.b32 {V4}, [%rd1]; ld.global.v4.b32 {{%r14, %r15, %r16, %r17}}, [%rd1];"
    begin += "".join(f"mov.b32 %f{j}, %r{j}; cvt.f64.f32 %g{j}, %f{j};" for j in (1, 2, *range(10, 18)))
    begin += "".join(f"mov.b32 %r{20 + j}, %r{10 + j};" for j in range(4))
    body = f"{begin} {_repeat(_PIPES[name])} {_SUM} st.global.b32 [%rd2], %r9;"
    return kernel(body, 2, ".reg .f32 %f<32>; .reg .f64 %g<32>;")


def long(instructions: int) -> str:
    """Straight code, gone through twice: more than 64 KB of it, or of 26 KB."""
    body = _repeat("fma.rn.f32 %f#, %f#, %f1, %f2;", times=instructions)
    begin = f"{ADDRESS} mov.b32 %r9, 0; mov.b32 %f1, %r4; mov.b32 %f2, %r3;" + "".join(
        f"mov.b32 %f{10 + j}, %r4;" for j in range(8)
    )
    loop = f"{begin} L: {body} add.u32 %r9, %r9, 1; setp.lt.u32 %q0, %r9, 2; @%q0 bra L;"
    end = "".join(f"add.f32 %f1, %f1, %f{10 + j};" for j in range(8))
    return kernel(f"{loop} {end} st.global.f32 [%rd2], %f1;", 2, ".reg .f32 %f<32>;")


SMEM = ".shared .align 128 .b8 sm[4096]; .shared .align 8 .b64 bar;"
TEXTS = {
    **{"copy": kernel(COPY, 2), "again": kernel(AGAIN, 2), "near": kernel(NEAR, 2), "shared": kernel(SHARED, 2, SMEM)},
    **{
        "bulk": kernel(BULK, 2, SMEM),
        "cluster": kernel(CLUSTER, 2, SMEM),
        "far": kernel(FAR, 2, SMEM),
        "row": kernel(ROW, 2, SMEM),
    },
    **{
        "local": kernel(LOCAL, 2, SMEM),
        "flag": kernel(FLAG, 2),
        "parts": kernel(PARTS, 2),
        "map": kernel(MAP, 2, SMEM),
        "long": long(4400),
        "medium": long(1600),
    },
    **{name: pipe(name) for name in _PIPES},
}
SHAPES = {
    "parts": ((600, 1, 1), (256, 1, 1), (1, 1, 1)),
    "copy": ((600, 1, 1), (256, 1, 1), (1, 1, 1)),
    "bulk": ((4, 1, 1), (64, 1, 1), (1, 1, 1)),
    "row": ((4, 1, 1), (64, 1, 1), (1, 1, 1)),
    "cluster": ((8, 1, 1), (64, 1, 1), (2, 1, 1)),
    "far": ((8, 1, 1), (64, 1, 1), (2, 1, 1)),
    "map": ((1, 1, 1), (32, 1, 1), (1, 1, 1)),
    "local": ((300, 1, 1), (64, 1, 1), (1, 1, 1)),
    "medium": ((1, 1, 1), (32, 1, 1), (1, 1, 1)),
    "long": ((1, 1, 1), (32, 1, 1), (1, 1, 1)),
    "flag": ((2, 1, 1), (32, 1, 1), (1, 1, 1)),
}


@functools.cache
def clocked(name: str, warm: bool = False, schedule: str = "", shift: int = 0, l2_bytes: int = 50 << 20) -> Clock:
    """The clock of a kernel that has run, its tensors ``shift`` bytes behind a line; ``timing`` replays it."""
    grid, block, cluster = SHAPES.get(name, ((4, 1, 1), (256, 1, 1), (1, 1, 1)))
    size = grid[0] * block[0] * 16
    memory, tensors = GlobalMemory(), [aligned(bytes(size + shift))[shift:] for _ in range(2)]
    for j, tensor in enumerate(tensors):
        memory.add(tensor, f"t{j}")
    program = Program.parse(TEXTS[name])
    (entry,) = program.kernels
    params = tuple(int(t.ctypes.data).to_bytes(8, "little") for t in tensors)
    launch = Launch(entry, grid, block, params, cluster, 110 << 10 if name == "local" else 0)
    compiled = program.kernel(entry)
    clock = Clock(program, compiled, launch, memory, h200(l2__bytes=l2_bytes), warm)

    def executed(client: Client) -> None:
        run = Run(compiled, program.module.target, launch, memory, 100_000, 132, Schedule.parse(schedule))
        run.clients = [client]
        execute(run, None)

    executed(clock)
    clock.settle(executed)
    return clock


def timing(name: str, on: Machine | None = None, **options) -> Timing:
    return clocked(name, **options).timing(on)


def h200(**figures: float) -> Machine:
    return machine("h200").changed(**figures)

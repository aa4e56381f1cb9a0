"""Kernels of one tensor copy each, and the H200's answers to them (``tests/data/h200_tma.npz``)."""

from __future__ import annotations

import numpy as np
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim.tma import TensorMap

GUARD = 0xEE
"""What shared memory holds before a load."""

_FILL = """
mov.u32 %r3, %tid.x; mov.u32 %r4, sm; shl.b32 %r6, %r3, 2;
F: setp.ge.u32 %q0, %r6, %s1; @%q0 bra FE;
add.u32 %r7, %r4, %r6; cvt.u64.u32 %rd6, %r6; add.s64 %rd6, %rd6, {source};
{value} st.shared.b32 [%r7], %r8; add.u32 %r6, %r6, 512; bra F;
FE: setp.ne.u32 %q1, %r3, 0;
"""
_DUMP = """
shl.b32 %r6, %r3, 2;
G: setp.ge.u32 %q0, %r6, %s1; @%q0 bra GE;
add.u32 %r7, %r4, %r6; ld.shared.b32 %r8, [%r7]; cvt.u64.u32 %rd6, %r6; add.s64 %rd6, %rd6, %p1;
st.global.b32 [%rd6], %r8; add.u32 %r6, %r6, 512; bra G;
GE:
"""
_DECLARE = ".shared .align 1024 .b8 sm[%d]; .shared .align 8 .b64 bar; .reg .b32 %%c<6>; .reg .b16 %%o<3>;"


def _coordinates(count: int) -> tuple[str, str]:
    loads = "".join(f"ld.global.b32 %c{j}, [%p2+{4 * j}]; " for j in range(count))
    loads += "".join(f"ld.global.b16 %o{j}, [%p2+{20 + 2 * j}]; " for j in range(3))
    return loads, "{" + ", ".join(f"%c{j}" for j in range(count)) + "}"


def _auxiliary(coords, offsets) -> np.ndarray:
    out = np.zeros(16, np.int32)
    out[: len(coords)] = coords
    out.view(np.uint16)[10 : 10 + len(offsets)] = offsets
    return out


def aligned(raw: bytes) -> np.ndarray:
    """Bytes at an address that is a multiple of 128."""
    held = np.zeros(len(raw) + 128, np.uint8)
    start = -held.ctypes.data % 128
    out = held[start : start + len(raw)]
    out[:] = np.frombuffer(raw, np.uint8)
    return out


def encoded(m: TensorMap, data: np.ndarray) -> np.ndarray:
    """The tensor map over ``data``; an address of its own is added."""
    values = dict(m.__dict__, address=(m.address + data.ctypes.data) % (1 << 64))
    return aligned(TensorMap(**values).encode())


def load(m: TensorMap, data, coords, offsets=(), place=0, total=8192, tx=None, mode="tile", rank=0, **options):
    """Shared memory (total,) after the load of one box to byte ``place`` of it."""
    mode = "im2col" if m.im2col else mode
    loads, at = _coordinates(len(coords))
    info = ", {" + ", ".join(f"%o{j}" for j in range(m.rank - 2)) + "}" if m.im2col else ""
    body = f"""
    {loads}
    {_FILL.format(source="%p1", value=f"mov.u32 %r8, {GUARD * 0x01010101};")}
    mov.u32 %r5, bar;
    @%q1 bra I; mbarrier.init.shared.b64 [%r5], 1;
    I: fence.mbarrier_init.release.cluster; fence.proxy.async; bar.sync 0;
    @%q1 bra W;
    mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r5], %s2; add.u32 %r10, %r4, %s0;
    cp.async.bulk.tensor.{rank or m.rank}d.shared::cta.global.{mode}.mbarrier::complete_tx::bytes
      [%r10], [%p0, {at}], [%r5]{info};
    W: mbarrier.try_wait.parity.shared.b64 %q2, [%r5], 0; @!%q2 bra W;
    {_DUMP}
    """
    out = np.zeros(total, np.uint8)
    size = m.box[0] * m.bits // 8 * (4 if mode.endswith("4") else _row_count(m)) if tx is None else tx
    text = module(body, 3, _DECLARE % total, scalars=3)
    aux = _auxiliary(coords, offsets)
    scalars = [int(v).to_bytes(4, "little") for v in (place, total, size)]
    tensors = [encoded(m, data), out, aux, data]
    launch_kernel(_with_tensor(text), tensors, scalars, block=(128, 1, 1), **options)
    return out


def _row_count(m: TensorMap) -> int:
    if m.im2col:
        return m.im2col.pixels
    return int(np.prod([-(-b // s) for b, s in zip(m.box[1:], m.element_strides[1:])]))


def _with_tensor(text: str) -> str:
    """Declares the tensor itself as a parameter, which makes its memory known."""
    return text.replace(".param .u32 s0", ".param .u64 tensor, .param .u32 s0", 1)


def store(m: TensorMap, data, shared, coords, place=0, operation="", mode="tile", **options) -> None:
    """Stores one box from byte ``place`` of ``shared`` (bytes,) into ``data``."""
    loads, at = _coordinates(len(coords))
    verb = f"cp.reduce.async.bulk.tensor.{m.rank}d" if operation else f"cp.async.bulk.tensor.{m.rank}d"
    suffix = f"{operation}.{mode}" if operation else mode
    body = f"""
    {loads}
    {_FILL.format(source="%p1", value="ld.global.b32 %r8, [%rd6];")}
    fence.proxy.async; bar.sync 0;
    @%q1 bra E; add.u32 %r10, %r4, %s0;
    {verb}.global.shared::cta.{suffix}.bulk_group [%p0, {at}], [%r10];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E:
    """
    text = module(body, 3, _DECLARE % len(shared), scalars=2)
    scalars = [int(v).to_bytes(4, "little") for v in (place, len(shared))]
    tensors = [encoded(m, data), shared, _auxiliary(coords, ()), data]
    launch_kernel(_with_tensor(text), tensors, scalars, block=(128, 1, 1), **options)

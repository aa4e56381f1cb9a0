"""Non-bulk cp.async (PTX ISA, "cp.async"), and the choice of the builder for all instructions that begin with ``cp``.

A copy takes its addresses when a thread issues it, and moves its bytes when the engine runs.
"""

from __future__ import annotations

import functools

import numpy as np

from cute_nvfp4.sim.frontend.model import Imm, Instruction, Kernel, Reg
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.isa import bulk, bulk_tensor
from cute_nvfp4.sim.machine import access, bulk_groups
from cute_nvfp4.sim.machine.access import Access
from cute_nvfp4.sim.machine.engine import Completion, Footprint, Pending, Spans
from cute_nvfp4.sim.machine.requests import displaced

KIND = "cp_async"


@opcode("cp")
def _cp(i: Instruction, m: Mods, k: Kernel) -> Op:
    reduce = m.flag("reduce")
    m.take("async", required=True)
    if reduce or "bulk" in m.left:
        m.take("bulk", required=True)
        if m.take("commit_group"):
            return Op(lambda g, mask: bulk_groups.commit(g, mask, "bulk_group"), (), (), "bulk", context=True)
        if m.take("wait_group"):
            return wait_group(i, m, "bulk_group", m.flag("read"))
        build = bulk_tensor.tensor if "tensor" in m.left else bulk.bulk
        return build(i, m, reduce)
    what = m.take("commit_group", "wait_group", "wait_all", "mbarrier")
    if what == "commit_group":
        return Op(lambda g, mask: bulk_groups.commit(g, mask, KIND), (), (), "copy", context=True)
    if what == "wait_group":
        return wait_group(i, m, KIND, False)
    if what == "wait_all":
        return Op(lambda g, mask: _wait_all(g, mask, i), (), (), "copy", context=True, control="wait")
    return _arrive(i, m) if what else _copy(i, m, k)


def wait_group(i: Instruction, m: Mods, kind: str, read: bool) -> Op:
    """Builds a wait for all but the last N groups of ``kind`` of each thread, with N from the operand; ``read`` is set
    for .read, a wait for the reads of the source only."""
    count = i.operands[0] if i.operands else None
    if not isinstance(count, Imm) or count.value < 0:
        raise m.refuse("wait_group takes a constant")
    n = count.value

    def fn(g, mask):
        return bulk_groups.wait(g, mask, i, kind, n, read)

    return Op(fn, (), ("static",), "copy", context=True, control="wait")


def _wait_all(g, mask, i: Instruction):
    """Executes cp.async.wait_all, which is commit_group and then wait_group 0 (PTX ISA)."""
    bulk_groups.commit(g, mask, KIND)
    return bulk_groups.wait(g, mask, i, KIND, 0, False)


class AsyncCopy(Pending):
    """One cp.async of k threads.

    ``dst`` and ``src`` are the addresses, ``size`` is the bytes that each thread copies, and ``count`` the bytes that
    it reads (None for all). ``move`` copies the bytes.
    """

    engine = "copy"
    completion = Completion(KIND)

    def __init__(self, i: Instruction, g, mask, dst, src, size: int, move, count) -> None:
        super().__init__(i, g.wave, g.warps)
        # The group goes on and changes. The copy keeps the identity of its threads.
        self.issuer = type(g)(g.wave, g.block, g.warps, g.mask, [])
        self.mask, self.move = mask, move
        rows, lanes = np.nonzero(g.lanes(mask))
        self.warps, self.lanes = g.warps[rows], lanes
        self.ctas = g.wave.cta_of_warp[self.warps]
        self.addresses = [np.broadcast_to(a, (g.n, 32))[rows, lanes].astype(np.int64) for a in (dst, src)]
        self.size = size
        every = np.arange(len(rows))
        self.reads = every if count is None else every[np.broadcast_to(count, (g.n, 32))[rows, lanes] > 0]
        bulk_groups.groups(g.wave, KIND).begin(self, self.warps, self.lanes)

    def run(self, wave) -> None:
        self.move(self.issuer, self.mask)
        bulk_groups.groups(wave, KIND).finish(self)

    def footprints(self, wave) -> list[Footprint]:
        to, source = self.addresses
        _, offset = wave.resolve(self.ctas, to.astype(np.uint32), self.instruction.where())
        chunks = (offset & ~np.int64(15))[:, None]
        found = [Footprint("shared", True, self.ctas, chunks)]
        if len(self.reads):
            ctas, address = self.ctas[self.reads], source[self.reads, None]
            found.insert(0, Footprint("global", False, ctas, Spans(address, self.size), self.reads))
        return found


def _copy(i: Instruction, m: Mods, k: Kernel) -> Op:
    cache = m.take("ca", "cg", required=True)
    m.take("shared", "shared::cta", required=True)
    m.take("global", required=True)
    hint = m.flag("L2::cache_hint")
    m.take("L2::64B", "L2::128B", "L2::256B")
    size = i.operands[2] if len(i.operands) > 2 else None
    if not isinstance(size, Imm) or size.value not in (4, 8, 16) or (cache == "cg" and size.value != 16):
        raise m.refuse("cp-size must be 4, 8 or 16 (16 for .cg)")
    words = size.value // 4
    source = Access(i, "global", 4, words, "load", (cache,))
    target = Access(i, "shared", 4, words, "store")
    partial = len(i.operands) == 4 + hint
    extra = i.operands[3] if partial else None
    # ignore-src is a predicate: where it is true, nothing is read and zeros are written.
    ignores = isinstance(extra, Reg) and k.regs.get(extra.name) == "pred"

    def fn(g, mask, dst, dst_off, src, src_off, *rest):
        count = rest[0] if partial else None
        if ignores:
            count = np.where(count, np.uint32(0), np.uint32(size.value))

        def move(issuer, chosen):
            if count is None:
                data = access.load(issuer, source, chosen, src, src_off)
                data = data if words > 1 else (data,)
            else:
                data = _partial(issuer, i, chosen, src, src_off, count, words, cache)
            access.store(issuer, target, chosen, dst, dst_off, data)

        access.locate(g, target, "shared", mask, dst, dst_off)
        at = dst.astype(np.int64) + dst_off, src.astype(np.int64) + src_off
        g.wave.engines.submit(AsyncCopy(i, g, mask, *at, size.value, move, count))

    src = ("addr", "addr", "static", *(("pred" if ignores else "u32",) if partial else ()), *(("b64",) if hint else ()))
    return Op(fn, (), src, "copy", context=True)


def _partial(g, i: Instruction, mask, src, src_off: int, count, words: int, cache: str):
    """Returns the ``words`` of each lane, of which only the first ``count`` bytes are read; the others are zero."""
    lanes = g.lanes(mask)
    count = np.broadcast_to(count, (g.n, 32))
    byte = Access(i, "global", 1, 1, "load", (cache,), counted=False)
    if (asks := lanes & (count > 0)).any():
        whole = Access(i, "global", 4, words, "load", (cache,))
        size = int(np.minimum(count, 4 * words)[asks].sum())
        g.wave.events.requested(g, whole, src.astype(np.int64) + src_off, asks, size)
    out = [np.zeros((g.n, 32), "u4") for _ in range(words)]
    for b in range(4 * words):
        wanted = lanes & (count > b)
        if wanted.any():
            got = np.broadcast_to(access.load(g, byte, wanted, src, src_off + b), (g.n, 32))
            out[b // 4] |= np.where(wanted, got, 0).astype("u4") << np.uint32(8 * (b % 4))
    return tuple(out)


def _arrive(i: Instruction, m: Mods) -> Op:
    """Builds cp.async.mbarrier.arrive, which arrives when all earlier cp.async of the thread are complete. Without
    .noinc it also increments the pending count, so that the arrival does not change the count."""
    m.take("arrive", required=True)
    keep = m.flag("noinc")
    m.take("shared", "shared::cta")
    m.type("b64")

    def fn(g, mask, addr, off):
        rows, cols = np.nonzero(g.lanes(mask))
        address = np.broadcast_to(displaced(addr, off), (g.n, 32))[rows, cols]
        wave, warps = g.wave, g.warps[rows]
        cta, offset = wave.resolve(wave.cta_of_warp[warps], address, i.where())
        held = bulk_groups.groups(wave, KIND)
        wave.events.copies_arrive(g, i, rows, cols, cta, offset)
        if not keep:
            slot = wave.mbarriers.find(i.where(), cta, offset)
            np.add.at(wave.mbarriers.pending, (cta, slot), 1)
        for k, copies in enumerate(held.open_copies(warps, cols)):
            held.when_done(
                copies, functools.partial(wave.mbarriers.arrive, i.where(), cta[k : k + 1], offset[k : k + 1])
            )

    return Op(fn, (), ("addr",), "mbarrier", context=True)

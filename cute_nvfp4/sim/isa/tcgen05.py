"""The tcgen05 instructions; mma, ld and st have modules of their own (PTX ISA, "TensorCore 5th Generation Family
Instructions")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import TensorMemoryError, UnsupportedInstruction
from cute_nvfp4.sim.frontend.model import Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.isa import tcgen05_mma, tcgen05_move
from cute_nvfp4.sim.machine import access
from cute_nvfp4.sim.machine.access import Access
from cute_nvfp4.sim.machine.engine import RowWait, issue_rows
from cute_nvfp4.sim.machine.requests import displaced
from cute_nvfp4.sim.tcgen05 import transfers
from cute_nvfp4.sim.tcgen05.descriptor import decode, start_of
from cute_nvfp4.sim.tcgen05.layouts import COPIES
from cute_nvfp4.sim.tcgen05.mma import pair


@opcode("tcgen05")
def _tcgen05(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Calls the builder of the operation, which reads the modifiers after it."""
    name = m.take(*_OPERATIONS)
    if not name:
        raise m.refuse(f"tcgen05.{m.left[0] if m.left else ''} is not modelled")
    return _OPERATIONS[name](i, m, k)


def needs_tensor_memory(i: Instruction, g) -> None:
    """Refuses a program whose target has no tensor memory, as ptxas does."""
    target = g.wave.run.target
    if not target.startswith(("sm_10", "sm_11")):
        hint = "; its block-scaled products are mma.sync" if target.startswith("sm_12") else ""
        raise UnsupportedInstruction(f"{i.where()}: `{i.opcode}` needs sm_100a or sm_103a, this is {target}{hint}")


def cta_group(m: Mods) -> int:
    """Returns the number in ``.cta_group``."""
    return int(m.take("cta_group::1", "cta_group::2", required=True)[-1])


def per_warp(g, i: Instruction, what: str, value: np.ndarray) -> np.ndarray:
    """Returns an operand (n,) int64 of a warp-wide instruction. Raises ``TensorMemoryError`` if live lanes of a warp
    bring different values, for which the ISA defines no behaviour."""
    if value.shape[-1] == 1:
        return np.broadcast_to(value, (g.n, 1))[:, 0].astype(np.int64)
    wide, live = np.broadcast_to(value, (g.n, 32)), g.wave.live[g.warps]
    first = np.take_along_axis(wide, live.argmax(axis=1)[:, None], axis=1)
    if ((wide != first) & live).any():
        raise TensorMemoryError(f"{i.where()}: the lanes of a warp give different {what}")
    return first[:, 0].astype(np.int64)


def _alloc(i: Instruction, m: Mods, k: Kernel) -> Op:
    group = cta_group(m)
    m.words("sync", "aligned")
    m.take("shared::cta")
    m.type("b32")
    word = Access(i, "shared", 4, 1, "store")

    def give(g, cta, columns, order, address):
        """Allocates the columns of the warps that may continue, and writes their addresses to shared memory."""
        memory = g.wave.tensor_memory
        base = np.array([memory.allocate(int(c), int(n)) for c, n in zip(cta, columns)], np.uint32)
        g.wave.events.tensor_allocated(cta, base, columns)
        lane0 = np.broadcast_to(np.arange(32) == 0, (g.n, 32))
        access.store(g, word, lane0, np.broadcast_to(address[:, None], (g.n, 32)), 0, (base[:, None],))

    def fn(g, mask, addr, off, columns):
        needs_tensor_memory(i, g)
        tcgen05_move.whole_warp(g, mask, i)
        memory = g.wave.tensor_memory
        memory.same_group(i.where(), group)
        cta, want = g.wave.cta_of_warp[g.warps], per_warp(g, i, "numbers of columns", columns)
        address = per_warp(g, i, "addresses", addr) + off
        for c, n in zip(cta.tolist(), want.tolist()):
            memory.check_request(i.where(), c, n)
        np.add.at(memory.requests, cta, 1)
        order = memory.requests[cta]

        def ready(cta, want, order, address):
            return _room(memory, cta, pair(g.wave, cta, group), want, order)

        def say(cta, want, order, address):
            held = ", ".join(f"{b}..{b + n - 1}" for b, n in sorted(memory.blocks[int(cta)].items())) or "none"
            return f"waits for {int(want)} columns of tensor memory (allocated: {held}): {i.where()}"

        wait = RowWait(g, i, ready, (cta, want, order, address), say, give)
        if wait.ready().all():
            wait.passed(np.arange(g.n), g)
            return None
        return wait

    return Op(fn, (), ("addr", "b32"), "tensor", context=True, converge=-1, control="wait")


def _room(memory, ctas: np.ndarray, group: np.ndarray, want: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns which requests (n,) can be served together: their columns are free, and every CTA of their CTA group, in
    ``group`` (n, g), has made as many requests as ``order`` (n,) says."""
    taken: dict[int, np.ndarray] = {}
    out = np.zeros(len(want), bool)
    for row, (cta, n) in enumerate(zip(ctas.tolist(), want.tolist())):
        if memory.requests[group[row]].min() < order[row]:
            continue
        busy = taken.setdefault(cta, memory.allocated[cta].copy())
        base = memory.find(cta, n, busy)
        out[row] = base >= 0
        if base >= 0:
            busy[base : base + n] = True
    return out


def _dealloc(i: Instruction, m: Mods, k: Kernel) -> Op:
    group = cta_group(m)
    m.words("sync", "aligned")
    m.type("b32")

    def fn(g, mask, address, columns):
        tcgen05_move.whole_warp(g, mask, i)
        memory = g.wave.tensor_memory
        memory.same_group(i.where(), group)
        ctas, first = g.wave.cta_of_warp[g.warps], per_warp(g, i, "addresses", address)
        count = per_warp(g, i, "numbers of columns", columns)
        g.wave.events.tensor_freed(i, g.warps, ctas, first & 0xFFFF, count, pair(g.wave, ctas, group))
        for cta, at, columns_ in zip(ctas.tolist(), first.tolist(), count.tolist()):
            memory.free(i.where(), cta, at, columns_)

    return Op(fn, (), ("b32", "b32"), "tensor", context=True, converge=-1)


def _relinquish(i: Instruction, m: Mods, k: Kernel) -> Op:
    group = cta_group(m)
    m.words("sync", "aligned")

    def fn(g, mask):
        tcgen05_move.whole_warp(g, mask, i)
        g.wave.tensor_memory.same_group(i.where(), group)
        g.wave.tensor_memory.relinquished[g.wave.cta_of_warp[g.warps]] = True

    return Op(fn, (), (), "tensor", context=True, converge=-1)


def _wait(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds tcgen05.wait::ld and ::st. Loads and stores complete at once here, so only the checks need the wait."""
    m.words("sync", "aligned")
    kind = "tmem_load" if i.mods[0] == "wait::ld" else "tmem_store"

    def fn(g, mask):
        tcgen05_move.whole_warp(g, mask, i)
        g.wave.events.tensor_waited(g, mask, kind)

    return Op(fn, (), (), "tensor", context=True, converge=-1)


def _fence(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds tcgen05.fence. The simulator executes in order, so only the checks need the fence."""
    return Op(lambda g, mask: g.wave.events.tensor_fenced(g, i, mask), (), (), "tensor", context=True)


def _commit(i: Instruction, m: Mods, k: Kernel) -> Op:
    group = cta_group(m)
    m.take("mbarrier::arrive::one", required=True)
    m.take("shared::cluster")
    multicast = m.flag("multicast::cluster")
    m.type("b64")

    def fn(g, mask, addr, off, *rest):
        wave = g.wave
        wave.tensor_memory.same_group(i.where(), group)
        warps, _, (address, *cta_mask) = issue_rows(g, mask, addr, *rest)
        ctas, issuer = wave.cta_of_warp[warps], np.arange(len(warps))
        target, offset = wave.resolve(ctas, displaced(address, off), i.where())
        if multicast:
            if (cta_mask[0] == 0).any():
                raise TensorMemoryError(f"{i.where()}: a multicast to no CTA: its mask is 0")
            issuer, rank = np.nonzero(cta_mask[0].astype(np.int64)[:, None] >> np.arange(16) & 1)
            target, offset = wave.peer(ctas[issuer], rank, i.where()), offset[issuer]
        wave.engines.submit(
            transfers.Commit(i, wave, warps, issuer=issuer, target=target, offset=offset, cta_group=group)
        )

    return Op(fn, (), ("addr", "b16") if multicast else ("addr",), "tensor", context=True)


def _cp(i: Instruction, m: Mods, k: Kernel) -> Op:
    group = cta_group(m)
    shape = m.take(*{s for s, _ in COPIES}, required=True)
    multicast = m.take(*{c for _, c in COPIES if c})
    if (shape, multicast) not in COPIES:
        raise m.refuse(f".{shape} does not exist with this multicast")
    bits = 0
    if m.flag("b8x16"):
        bits = 6 if m.take("b6x16_p32", "b4x16_p64", required=True) == "b6x16_p32" else 4

    def fn(g, mask, addr, off, desc):
        wave = g.wave
        wave.tensor_memory.same_group(i.where(), group)
        warps, _, (address, desc) = issue_rows(g, mask, addr, desc)
        lane, column = tcgen05_mma.tensor_address(address, off)
        for rows in tcgen05_mma.alike(desc & ~np.uint64(0x3FC0), lane):
            fields = tcgen05_mma.named(i, decode, int(desc[rows[0]]))
            if fields.absolute:
                raise UnsupportedInstruction(
                    f"{i.where()}: an address as leading dimension is modelled for tcgen05.mma only"
                )
            one = transfers.Copy(
                i, wave, warps[rows], form=(shape, multicast), desc=fields, start=start_of(desc[rows]),
                column=column[rows], lane=int(lane[rows[0]]), bits=bits, cta_group=group,
            )  # fmt: skip
            if one.lanes.max() > 127:
                raise TensorMemoryError(f"{i.where()}: lanes from {one.lane} on do not all exist")
            for cta in pair(wave, one.ctas, group).T:
                wave.tensor_memory.require(i.where(), cta, one.column, 4 * one.chunks.shape[1])
            wave.engines.submit(one)

    return Op(fn, (), ("addr", "b64"), "tensor", context=True)


def _shift(i: Instruction, m: Mods, k: Kernel) -> Op:
    # The ISA has .cta_group before .down in its syntax, and after it in its examples.
    down = m.flag("down")
    group = cta_group(m)
    if not down:
        m.take("down", required=True)

    def fn(g, mask, addr, off):
        wave = g.wave
        wave.tensor_memory.same_group(i.where(), group)
        warps, _, (address,) = issue_rows(g, mask, addr)
        lane, column = tcgen05_mma.tensor_address(address, off)
        if (lane % 32).any():
            raise TensorMemoryError(f"{i.where()}: the lane of the address must be a multiple of 32")
        for cta in pair(wave, wave.cta_of_warp[warps], group).T:
            wave.tensor_memory.require(i.where(), cta, column, 8)
        wave.engines.submit(transfers.Shift(i, wave, warps, lane=lane, column=column, cta_group=group))

    return Op(fn, (), ("addr",), "tensor", context=True)


_OPERATIONS = {
    "alloc": _alloc,
    "dealloc": _dealloc,
    "relinquish_alloc_permit": _relinquish,
    "wait::ld": _wait,
    "wait::st": _wait,
    "fence::before_thread_sync": _fence,
    "fence::after_thread_sync": _fence,
    "commit": _commit,
    "cp": _cp,
    "shift": _shift,
    "mma": tcgen05_mma.build,
    "ld": tcgen05_move.build_load,
    "st": tcgen05_move.build_store,
}

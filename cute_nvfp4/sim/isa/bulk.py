"""Bulk copies without a tensor map, st.async and red.async: reads their operands and queues the copies (PTX ISA,
"cp.async.bulk", "cp.reduce.async.bulk", "st.async", "red.async")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import MbarrierMisuse, OutOfBounds
from cute_nvfp4.sim.frontend.model import Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, bits
from cute_nvfp4.sim.machine.engine import issue_rows
from cute_nvfp4.sim.machine.layout import WINDOW_SHIFT
from cute_nvfp4.sim.machine.requests import displaced
from cute_nvfp4.sim.tma.bulk_copy import BulkLoad, BulkStore, SharedCopy, ValueStore
from cute_nvfp4.sim.tma.operations import Copy, Targets
from cute_nvfp4.sim.tma.reduce import BULK_GLOBAL, BULK_SHARED, reduction

TX = "mbarrier::complete_tx::bytes"


def offset_by(base: np.ndarray, offset: int) -> np.ndarray:
    """Returns the addresses plus the instruction's byte offset, which may be negative."""
    return base + base.dtype.type(offset & (1 << 8 * base.dtype.itemsize) - 1)


def pick(m: Mods, *allowed: str, required: bool = False) -> str:
    """Consumes and returns one of ``allowed`` at any position, because compilers write these modifiers in different
    orders."""
    for word in m.left:
        if word in allowed:
            m.left.remove(word)
            return word
    if required:
        raise m.refuse(f"expected one of .{' .'.join(allowed)}")
    return ""


def own_shared(copy: Copy, address: np.ndarray) -> np.ndarray:
    """Returns the shared-memory offsets (k,) of .shared::cta addresses. Raises ``OutOfBounds`` for an address in
    another CTA."""
    cta, offset = copy.wave.resolve(copy.ctas, address, copy.instruction.where())
    other = (cta != copy.ctas).nonzero()[0]
    if len(other):
        text = f"{int(address[other[0]]):#x} is not in the shared memory of the CTA itself, which .shared::cta means"
        raise OutOfBounds(copy.say(text, int(other[0])))
    return offset


def targets(copy: Copy, dst, bar, cluster: bool, pair: bool = False, ctas: np.ndarray | None = None) -> Targets:
    """Returns the destinations and mbarriers of loads to the addresses ``dst`` and ``bar`` (k,).

    ``cluster`` says whether ``dst`` may be in another CTA. ``pair`` stands for .cta_group::2. ``ctas`` (k,) are the
    masks of a multicast. Without multicast, the mbarrier must be in the destination CTA, or with ``pair`` in its CTA
    pair. With multicast, data and signals go to the same offsets in every CTA of the mask; with ``pair``, each signal
    goes to the CTA of the destination's pair whose rank has the parity of the CTA of ``bar``.
    """
    wave, where = copy.wave, copy.instruction.where()
    if cluster:
        dst_cta, offset = wave.resolve(copy.ctas, dst, where)
    else:
        dst_cta, offset = copy.ctas, own_shared(copy, dst)
    bar_cta, bar_offset = wave.resolve(copy.ctas, bar, where)
    if ctas is None:
        source = np.arange(len(offset))
        partner = wave.rank[dst_cta] // 2 == wave.rank[bar_cta] // 2
        wrong = ~partner if pair else bar_cta != dst_cta
        if wrong.any():
            k = int(wrong.argmax())
            allowed = "of the destination's CTA or of its pair" if pair else "of the destination's CTA"
            text = f"the mbarrier belongs to {wave.cta_name(int(bar_cta[k]))}, it must be one {allowed}"
            raise MbarrierMisuse(copy.say(text, k))
        return Targets(source, dst_cta, offset, bar_cta, bar_offset)
    wrong = (ctas == 0) | (ctas >> wave.cluster_size != 0)
    if wrong.any():
        k = int(wrong.argmax())
        text = f"multicast to CTAs {int(ctas[k]):#06b} of a cluster of {wave.cluster_size}"
        raise OutOfBounds(copy.say(text, k))
    source, rank = np.nonzero(ctas[:, None] >> np.arange(16)[None, :] & 1)
    dest = wave.peer(copy.ctas[source], rank, where)
    signal = wave.peer(copy.ctas[source], rank & ~1 | wave.rank[bar_cta[source]] & 1, where) if pair else dest
    return Targets(source, dest, offset[source], signal, bar_offset[source])


def global_address(copy: Copy, address: np.ndarray) -> np.ndarray:
    """Returns the host addresses (k,) of global addresses. Raises ``OutOfBounds`` for an address of another space."""
    window = (address.astype(np.uint64) >> np.uint64(WINDOW_SHIFT)).nonzero()[0]
    if len(window):
        raise OutOfBounds(copy.say(f"{int(address[window[0]]):#x} is not an address of global memory", int(window[0])))
    return address.astype(np.int64)


def bulk(i: Instruction, m: Mods, reduce: bool) -> Op:
    """Builds every instruction with ``bulk`` but not ``tensor``; the modifiers up to ``bulk`` have been consumed."""
    if not reduce and m.take("prefetch"):
        m.words("L2", "global")
        hint = ("b64",) if m.take("L2::cache_hint") else ()
        return Op(lambda g, mask, *rest: None, (), ("addr", "u32", *hint), "cache", context=True)
    to = m.take("shared::cluster", "shared::cta", "global", required=True)
    source = m.take("global", "shared::cta", required=True)
    if to == source or (to == "shared::cta" and source != "global"):
        raise m.refuse(f"a bulk copy from .{source} to .{to} does not exist")
    if to == "global":
        return _store(i, m, reduce)
    m.take(TX, required=True)
    if source == "global":
        if reduce:
            raise m.refuse("a bulk reduction from .global does not exist")
        return _load(i, m, to == "shared::cluster")
    fixed = _operation(m, BULK_SHARED) if reduce else None
    return _between(i, fixed)


def _operation(m: Mods, table: dict[str, tuple[str, ...]]):
    op = m.take(*table, required=True)
    noftz = m.flag("noftz")
    t = m.type("b32", "b64", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64")
    if t not in table[op] or noftz != (op == "add" and t in ("f16", "bf16")):
        raise m.refuse(f".{op}.{t} does not exist here (and .noftz belongs to .add of f16 and bf16)")
    return reduction(op, t)


def _rows(g, mask, addresses, *operands, once: bool = False):
    """Returns ``issue_rows`` of ``addresses``, pairs of base and offset, and of ``operands``."""
    full = [displaced(a, off) for a, off in addresses]
    return issue_rows(g, mask, *full, *operands, once=once)


def _load(i: Instruction, m: Mods, cluster: bool) -> Op:
    multicast = m.flag("multicast::cluster")
    hint = ("b64",) if m.flag("L2::cache_hint") else ()
    if multicast and not cluster:
        raise m.refuse(".multicast::cluster needs a destination in .shared::cluster")

    def fn(g, mask, dst, dst_off, src, src_off, size, bar, bar_off, *rest):
        chosen = rest[:1] if multicast else ()
        places = ((dst, dst_off), (src, src_off), (bar, bar_off))
        warps, lanes, (to, address, signal, count, *ctas) = _rows(g, mask, places, size, *chosen)
        copy = BulkLoad(i, g.wave, warps, lanes)
        copy.sized(count.astype(np.int64))
        where = targets(copy, to, signal, cluster, ctas=ctas[0].astype(np.int64) if ctas else None)
        copy.aim(global_address(copy, address), where)
        g.wave.engines.submit(copy)

    src = ("addr", "addr", "u32", "addr", *(("b16",) if multicast else ()), *hint)
    return Op(fn, (), src, "bulk", context=True)


def _store(i: Instruction, m: Mods, reduce: bool) -> Op:
    m.take("bulk_group", required=True)
    hint = ("b64",) if m.flag("L2::cache_hint") else ()
    masked = not reduce and m.flag("cp_mask")
    fixed = _operation(m, BULK_GLOBAL) if reduce else None

    def fn(g, mask, dst, dst_off, src, src_off, size, *rest):
        chosen = rest[-1:] if masked else ()
        places = ((dst, dst_off), (src, src_off))
        warps, lanes, (to, source, count, *kept) = _rows(g, mask, places, size, *chosen, once=True)
        copy = BulkStore(i, g.wave, warps, lanes)
        copy.sized(count.astype(np.int64))
        copy.aim(global_address(copy, to), own_shared(copy, source), kept[0] if kept else None, fixed)
        g.wave.engines.submit(copy)

    return Op(fn, (), ("addr", "addr", "u32", *hint, *(("b16",) if masked else ())), "bulk", context=True)


def _between(i: Instruction, fixed) -> Op:
    def fn(g, mask, dst, dst_off, src, src_off, size, bar, bar_off):
        places = ((dst, dst_off), (src, src_off), (bar, bar_off))
        warps, lanes, (to, source, signal, count) = _rows(g, mask, places, size)
        copy = SharedCopy(i, g.wave, warps, lanes)
        copy.sized(count.astype(np.int64))
        copy.aim(own_shared(copy, source), targets(copy, to, signal, cluster=True), fixed)
        g.wave.engines.submit(copy)

    return Op(fn, (), ("addr", "addr", "u32", "addr"), "bulk", context=True)


def _values(values: list[np.ndarray]) -> np.ndarray:
    """Returns the bytes (k, bytes) of the registers of k threads."""
    raw = [np.ascontiguousarray(v).view(np.uint8).reshape(len(v), -1) for v in values]
    return np.concatenate(raw, axis=1)


def st_async(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds st.async; ``async`` has been consumed."""
    m.take("weak")
    m.take("shared::cluster")
    m.take(TX, required=True)
    count = int(m.take("v2", "v4", default="v1")[1:])
    t = m.type("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
    if count * bits(t) > 128:
        raise m.refuse(f".v{count}.{t} is wider than 16 bytes")
    raw = f"b{bits(t)}"

    def fn(g, mask, dst, dst_off, value, bar, bar_off):
        values = value if count > 1 else (value,)
        warps, lanes, (to, signal, *data) = _rows(g, mask, ((dst, dst_off), (bar, bar_off)), *values)
        copy = ValueStore(i, g.wave, warps, lanes)
        copy.aim(_values(data), targets(copy, to, signal, cluster=True))
        g.wave.engines.submit(copy)

    element = raw if count == 1 else (raw,) * count
    return Op(fn, (), ("addr", element, "addr"), "bulk", context=True)


def red_async(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds red.async; ``async`` has been consumed."""
    m.take("relaxed")
    m.take("cluster")
    m.take("shared::cluster")
    m.take(TX, required=True)
    m.take("shared::cluster")
    op = m.take(*BULK_SHARED, required=True)
    t = m.type("u32", "s32", "u64", "b32")
    if t not in BULK_SHARED[op]:
        raise m.refuse(f"red.async.{op} does not exist for .{t}")
    fixed, raw = reduction(op, t), f"b{bits(t)}"

    def fn(g, mask, dst, dst_off, value, bar, bar_off):
        warps, lanes, (to, signal, data) = _rows(g, mask, ((dst, dst_off), (bar, bar_off)), value)
        copy = ValueStore(i, g.wave, warps, lanes)
        copy.aim(_values([data]), targets(copy, to, signal, cluster=True), fixed)
        g.wave.engines.submit(copy)

    return Op(fn, (), ("addr", raw, "addr"), "bulk", context=True)

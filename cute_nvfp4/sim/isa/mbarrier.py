"""mbarrier instructions (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier")."""

from __future__ import annotations

from functools import partial

import numpy as np

from cute_nvfp4.sim.errors import MbarrierMisuse
from cute_nvfp4.sim.frontend.model import Instruction, Kernel, Sink
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.machine.engine import Wait
from cute_nvfp4.sim.machine.mbarrier import Mbarriers
from cute_nvfp4.sim.machine.requests import displaced

_PHASE_BITS = 32
"""Number of low bits of a state that hold the phase; the higher bits hold the pending count."""


class MbarrierWait(Wait):
    """The wait of lanes for the end of a phase of an mbarrier.

    All arrays are (n, 1), or (n, 32) where lanes differ. ``cta`` and ``slot`` name the mbarrier, ``phase`` is the
    number of the phase, and ``answered`` says whether it had ended when the instruction was executed.
    """

    def __init__(self, group, instruction, cta, slot, phase, answered) -> None:
        super().__init__(group, instruction)
        self.cta, self.slot, self.phase, self.answered = cta, slot, phase, answered

    def ready(self) -> np.ndarray:
        over = self.group.wave.mbarriers.phase[self.cta, self.slot] > self.phase
        if over.shape[1] == 1:
            return over[:, 0]
        return (over & self.group.lanes()).any(axis=1)

    def part(self, rows: np.ndarray, group) -> MbarrierWait:
        return MbarrierWait(
            group, self.instruction, self.cta[rows], self.slot[rows], self.phase[rows], self.answered[rows]
        )

    def describe(self, row: int) -> str:
        wave = self.group.wave
        lane = int(self.group.lanes()[row].argmax()) if self.cta.shape[1] > 1 else 0
        cta, slot = int(self.cta[row, lane]), int(self.slot[row, lane])
        want = int(self.phase[row, lane])
        return f"the end of phase {want} of {wave.mbarriers.name(cta, slot)}: {wave.mbarriers.state(cta, slot)}"


def _order(m: Mods) -> bool:
    """Takes .sem and .scope. Returns whether the operation orders memory: release or acquire, also by default."""
    order = m.take("release", "acquire", "relaxed")
    m.take("cta", "cluster")
    return order != "relaxed"


def _where(g, mask, addr: np.ndarray, off: int, i: Instruction, space: str):
    """Returns (rows, lanes, CTAs, offsets) of the executing lanes and their mbarriers. Raises ``MbarrierMisuse`` for an
    mbarrier in another CTA, unless ``space`` is "shared::cluster"."""
    rows, lanes = np.nonzero(g.lanes(mask))
    address = np.broadcast_to(displaced(addr, off), (g.n, 32))[rows, lanes]
    own = g.wave.cta_of_warp[g.warps[rows]]
    cta, offset = g.wave.resolve(own, address, i.where())
    if space != "shared::cluster" and (cta != own).any():
        raise MbarrierMisuse(f"{i.where()}: the mbarrier belongs to another CTA of the cluster; use .shared::cluster")
    return rows, lanes, cta, offset


def _at(value: np.ndarray, g, rows: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    return np.broadcast_to(value, (g.n, 32))[rows, lanes].astype(np.int64)


@opcode("mbarrier")
def _mbarrier(i: Instruction, m: Mods, k: Kernel) -> Op:
    kind = m.take(*_OPERATIONS, required=True)
    return _OPERATIONS[kind](i, m, kind)


def _shared(m: Mods, *more: str) -> str:
    return m.take("shared", "shared::cta", *more)


def _init(i: Instruction, m: Mods, kind: str) -> Op:
    _shared(m)
    m.type("b64")

    def fn(g, mask, addr, off, count):
        rows, lanes, cta, offset = _where(g, mask, addr, off, i, "shared")
        again = g.wave.mbarriers.init(i.where(), cta, offset, _at(count, g, rows, lanes))
        if again.any():
            g.wave.events.mbarrier_replaced(g, i, rows[again], lanes[again], cta[again], offset[again])
        g.wave.events.mbarrier_initialised(g, i, rows, lanes, cta, offset)

    return Op(fn, (), ("addr", "u32"), "mbarrier", context=True)


def _inval(i: Instruction, m: Mods, kind: str) -> Op:
    _shared(m)
    m.type("b64")

    def fn(g, mask, addr, off):
        rows, lanes, cta, offset = _where(g, mask, addr, off, i, "shared")
        g.wave.events.mbarrier_invalidated(g, i, rows, lanes, cta, offset)
        g.wave.mbarriers.invalidate(i.where(), cta, offset)

    return Op(fn, (), ("addr",), "mbarrier", context=True)


def _arrive(i: Instruction, m: Mods, kind: str) -> Op:
    """Builds arrive and arrive_drop. Their operands are [state,] [addr] {, count}, with .expect_tx [state,] [addr],
    bytes, and with .noComplete state, [addr], count."""
    expect = m.flag("expect_tx")
    ordered = _order(m) if not m.flag("noComplete") else True
    space = _shared(m, "shared::cluster")
    if not expect:
        m.flag("noComplete")
    m.type("b64")
    drop = kind == "arrive_drop"
    has_state = not hasattr(i.operands[0], "base")
    given = len(i.operands) - has_state
    if given not in ((2,) if expect else (1, 2)):
        raise m.refuse("wants an address, and a count or a number of bytes")
    sink = has_state and isinstance(i.operands[0], Sink)
    if has_state and not sink and space == "shared::cluster":
        raise m.refuse("an arrival at another CTA's mbarrier returns no state")

    def fn(g, mask, addr, off, *value):
        rows, lanes, cta, offset = _where(g, mask, addr, off, i, space)
        table = g.wave.mbarriers
        number = _at(value[0], g, rows, lanes) if value else np.ones(len(rows), np.int64)
        if expect:
            table.expect_tx(i.where(), cta, offset, number)
        slot = table.find(i.where(), cta, offset)
        events = g.wave.events
        arrivals = np.ones(len(rows), np.int64) if expect else np.broadcast_to(number, rows.shape)
        if drop:
            np.subtract.at(table.count, (cta, slot), arrivals)
        pending, phase = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        # The checks must not see arrivals after the end of a phase as part of it: they see such arrivals one by one.
        for k in _parts(table, cta, slot, arrivals) if events.hears("mbarrier_arrives") else [slice(None)]:
            pending[k] = table.pending[cta[k], slot[k]]
            events.mbarrier_arrives(g, i, rows[k], lanes[k], cta[k], offset[k], ordered)
            phase[k] = table.arrive(i.where(), cta[k], offset[k], arrivals[k])
        state = np.zeros((g.n, 32), np.uint64)
        state[rows, lanes] = (pending << _PHASE_BITS | phase).astype(np.uint64)
        return state

    src = ("addr",) + (("u32",) if given == 2 else ())
    if not has_state:
        return Op(lambda *a: (fn(*a), None)[1], (), src, "mbarrier", context=True)
    return Op(fn, ("b64",), src, "mbarrier", context=True)


def _parts(table: Mbarriers, cta: np.ndarray, slot: np.ndarray, arrivals: np.ndarray) -> list[slice]:
    """Returns one slice with all arrivals, or one slice for each if an mbarrier has more arrivals than its phase
    still needs."""
    if len(cta) > 1:
        barriers, inverse = np.unique(cta * table.pending.shape[1] + slot, return_inverse=True)
        needed = table.pending.reshape(-1)[barriers]
        if (np.bincount(inverse.reshape(-1), weights=arrivals) > needed).any():
            return [slice(k, k + 1) for k in range(len(cta))]
    return [slice(None)]


def _tx(i: Instruction, m: Mods, kind: str) -> Op:
    _order(m)
    space = _shared(m, "shared::cluster")
    m.type("b64")

    def fn(g, mask, addr, off, size):
        rows, lanes, cta, offset = _where(g, mask, addr, off, i, space)
        g.wave.events.mbarrier_counted(g, i, rows, cta, offset)
        getattr(g.wave.mbarriers, kind)(i.where(), cta, offset, _at(size, g, rows, lanes))

    return Op(fn, (), ("addr", "u32"), "mbarrier", context=True)


def _poll(i: Instruction, m: Mods, kind: str) -> Op:
    """Builds test_wait and try_wait. Their operands are done, [addr], state or parity {, suspend time}."""
    parity = m.flag("parity")
    ordered = _order(m)
    parity = m.flag("parity") or parity
    _shared(m)
    m.type("b64")
    hint = len(i.operands) == 4 and kind == "try_wait"

    def fn(g, mask, addr, off, value, *_):
        wave = g.wave
        table = wave.mbarriers
        shape = np.broadcast_shapes(addr.shape, value.shape, (g.n, 1))
        if shape[1] == 1:
            address = np.broadcast_to(displaced(addr, off), shape)[:, 0]
            cta, offset = wave.resolve(g.ctas(), address, i.where())
            slot = table.find(i.where(), cta, offset)
            cta, slot = cta[:, None], slot[:, None]
        else:
            rows, lanes, c, offset = _where(g, mask, addr, off, i, "shared::cluster")
            cta, slot = np.zeros((2, g.n, 32), np.int64)
            cta[rows, lanes], slot[rows, lanes] = c, table.find(i.where(), c, offset)
        if (cta != g.ctas()[:, None]).any() and shape[1] == 1:
            raise MbarrierMisuse(f"{i.where()}: only the own CTA's mbarriers can be waited for")
        now = table.phase[cta, slot]
        asked = np.broadcast_to(value.astype(np.int64), shape)
        if parity:
            # A parity names either the current phase or the one before it.
            phase = np.where((now & 1) == (asked & 1), now, now - 1)
        else:
            phase = asked & ((1 << _PHASE_BITS) - 1)
        wave.events.mbarrier_asked(g, i, mask, cta, slot, phase)
        done = now > phase
        g.polled = partial(MbarrierWait, instruction=i, cta=cta, slot=slot, phase=phase, answered=done)
        if kind == "try_wait" and wave.random is not None and wave.random.random() < 0.2:
            # The ISA allows try_wait to return false although the phase is over. The next try_wait may return true, so
            # this counts as a change of state.
            wave.effects += int(done.any())
            return np.zeros(shape, bool)
        if done.any():
            wave.events.mbarrier_passed(g, i, mask, done, cta, slot, ordered)
        return done

    src = ("addr", "u32" if parity else "b64", *(("u32",) if hint else ()))
    return Op(fn, ("pred",), src, "mbarrier", context=True, poll=True)


def _pending_count(i: Instruction, m: Mods, kind: str) -> Op:
    m.type("b64")
    return Op(lambda state: (state >> np.uint64(_PHASE_BITS)).astype("u4"), ("b32",), ("b64",), "mbarrier")


_OPERATIONS = {
    **{"init": _init, "inval": _inval, "arrive": _arrive, "arrive_drop": _arrive, "expect_tx": _tx, "complete_tx": _tx},
    **{"test_wait": _poll, "try_wait": _poll, "pending_count": _pending_count},
}

"""Control flow and barriers of a CTA (PTX ISA, "Control Flow" and "Parallel Synchronization and Communication
Instructions")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import InvalidLanes
from cute_nvfp4.sim.frontend.model import Imm, Instruction, Kernel, Reg
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.isa.cluster import cluster_barrier
from cute_nvfp4.sim.isa.warp import participants
from cute_nvfp4.sim.machine.engine import RowWait
from cute_nvfp4.sim.numerics.lanes import members

_ALL = Imm(0)
"""The thread count that stands for every live thread of the CTA."""


@opcode("bra")
def _bra(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.flag("uni")
    return Op(None, (), ("static",), "control", control="branch")


@opcode("brx")
def _brx(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.take("idx", required=True)
    m.flag("uni")
    return Op(None, (), ("u32", "static"), "control", control="table")


@opcode("ret", "exit")
def _ret(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.flag("uni")
    return Op(None, (), (), "control", control="exit")


@opcode("trap")
def _trap(i: Instruction, m: Mods, k: Kernel) -> Op:
    return Op(None, (), (), "control", control="trap")


@opcode("bar", "barrier")
def _bar(i: Instruction, m: Mods, k: Kernel) -> Op:
    if m.take("warp"):
        m.take("sync", required=True)
        return _warp_sync(i)
    if m.flag("cluster"):
        return cluster_barrier(i, m)
    m.flag("cta")
    kind = m.take("sync", "arrive", "red", required=True)
    reduction = m.take("popc", "and", "or", required=True) if kind == "red" else ""
    converge = -1 if m.flag("aligned") or i.base == "bar" else None
    given = len(i.operands)
    if kind == "red":
        d = m.type("u32" if reduction == "popc" else "pred")
        if given == 3:
            i.operands = (*i.operands[:2], _ALL, i.operands[2])
        if not isinstance(i.operands[0], Reg):
            raise m.refuse("the result of bar.red must be a register")
        return Op(None, (d,), ("u32", "u32", "pred"), "barrier", control="barrier", converge=converge)
    if given == 1:
        i.operands = (*i.operands, _ALL)
    if kind == "arrive" and i.operands[-1] is _ALL:
        raise m.refuse("bar.arrive needs a thread count")
    return Op(None, (), ("u32", "u32"), "barrier", control="barrier", converge=converge)


def _warp_sync(i: Instruction) -> Op:
    """Builds bar.warp.sync, at which a lane waits for the lanes of its member mask, which must have the same mask."""

    def fn(g, mask, member_mask):
        lanes = participants(g, mask, member_mask, i)
        if member_mask.shape[1] == 1:
            g.wave.events.warp_synced(g, mask, members(member_mask))
            return
        for own in np.unique(member_mask[lanes]).tolist():
            mine = lanes & (member_mask == own)
            named = members(np.full((1, 1), own, "u4")) & mine.any(axis=1, keepdims=True)
            other = named & lanes & ~mine
            if other.any():
                raise InvalidLanes(
                    f"{i.where()}: {g.thread(other)} is waited for with another member mask than its own"
                )
            g.wave.events.warp_synced(g, mine, named)

    return Op(fn, (), ("b32",), "barrier", context=True, converge=0)


@opcode("nanosleep", "pmevent")
def _sleep(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.take("u32")
    return Op(lambda g, mask, t: None, (), ("u32",), "control", context=True)


@opcode("setmaxnreg")
def _setmaxnreg(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds setmaxnreg. It moves registers between warps, which can make a warp wait but changes no value."""
    action = m.take("inc", "dec", required=True)
    m.words("sync", "aligned")
    m.type("u32")
    count = i.operands[0]
    if not isinstance(count, Imm) or count.value % 8 or not 24 <= count.value <= 256:
        raise m.refuse("the register count must be a multiple of 8 from 24 to 256")
    return (_more_registers if action == "inc" else _fewer_registers)(i, count.value)


def _fewer_registers(i: Instruction, count: int) -> Op:
    def fn(g, mask):
        pool = g.wave.registers
        if pool.each:
            pool.release(g.warps[g.lanes(mask).any(axis=1)], count)

    return Op(fn, (), ("static",), "control", context=True, converge=-1)


def _more_registers(i: Instruction, count: int) -> Op:
    def fn(g, mask):
        pool = g.wave.registers
        if not pool.each:
            return None
        pool.ask(g.warps, count)
        wait = RowWait(g, i, pool.served, (g.warps,), pool.describe, lambda _, warps: pool.take(warps))
        if not wait.ready().all():
            return wait
        wait.passed(np.arange(g.n), g)
        return None

    return Op(fn, (), ("static",), "control", context=True, converge=-1, control="wait")


@opcode("griddepcontrol")
def _dependency(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds griddepcontrol. Launches run one after another, so the previous kernel has always ended, and only the
    checks need the instruction."""
    if m.take("launch_dependents", "wait", required=True) == "wait":
        return Op(lambda g, mask: g.wave.events.dependency_waited(g, mask), (), (), "control", context=True)
    return Op(lambda g, mask: g.wave.events.dependents_launched(g, mask), (), (), "control", context=True)

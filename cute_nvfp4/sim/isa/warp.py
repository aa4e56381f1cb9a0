"""Warp-wide communication (PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "activemask", "elect.sync").

Instructions with a member mask begin a block, and the executor runs them only when every live lane of the mask has
reached that block.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import InvalidLanes
from cute_nvfp4.sim.frontend.model import Instruction, Kernel, Pair
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.numerics import single
from cute_nvfp4.sim.numerics.lanes import LANES, ballot, members, reduce_lanes, shuffle_source


def participants(g, mask, member_mask: np.ndarray, i: Instruction) -> np.ndarray:
    """Returns the lanes (n, 32) that execute the instruction. Raises ``InvalidLanes`` for a lane that is not in its own
    member mask."""
    lanes = g.lanes(mask)
    if member_mask.size == 1 and member_mask.item() == 0xFFFFFFFF:
        return lanes
    own = members(member_mask)
    bad = lanes & ~own
    if bad.any():
        raise InvalidLanes(f"{i.where()}: {g.thread(bad)} is not in its own member mask")
    return lanes & own


def whole_warp(g, mask, i: Instruction) -> None:
    """Raises ``InvalidLanes`` if a lane of a warp does not execute an ``.aligned`` instruction."""
    if mask is not None:
        raise InvalidLanes(f"{i.where()}: {g.thread(~mask)} does not take part; all 32 lanes must")


@opcode("shfl")
def _shfl(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.take("sync", required=True)
    mode = m.take("up", "down", "bfly", "idx", required=True)
    t = m.type("b32")
    paired = isinstance(i.operands[0], Pair)

    def fn(g, mask, a, b, c, member_mask):
        participants(g, mask, member_mask, i)
        source, ok = shuffle_source(mode, b, c)
        if a.shape[1] == 1:
            return (a, ok) if paired else a
        if source.shape[0] == 1:
            out = a[:, source[0]]
        else:
            out = np.take_along_axis(np.broadcast_to(a, source.shape), source, 1)
        return (out, ok) if paired else out

    return Op(
        fn, (("pair", t, "pred"),) if paired else (t,), (t, "b32", "b32", "b32"), "warp", context=True, converge=3
    )


@opcode("vote")
def _vote(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.take("sync", required=True)
    mode = m.take("all", "any", "uni", "ballot", required=True)
    t = m.type("b32" if mode == "ballot" else "pred")

    def fn(g, mask, p, member_mask):
        lanes = participants(g, mask, member_mask, i)
        votes = ballot(np.broadcast_to(p, (g.n, 32)), lanes)
        if mode == "ballot":
            return votes
        everybody = ballot(lanes, lanes)
        return {"all": votes == everybody, "any": votes != 0, "uni": (votes == 0) | (votes == everybody)}[mode]

    return Op(fn, (t,), ("pred", "b32"), "warp", context=True, converge=1)


@opcode("activemask")
def _activemask(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.type("b32")

    def fn(g, mask):
        lanes = g.lanes(mask)
        return ballot(lanes, lanes)

    return Op(fn, ("b32",), (), "warp", context=True)


@opcode("match")
def _match(i: Instruction, m: Mods, k: Kernel) -> Op:
    mode = m.take("any", "all", required=True)
    m.take("sync", required=True)
    t = m.type("b32", "b64")
    paired = isinstance(i.operands[0], Pair)
    if paired and mode == "any":
        raise m.refuse("match.any has no predicate destination")

    def fn(g, mask, a, member_mask):
        lanes = participants(g, mask, member_mask, i)
        a = np.broadcast_to(a, (g.n, 32))
        if mode == "any":
            equal = (a[:, :, None] == a[:, None, :]) & lanes[:, None, :]
            return (equal.astype("u4") << LANES.astype("u4")[None]).sum(axis=2, dtype="u4")
        head = np.take_along_axis(a, lanes.argmax(axis=1)[:, None], 1)
        same = ((a == head) | ~lanes).all(axis=1, keepdims=True)
        out = np.where(same, ballot(lanes, lanes), np.uint32(0))
        return (out, same) if paired else out

    return Op(fn, (("pair", "b32", "pred"),) if paired else ("b32",), (t, "b32"), "warp", context=True, converge=1)


@opcode("redux")
def _redux(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.take("sync", required=True)
    kind = m.take("add", "min", "max", "and", "or", "xor", required=True)
    absolute, nan = m.flag("abs"), m.flag("NaN")
    t = m.type("u32", "s32", "b32", "f32")
    if (t == "b32") != (kind in ("and", "or", "xor")) or (t == "f32" and kind == "add"):
        raise m.refuse(f"redux.{kind} does not exist for .{t}")
    if (absolute or nan) and t != "f32":
        raise m.refuse(".abs and .NaN are for .f32")
    info = np.iinfo("i4" if t == "s32" else "u4")
    whole = {
        "add": (np.add, 0),
        "min": (np.minimum, info.max),
        "max": (np.maximum, info.min),
        "and": (np.bitwise_and, 0xFFFFFFFF),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
    }

    def fn(g, mask, a, member_mask):
        lanes = participants(g, mask, member_mask, i)
        a = np.broadcast_to(a, (g.n, 32))
        if t != "f32":
            return reduce_lanes(a, lanes, *whole[kind])
        x = np.abs(a) if absolute else a
        pick = single.minimum if kind == "min" else single.maximum
        out = np.take_along_axis(x, lanes.argmax(axis=1)[:, None], 1)
        for lane in range(32):
            here = lanes[:, lane : lane + 1]
            out = np.where(here, pick(out, x[:, lane : lane + 1], nan), out)
        return single.canonical(out)

    return Op(fn, (t,), (t, "b32"), "warp", context=True, converge=1)


@opcode("elect")
def _elect(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.take("sync", required=True)

    def fn(g, mask, member_mask):
        lanes = participants(g, mask, member_mask, i)
        leader = lanes.argmax(axis=1)[:, None]
        return leader.astype("u4"), leader == LANES

    return Op(fn, (("pair", "b32", "pred"),), ("b32",), "warp", context=True, converge=0)

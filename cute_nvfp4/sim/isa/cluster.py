"""Addresses and barriers of a cluster (PTX ISA, "mapa", "getctarank", "barrier.cluster")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import Deadlock
from cute_nvfp4.sim.frontend.model import Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.machine.cluster import OFFSET_MASK, RANK_SHIFT
from cute_nvfp4.sim.machine.engine import RowWait
from cute_nvfp4.sim.machine.layout import WINDOW_SHIFT, WINDOWS

_RANKS = 0xFF


@opcode("mapa")
def _mapa(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.flag("shared::cluster")
    t = m.type("u32", "u64")

    def fn(address, rank):
        # A rank that does not exist is an error only when the address is used: NVIDIA's pipelines first map the
        # addresses in all lanes, and then choose the lanes that arrive.
        kind = address.dtype.type
        keep = kind(~(_RANKS << RANK_SHIFT) & ((1 << 8 * address.dtype.itemsize) - 1))
        return address & keep | ((rank.astype(kind) & kind(_RANKS)) << kind(RANK_SHIFT))

    return Op(fn, (t,), (t, "u32"), "move")


@opcode("getctarank")
def _getctarank(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.flag("shared::cluster")
    t = m.type("u32", "u64")
    low = 0xFFFFFFFF & ~OFFSET_MASK
    return Op(lambda a: ((a & a.dtype.type(low)) >> a.dtype.type(RANK_SHIFT)).astype("u4"), ("b32",), (t,), "move")


def cluster_barrier(i: Instruction, m: Mods) -> Op:
    """Builds barrier.cluster.arrive and .wait; with .aligned, whole warps execute them together."""
    kind = m.take("arrive", "wait", required=True)
    order = m.take("release", "relaxed", "acquire")
    if order and (order == "acquire") != (kind == "wait"):
        raise m.refuse(f".{order} does not go with barrier.cluster.{kind}")
    converge = -1 if m.flag("aligned") else None
    if kind == "arrive":

        def arrive(g, mask):
            wave = g.wave
            lanes = g.lanes(mask)
            again = wave.cluster_barrier.arrive(g.warps, lanes, wave.live)
            if again.any():
                raise Deadlock(f"{i.where()}: {g.thread(again)} arrives again before it has waited")
            wave.progress += 1
            wave.events.cluster_arrived(g, lanes, order != "relaxed")

        return Op(arrive, (), (), "barrier", context=True, converge=converge)

    def wait(g, mask):
        wave, lanes = g.wave, g.lanes()
        early = lanes & (wave.cluster_barrier.waits_for[g.warps] < 0)
        if early.any():
            raise Deadlock(f"{i.where()}: {g.thread(early)} waits without having arrived")

        def passed(warps):
            return wave.cluster_barrier.passed(warps, _lanes_of(g, warps, lanes))

        def say(warp):
            cluster = int(wave.cluster_barrier.cluster_of_warp[warp])
            phase = int(wave.cluster_barrier.phase[cluster])
            here = wave.cluster_barrier.waits_for == phase
            mine = wave.cluster_barrier.cluster_of_warp == cluster
            missing = int((wave.live & ~here)[mine].sum())
            return f"the cluster barrier, phase {phase}: {missing} live thread(s) of the cluster have not arrived"

        def then(group, warps):
            wave.cluster_barrier.leave(warps, _lanes_of(g, warps, lanes))
            wave.events.cluster_waited(group, group.lanes())

        return RowWait(g, i, passed, (g.warps,), say, then)

    return Op(wait, (), (), "barrier", control="wait", converge=converge)


def _lanes_of(g, warps: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Returns the rows of ``lanes`` (n, 32) for some of the group's warps, which are in increasing order."""
    return lanes[np.searchsorted(g.warps, warps)]


assert WINDOW_SHIFT > RANK_SHIFT and WINDOWS["shared"], "mapa of a generic address keeps its window"

"""Cluster launch control: work stealing from the grid (PTX ISA, "clusterlaunchcontrol")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import Misaligned
from cute_nvfp4.sim.frontend.model import Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.isa.bulk import offset_by
from cute_nvfp4.sim.machine.engine import Completion, Footprint, Pending, issue_rows
from cute_nvfp4.sim.machine.layout import SHARED_BASE

_CANCELED = np.uint64(1 << 63)
"""The bit of a response's upper word that says that a cluster was cancelled, whose first CTA the other bits give."""


class TryCancel(Pending):
    """clusterlaunchcontrol.try_cancel: takes the next cluster of the grid that has not started, and writes a response.

    The response of 16 bytes goes to the shared-memory offsets ``response`` (k,) and is counted by the mbarriers at
    ``barrier`` (k,), of all CTAs of the cluster if ``everywhere``. It is zero if there is no such cluster.
    """

    engine = "tma"

    def __init__(self, instruction, wave, warps, response: np.ndarray, barrier: np.ndarray, everywhere: bool) -> None:
        super().__init__(instruction, wave, warps)
        ctas = self.ctas if not everywhere else wave.cluster_of_cta[self.ctas] * wave.cluster_size
        spread = np.arange(wave.cluster_size if everywhere else 1)
        self.targets = (ctas[:, None] + spread).ravel()
        self.response, self.barrier = (np.repeat(a, len(spread)) for a in (response, barrier))
        self.copies = len(spread)
        self.completion = Completion("mbarrier", self.targets, self.barrier)

    def run(self, wave) -> None:
        words = np.zeros((len(self.warps), 2), np.uint64)
        run = wave.run
        for row in range(len(self.warps)):
            taken = run.take(1)
            if len(taken):
                corner = run.clusters.coordinates(taken, np.zeros(1, np.int64))
                x, y, z = (int(c[0]) for c in corner)
                words[row] = (x | y << 32, np.uint64(z) | _CANCELED)
        data = np.repeat(words, self.copies, axis=0).view(np.uint8)
        columns = (self.response - SHARED_BASE)[:, None] + np.arange(16)
        wave.shared2d[self.targets[:, None], columns] = data
        wave.mbarriers.complete_tx(self.instruction.where(), self.targets, self.barrier, 16)

    def footprints(self, wave) -> list[Footprint]:
        return [Footprint("shared", True, self.targets, self.response[:, None])]


@opcode("clusterlaunchcontrol")
def _clc(i: Instruction, m: Mods, k: Kernel) -> Op:
    kind = m.take("try_cancel", "query_cancel", required=True)
    return (_try_cancel if kind == "try_cancel" else _query)(i, m)


def _try_cancel(i: Instruction, m: Mods) -> Op:
    m.take("async", required=True)
    m.take("shared::cta")
    m.take("mbarrier::complete_tx::bytes", required=True)
    everywhere = m.flag("multicast::cluster::all")
    m.type("b128")

    def fn(g, mask, response, response_off, barrier, barrier_off):
        wave = g.wave
        warps, _, (at, bar) = issue_rows(g, mask, response, barrier)
        ctas = wave.cta_of_warp[warps]
        _, at = wave.resolve(ctas, offset_by(at, response_off), i.where())
        _, bar = wave.resolve(ctas, offset_by(bar, barrier_off), i.where())
        if (at & 15).any():
            raise Misaligned(f"{i.where()}: the response needs 16-byte alignment, got shared address {int(at[0]):#x}")
        wave.engines.submit(TryCancel(i, wave, warps, at, bar, everywhere))

    return Op(fn, (), ("addr", "addr"), "launch control", context=True)


def _query(i: Instruction, m: Mods) -> Op:
    what = m.take("is_canceled", *(f"get_first_ctaid::{a}" for a in "xyz"), "get_first_ctaid", required=True)
    if what == "is_canceled":
        m.words("pred", "b128")
        return Op(lambda r: (r["hi"] & _CANCELED) != 0, ("pred",), ("b128",), "launch control")
    words = {
        "x": lambda r: r["lo"].astype("u4"),
        "y": lambda r: (r["lo"] >> np.uint64(32)).astype("u4"),
        "z": lambda r: (r["hi"] & ~_CANCELED).astype("u4"),
    }
    if what == "get_first_ctaid":
        m.words("v4", "b32", "b128")
        last = np.zeros((1, 1), "u4")
        return Op(lambda r: (*(w(r) for w in words.values()), last), (("b32",) * 4,), ("b128",), "launch control")
    m.words("b32", "b128")
    return Op(words[what[-1]], ("b32",), ("b128",), "launch control")

"""tcgen05.cp, tcgen05.shift and tcgen05.commit as queued operations."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.machine.engine import Cells, Completion, Footprint, Pending
from cute_nvfp4.sim.machine.tensor_memory import COLUMNS, LANES
from cute_nvfp4.sim.machine.wave import Wave
from cute_nvfp4.sim.tcgen05 import elements, operands, product
from cute_nvfp4.sim.tcgen05.descriptor import PERIOD, MatrixDescriptor, k_major_chunks
from cute_nvfp4.sim.tcgen05.layouts import COPIES, copy_lanes
from cute_nvfp4.sim.tcgen05.mma import pair


class Transfer(Pending):
    """The base class of tcgen05.cp, shift and commit, which keep their order with all other tensor core operations of
    the CTAs of their CTA group."""

    engine = "tensor"
    completion = Completion("tensor")

    def __init__(self, instruction, wave: Wave, warps, cta_group: int) -> None:
        super().__init__(instruction, wave, warps)
        self.cta_group = cta_group

    def occupies(self, wave: Wave) -> np.ndarray:
        return pair(wave, self.ctas, self.cta_group).ravel()


class Copy(Transfer):
    """tcgen05.cp of k threads: copies from shared memory at the addresses ``start`` (k,) to tensor memory.

    ``form`` is a key of ``COPIES``, and ``desc`` the matrix descriptor of the source. The destination begins at lane
    ``lane`` and columns ``column`` (k,). ``bits`` is 4 or 6 when the copy decompresses elements of that size to bytes,
    else 0. With cta_group::2, each CTA of the pair copies from its shared memory to its tensor memory.
    """

    def __init__(
        self, instruction, wave: Wave, warps, *, form, desc: MatrixDescriptor, start, column, lane, bits, cta_group
    ):
        super().__init__(instruction, wave, warps, cta_group)
        self.start, self.column, self.lane, self.bits = start, column, lane, bits
        self.low = int(start[0]) % PERIOD
        self.chunks = k_major_chunks(desc, self.low, *COPIES[form])
        self.lanes = copy_lanes(*form) + lane

    def run(self, wave: Wave) -> None:
        ctas = pair(wave, self.ctas, self.cta_group)
        where = self.instruction.where
        raw = operands.gather(wave.shared2d, ctas, self.start - self.low, self.chunks, wave.shared_bytes, where)
        if self.bits:
            raw = elements.containers(raw, self.bits)
        # The words (k, g, 1, rows, columns) broadcast over the copies.
        words = raw.view("u4")[:, :, None]
        at = self.lanes[:, :, None] * COLUMNS + np.arange(words.shape[-1])
        base = ctas * (LANES * COLUMNS) + self.column[:, None]
        wave.tmem.reshape(-1)[base[:, :, None, None, None] + at] = words

    def footprints(self, wave: Wave) -> list[Footprint]:
        operands.check_inside(self.start - self.low, self.chunks, wave.shared_bytes, self.instruction.where)
        chunks = (self.start - self.low)[:, None] + 16 * self.chunks.reshape(1, -1)
        columns = self.column[:, None] + np.arange(4 * self.chunks.shape[1])
        out = []
        for cta in pair(wave, self.ctas, self.cta_group).T:
            out.append(Footprint("shared", False, cta, chunks))
            out.append(Footprint("tensor", True, cta, Cells(np.unique(self.lanes), columns)))
        return out


class Shift(Transfer):
    """tcgen05.shift.down of k threads: moves the 32 bytes at ``column`` (k,) from lane i + 1 to lane i, within the
    quarter of the lanes that begins at ``lane`` (k,)."""

    def __init__(self, instruction, wave: Wave, warps, *, lane: np.ndarray, column: np.ndarray, cta_group: int) -> None:
        super().__init__(instruction, wave, warps, cta_group)
        self.lane, self.column = lane, column

    def run(self, wave: Wave) -> None:
        for group, lane, column in zip(pair(wave, self.ctas, self.cta_group), self.lane.tolist(), self.column.tolist()):
            for cta in group:
                product.shift_down(wave.tmem[cta], slice(lane, lane + 32), column)

    def footprints(self, wave: Wave) -> list[Footprint]:
        out = []
        for cta in pair(wave, self.ctas, self.cta_group).T:
            for k, lane in enumerate(self.lane.tolist()):
                columns, row = self.column[k : k + 1, None] + np.arange(8), np.array([k])
                out.append(Footprint("tensor", False, cta[k : k + 1], Cells(slice(lane + 1, lane + 32), columns), row))
                out.append(Footprint("tensor", True, cta[k : k + 1], Cells(slice(lane, lane + 31), columns), row))
        return out


class Commit(Transfer):
    """tcgen05.commit of k threads: arrives once on mbarriers when all earlier asynchronous tcgen05 operations are done.

    The mbarriers are at ``offset`` (m,) in the shared memory of the CTAs ``target`` (m,). ``issuer`` (m,) is the index
    of the thread, 0 to k - 1, whose operations each mbarrier tracks.
    """

    def __init__(self, instruction, wave: Wave, warps, *, issuer, target, offset, cta_group: int) -> None:
        super().__init__(instruction, wave, warps, cta_group)
        self.issuer, self.target, self.offset = issuer, target, offset
        self.completion = Completion("mbarrier", target, offset)

    def run(self, wave: Wave) -> None:
        wave.mbarriers.arrive(self.instruction.where(), self.target, self.offset, 1)

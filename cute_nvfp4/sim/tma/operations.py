"""The operations of the copy engines: what they move when they run, and what the checks may know of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_nvfp4.sim.errors import Misaligned, OutOfBounds
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.bulk_groups import groups
from cute_nvfp4.sim.machine.engine import Completion, Footprint, Pending
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.machine.wave import Wave
from cute_nvfp4.sim.tma.memory import CELL, CHUNK


@dataclass(frozen=True)
class Targets:
    """Where k operations put their data in shared memory: ``source`` (j,) says which operation a target belongs to
    (several for multicast), ``cta`` and ``offset`` (j,) where its data go, ``bar_cta`` and ``bar_offset`` (j,) the
    mbarrier that counts their bytes."""

    source: np.ndarray
    cta: np.ndarray
    offset: np.ndarray
    bar_cta: np.ndarray
    bar_offset: np.ndarray


@dataclass(frozen=True)
class NarrowFootprint(Footprint):
    """Shared memory in parts of ``width`` bytes rather than whole chunks: ``place`` (k, m) are offsets of parts, each a
    multiple of the width."""

    width: int = CHUNK


class Copy(Pending):
    """A copy by threads (warps, lanes) (k,)."""

    def __init__(self, instruction: Instruction, wave: Wave, warps: np.ndarray, lanes: np.ndarray) -> None:
        super().__init__(instruction, wave, warps)
        self.wave, self.lanes = wave, lanes
        self.group: np.ndarray | None = None

    def say(self, what: str, row: int) -> str:
        """The text of an error: ``what`` is wrong with the operation of thread ``row``."""
        who = self.wave.thread(int(self.warps[row]), int(self.lanes[row]))
        return f"{self.instruction.where()}: {what}; by {who} in {self.wave.run.launch.title}"

    def grouped(self) -> None:
        """The copy ends when its bulk group does."""
        self.completion = Completion("bulk_group")
        groups(self.wave, "bulk_group").begin(self, self.warps, self.lanes)

    def counted(self, targets: Targets) -> None:
        """The copy ends when its mbarriers have counted its bytes."""
        self.targets = targets
        self.completion = Completion("mbarrier", targets.bar_cta, targets.bar_offset)

    def count_bytes(self, size: np.ndarray | int) -> None:
        t = self.targets
        self.wave.mbarriers.complete_tx(self.instruction.where(), t.bar_cta, t.bar_offset, size)

    def check_shared(self, offset: np.ndarray, size: np.ndarray | int, align: int, what: str, source=None) -> None:
        """Offsets (j,) of ``size`` bytes must be aligned and inside shared memory."""
        bad = (offset % align != 0).nonzero()[0]
        if len(bad):
            row = int(bad[0] if source is None else source[bad[0]])
            text = f"the {what} {int(offset[bad[0]]):#x} in shared memory is not a multiple of {align} bytes"
            raise Misaligned(self.say(text, row))
        end = SHARED_BASE + self.wave.shared_bytes
        bad = ((offset < SHARED_BASE) | (offset + size > end)).nonzero()[0]
        if len(bad):
            row = int(bad[0] if source is None else source[bad[0]])
            first = int(offset[bad[0]]) - SHARED_BASE
            last = first + int(np.broadcast_to(size, offset.shape)[bad[0]])
            text = (
                f"the {what} takes bytes {first} to {last} of shared memory, which has {self.wave.shared_bytes} bytes"
            )
            raise OutOfBounds(self.say(text, row))

    def check_aligned(self, values: np.ndarray, align: int, what: str) -> None:
        bad = (values % align != 0).nonzero()[0]
        if len(bad):
            text = f"{what} {int(values[bad[0]]):#x} is not a multiple of {align}"
            raise Misaligned(self.say(text, int(bad[0])))


def shared_cells(wave: Wave) -> np.ndarray:
    """Shared memory as cells of 16 bytes, (CTAs, cells); cell 0 is at ``SHARED_BASE``."""
    return wave.shared2d.view(CELL)


def span_chunks(offset: np.ndarray, size: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Groups of operations of equal size: (rows, chunks (k, m)) of ``size`` (k,) bytes from ``offset`` (k,)."""
    out = []
    for s in np.unique(size).tolist():
        rows = np.flatnonzero(size == s)
        if s:
            out.append((rows, offset[rows][:, None] + CHUNK * np.arange(-(-s // CHUNK))[None, :]))
    return out

"""``Copy``, the base of the copies that engines run: its completion, its checks of operands, its error messages."""

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
    """The j destinations in shared memory of k threads' copies; a multicast copy has several."""

    source: np.ndarray  #: (j,) the copy that each destination belongs to
    cta: np.ndarray  #: (j,) the CTA of the destination
    offset: np.ndarray  #: (j,) the shared address of the destination
    bar_cta: np.ndarray  #: (j,) the CTA of the mbarrier that counts its bytes
    bar_offset: np.ndarray  #: (j,) the shared address of that mbarrier


@dataclass(frozen=True)
class NarrowFootprint(Footprint):
    """A footprint in shared memory of spans of ``width`` bytes rather than 16-byte chunks; their offsets ``place``
    (k, m) are multiples of ``width``."""

    width: int = CHUNK


class Copy(Pending):
    """A copy by each of the threads (warps, lanes) (k,). ``group`` (k,) has the numbers of their bulk groups."""

    def __init__(self, instruction: Instruction, wave: Wave, warps: np.ndarray, lanes: np.ndarray) -> None:
        super().__init__(instruction, wave, warps)
        self.wave, self.lanes = wave, lanes
        self.group: np.ndarray | None = None

    def say(self, what: str, row: int) -> str:
        """Returns the text of an error: ``what`` is wrong with the copy of thread ``row``."""
        who = self.wave.thread(int(self.warps[row]), int(self.lanes[row]))
        return f"{self.instruction.where()}: {what}; by {who} in {self.wave.run.launch.title}"

    def grouped(self) -> None:
        """Adds the copies to the open bulk groups of their threads, which then observe their completion."""
        self.completion = Completion("bulk_group")
        groups(self.wave, "bulk_group").begin(self, self.warps, self.lanes)

    def counted(self, targets: Targets) -> None:
        """Sets the destinations, whose mbarriers observe the completion of the copies."""
        self.targets = targets
        self.completion = Completion("mbarrier", targets.bar_cta, targets.bar_offset)

    def count_bytes(self, size: np.ndarray | int) -> None:
        """Executes complete_tx of ``size`` bytes on the mbarrier of each destination."""
        t = self.targets
        self.wave.mbarriers.complete_tx(self.instruction.where(), t.bar_cta, t.bar_offset, size)

    def check_shared(self, offset: np.ndarray, size: np.ndarray | int, align: int, what: str, source=None) -> None:
        """Checks that ``size`` bytes at the shared addresses ``offset`` (j,) are aligned and inside shared memory.

        ``what`` names them in messages, ``source`` (j,) the copy of each; None: copy j. Raises ``Misaligned`` or
        ``OutOfBounds``.
        """
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
        """Raises ``Misaligned`` for the first of ``values`` (k,) that is not a multiple of ``align``."""
        bad = (values % align != 0).nonzero()[0]
        if len(bad):
            text = f"{what} {int(values[bad[0]]):#x} is not a multiple of {align}"
            raise Misaligned(self.say(text, int(bad[0])))


def shared_cells(wave: Wave) -> np.ndarray:
    """Returns a view of shared memory as 16-byte cells, (CTAs, cells); cell 0 is at ``SHARED_BASE``."""
    return wave.shared2d.view(CELL)


def span_chunks(offset: np.ndarray, size: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (rows, offsets of chunks (rows, m)) for the copies of each size: the chunks of ``size`` (k,) bytes from
    ``offset`` (k,) on."""
    out = []
    for s in np.unique(size).tolist():
        rows = np.flatnonzero(size == s)
        if s:
            out.append((rows, offset[rows][:, None] + CHUNK * np.arange(-(-s // CHUNK))[None, :]))
    return out

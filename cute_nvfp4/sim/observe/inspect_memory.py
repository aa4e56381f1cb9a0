"""Looking into shared and tensor memory while a kernel runs.

A ``Snapshots`` is a trace with copies:

    seen = Snapshots(before="tcgen05.ld")
    run(program, launch, memory, trace=seen)
    seen.taken[0].tensor            # (128, 512) uint32: tensor memory when the first warp was about to read it
    seen.rows()                     # the bars of the trace
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_nvfp4.sim.observe.recorder import Recorder
from cute_nvfp4.sim.observe.trace import Trace

if TYPE_CHECKING:
    from cute_nvfp4.sim.frontend.host import Launch
    from cute_nvfp4.sim.frontend.program import CompiledKernel
    from cute_nvfp4.sim.machine.wave import Group


@dataclass(frozen=True)
class Snapshot:
    """Memory of one CTA at a step of the trace. ``instruction`` is the one that was about to be reached.

    ``shared``: (bytes,) uint8, all of the CTA's shared memory. ``tensor``: (128, 512) uint32, lane by column, or None
    where the kernel uses no tensor memory.
    """

    cta: str
    step: int
    instruction: str
    shared: np.ndarray
    tensor: np.ndarray | None


class Snapshots(Trace):
    """A trace that also copies memory: each time a group of warps comes to a block with an instruction whose opcode
    begins with ``before``, and before it executes the block. The first ``most`` are kept, of the traced CTAs only;
    ``missed`` says how many were not.

    What engines have not done yet is not in the picture: operations in flight show in the trace.
    """

    def __init__(self, before: str, most: int = 16, clusters: int = 2, max_events: int = 100_000) -> None:
        super().__init__(clusters, max_events)
        self.before, self.most = before, most
        self.taken: list[Snapshot] = []
        self.missed = 0

    def recorder(self, kernel: CompiledKernel, launch: Launch) -> Recorder:
        start = self._recorders[-1].last + 1 if self._recorders else 0
        self._recorders.append(_Photographer(self, kernel, launch, start))
        return self._recorders[-1]


class _Photographer(Recorder):
    """Takes notes, and the copies."""

    def __init__(self, trace: Snapshots, kernel: CompiledKernel, launch: Launch, start: int) -> None:
        super().__init__(trace, kernel, launch, start)
        self._snapshots = trace
        self._marked = {
            b.index: next(i for i, _ in b.code if i.opcode.startswith(trace.before))
            for b in kernel.blocks
            if any(i.opcode.startswith(trace.before) for i, _ in b.code)
        }

    def block(self, group: Group, index: int, step: int) -> None:
        super().block(group, index, step)
        if index not in self._marked:
            return
        out, wave = self._snapshots, group.wave
        for cta in np.unique(wave.cta_of_warp[self._traced(group.warps)]).tolist():
            if len(out.taken) == out.most:
                out.missed += 1
                continue
            shared = wave.shared2d[cta, : wave.shared_bytes].copy()
            tensor = None if wave.tmem is None else wave.tmem[cta].copy()
            where = self._marked[index].where()
            out.taken.append(Snapshot(wave.cta_name(cta), self.last, where, shared, tensor))

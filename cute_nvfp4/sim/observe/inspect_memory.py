"""Snapshots of shared and tensor memory while a kernel runs.

``Snapshots`` is a trace that also copies memory:

    seen = Snapshots(before="tcgen05.ld")
    run(program, launch, memory, trace=seen)
    seen.taken[0].tensor            # (128, 512) uint32: tensor memory when the first warp was about to read it
    seen.rows()                     # the bars of the trace
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cute_nvfp4.sim.machine.events import Client, Listener
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.wave import Group, Wave
from cute_nvfp4.sim.observe.recorder import Recorder
from cute_nvfp4.sim.observe.steps import Steps
from cute_nvfp4.sim.observe.trace import Trace


@dataclass(frozen=True)
class Snapshot:
    """The memory of one CTA at a step of the trace.

    ``instruction`` is the one that the snapshot was asked for, in the block that was about to run.
    ``shared`` is all of the CTA's shared memory, (bytes,) uint8. ``tensor`` is its tensor memory, (128, 512) uint32 by
    lane and column, or None where the kernel uses none.
    """

    cta: str
    step: int
    instruction: str
    shared: np.ndarray
    tensor: np.ndarray | None


class Snapshots(Trace):
    """A trace that also copies the memory of traced CTAs, ahead of blocks that hold a given instruction.

    before: the beginning of an opcode. A snapshot shows a CTA whose warps are about to execute a block with it.
    most: how many snapshots are kept, the first ones; ``missed`` counts the others.
    clusters, max_events: those of ``Trace``.

    A snapshot lacks what asynchronous operations have yet to write; the trace shows those in flight.
    """

    def __init__(self, before: str, most: int = 16, clusters: int = 2, max_events: int = 100_000) -> None:
        super().__init__(clusters, max_events)
        self.before, self.most = before, most
        self.taken: list[Snapshot] = []
        self.missed = 0

    def client(self, kernel: CompiledKernel, launch: Launch, steps: Steps) -> Client:
        super().client(kernel, launch, steps)
        return _Photographer(self, self._recorders[-1], kernel)


class _Photographer(Listener):
    """Takes the copies, after ``recorder`` has noted the block."""

    def __init__(self, snapshots: Snapshots, recorder: Recorder, kernel: CompiledKernel) -> None:
        self._snapshots, self._recorder = snapshots, recorder
        self._marked: dict[int, str] = {}
        for block in kernel.blocks:
            found = next((i for i, _ in block.code if i.opcode.startswith(snapshots.before)), None)
            if found is not None:
                self._marked[block.index] = found.where()

    def listeners(self, wave: Wave) -> Iterator[Listener]:
        yield from self._recorder.listeners(wave)
        yield self

    def block(self, g: Group, index: int) -> None:
        if index not in self._marked:
            return
        out, wave = self._snapshots, g.wave
        for cta in np.unique(wave.cta_of_warp[self._recorder.traced(g.warps)]).tolist():
            if len(out.taken) == out.most:
                out.missed += 1
                continue
            shared = wave.shared2d[cta, : wave.shared_bytes].copy()
            tensor = None if wave.tmem is None else wave.tmem[cta].copy()
            out.taken.append(Snapshot(wave.cta_name(cta), self._recorder.last, self._marked[index], shared, tensor))

"""Bulk copies without a tensor map, and stores and reductions of single values that an mbarrier counts (PTX ISA,
"cp.async.bulk", "cp.reduce.async.bulk", "st.async", "red.async").

Sizes may differ from thread to thread, so each thread's copy is done by itself. ``sized`` sets the sizes of copies and
``aim`` their operands; both check them.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.machine.bulk_groups import groups
from cute_nvfp4.sim.machine.engine import Footprint, Spans
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.numerics.lanes import rounds
from cute_nvfp4.sim.tma import memory
from cute_nvfp4.sim.tma.operations import Copy, NarrowFootprint, Targets, span_chunks
from cute_nvfp4.sim.tma.reduce import Update

ALIGN = 16
"""Alignment in bytes of addresses and sizes."""


class BulkCopy(Copy):
    """The base of the operations of this file. ``size`` (k,) has the bytes of each thread's copy; ``reduction`` is that
    of ``reduce.reduction``, or None for a copy."""

    reduction: tuple[np.dtype, Update] | None = None

    def sized(self, size: np.ndarray) -> None:
        """Sets the sizes (k,). Raises ``Misaligned`` for one that is not a multiple of 16."""
        self.check_aligned(size, ALIGN, "size")
        self.size = size

    def bytes_of(self, cta: int, offset: int, size: int) -> np.ndarray:
        """Returns ``size`` bytes at the shared address ``offset`` of a CTA, as a view."""
        return self.wave.shared2d[cta, offset - SHARED_BASE : offset - SHARED_BASE + size]

    def put(self, there: np.ndarray, data: np.ndarray) -> None:
        """Writes the bytes ``data`` to the view ``there``, or reduces them into it."""
        if self.reduction is not None:
            raw, fn = self.reduction
            data = np.ascontiguousarray(fn(there.view(raw), data.view(raw))).view(np.uint8)
        there[:] = data

    def shared_footprints(self, cta, offset, size, write: bool, source=None) -> list[Footprint]:
        source = np.arange(len(offset)) if source is None else source
        return [Footprint("shared", write, cta[r], chunks, source[r]) for r, chunks in span_chunks(offset, size)]

    def global_footprints(self, address: np.ndarray, write: bool) -> list[Footprint]:
        return [
            Footprint("global", write, self.ctas[rows], Spans(address[rows][:, None], s), rows)
            for s in np.unique(self.size).tolist()
            if s and len(rows := np.flatnonzero(self.size == s))
        ]


class BulkLoad(BulkCopy):
    """Bulk copies from global to shared memory."""

    engine = "tma"

    def aim(self, address: np.ndarray, targets: Targets) -> None:
        self.address = address
        self.check_aligned(address, ALIGN, "global address")
        self.counted(targets)
        self.check_shared(targets.offset, self.size[targets.source], ALIGN, "destination", targets.source)

    def footprints(self, wave) -> list[Footprint]:
        t = self.targets
        return [
            *self.global_footprints(self.address, write=False),
            *self.shared_footprints(t.cta, t.offset, self.size[t.source], True, t.source),
        ]

    def run(self, wave) -> None:
        t = self.targets
        for k, cta, offset in zip(t.source.tolist(), t.cta.tolist(), t.offset.tolist()):
            size = int(self.size[k])
            data = memory.bytes_at(wave.run.memory, int(self.address[k]), size, self.say, k)
            self.bytes_of(cta, offset, size)[:] = data
        self.count_bytes(self.size[t.source])


class BulkStore(BulkCopy):
    """Bulk copies or reductions from shared to global memory, in bulk groups. ``byte_mask`` (k,) has a bit for each of
    16 bytes that says whether it is written, in every 16 bytes; None: all are."""

    engine = "store"

    def aim(self, address: np.ndarray, offset: np.ndarray, byte_mask=None, reduction=None) -> None:
        self.address, self.offset, self.byte_mask, self.reduction = address, offset, byte_mask, reduction
        self.check_aligned(address, ALIGN, "global address")
        self.check_shared(offset, self.size, ALIGN, "source")
        self.grouped()

    def footprints(self, wave) -> list[Footprint]:
        also = self.global_footprints(self.address, write=False) if self.reduction else []
        read = self.shared_footprints(self.ctas, self.offset, self.size, write=False)
        return [*read, *also, *self.global_footprints(self.address, write=True)]

    def run(self, wave) -> None:
        for k, cta in enumerate(self.ctas.tolist()):
            size = int(self.size[k])
            data = self.bytes_of(cta, int(self.offset[k]), size)
            there = memory.bytes_at(wave.run.memory, int(self.address[k]), size, self.say, k, write=True)
            if self.byte_mask is not None:
                chosen = np.tile(int(self.byte_mask[k]) >> np.arange(ALIGN) & 1, size // ALIGN).astype(bool)
                there[chosen] = data[chosen]
            else:
                self.put(there, data)
        groups(wave, "bulk_group").finish(self)


class SharedCopy(BulkCopy):
    """Bulk copies or reductions from a CTA's own shared memory to shared memory of its cluster."""

    engine = "tma"

    def aim(self, offset: np.ndarray, targets: Targets, reduction=None) -> None:
        self.offset, self.reduction = offset, reduction
        self.counted(targets)
        self.check_shared(offset, self.size, ALIGN, "source")
        self.check_shared(targets.offset, self.size, ALIGN, "destination", targets.source)

    def footprints(self, wave) -> list[Footprint]:
        t = self.targets
        also = self.shared_footprints(t.cta, t.offset, self.size, write=False) if self.reduction else []
        read = self.shared_footprints(self.ctas, self.offset, self.size, write=False)
        return [*read, *also, *self.shared_footprints(t.cta, t.offset, self.size, write=True)]

    def run(self, wave) -> None:
        t = self.targets
        for k, (cta, to) in enumerate(zip(self.ctas.tolist(), t.cta.tolist())):
            size = int(self.size[k])
            data = self.bytes_of(cta, int(self.offset[k]), size)
            self.put(self.bytes_of(to, int(t.offset[k]), size), data)
        self.count_bytes(self.size)


class ValueStore(BulkCopy):
    """The stores of st.async and red.async: ``values`` (k, bytes) of threads go to shared memory of the cluster."""

    engine = "tma"

    def aim(self, values: np.ndarray, targets: Targets, reduction=None) -> None:
        self.values, self.reduction = values, reduction
        self.size = np.full(len(values), values.shape[1])
        self.counted(targets)
        self.check_shared(targets.offset, values.shape[1], values.shape[1], "destination", targets.source)

    def footprints(self, wave) -> list[Footprint]:
        t = self.targets
        parts = t.offset[:, None], t.source, self.values.shape[1]
        return [
            NarrowFootprint("shared", write, t.cta, *parts) for write in ((False, True) if self.reduction else (True,))
        ]

    def run(self, wave) -> None:
        t, width = self.targets, self.values.shape[1]
        shared = self.wave.shared2d.reshape(-1)
        first = t.cta * self.wave.shared_stride + (t.offset - SHARED_BASE)
        for rows in rounds(first):  # values for one address come one after the other
            at = first[rows][:, None] + np.arange(width)
            data = np.ascontiguousarray(self.values[rows])
            if self.reduction is not None:
                raw, fn = self.reduction
                data = np.ascontiguousarray(fn(shared[at].view(raw), data.view(raw))).view(np.uint8)
            shared[at] = data
        self.count_bytes(self.size)

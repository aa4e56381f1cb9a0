"""Tensor copies: boxes of global memory to shared memory and back (PTX ISA, "cp.async.bulk.tensor",
"cp.reduce.async.bulk.tensor").

One operation is an instruction that k threads issue with one tensor map. Boxes that lie alike to the edges of the
tensor move together; copies of im2col, gather4, scatter4 and padded types move one by one.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import Misaligned, OutOfBounds
from cute_nvfp4.sim.machine.bulk_groups import groups
from cute_nvfp4.sim.machine.engine import Footprint, Spans
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.tma import im2col, memory, tile
from cute_nvfp4.sim.tma.descriptor import PADDED_BOX, InvalidTensorMap, TensorMap
from cute_nvfp4.sim.tma.operations import Copy, Targets, shared_cells
from cute_nvfp4.sim.tma.reduce import reduction

CHUNK = tile.CHUNK
SHARED_ALIGN = 128
"""Alignment in bytes of a box in shared memory."""


class TensorCopy(Copy):
    """The base of tensor loads and stores.

    ``row_count`` is the number of rows of an im2col, gather4 or scatter4 copy, or 0. ``bounds`` has the boxes that lie
    alike to the edges (``tile.bounds``), ``first`` (k,) their host addresses / 16 (``tile.corner``); both are None if
    the rows of a copy are located one by one.
    """

    def locate(self, m: TensorMap, coords: np.ndarray, offsets=None, lines=None) -> None:
        """Sets the tensor map and the place of the copies in it. Raises ``Misaligned`` or ``OutOfBounds``.

        coords: (k, rank) coordinates in elements. offsets: (k, rank - 2) of im2col. lines: (k, 4) rows of gather4 and
        scatter4.
        """
        self.map, self.coords, self.offsets, self.lines = m, coords, offsets, lines
        self.row_count = 4 if lines is not None else m.im2col.pixels if m.im2col else 0
        self.plan = tile.plan(m, 0, self.row_count)
        along = coords[:, 0] * m.bits
        step, name = (PADDED_BOX * m.bits, "128 elements") if m.padded else (8 * CHUNK, "16 bytes")
        bad = (along % step != 0).nonzero()[0]
        if len(bad):
            text = f"coordinate {int(coords[bad[0], 0])} of dimension 0 is not a multiple of {name}"
            raise Misaligned(self.say(text, int(bad[0])))
        for k in range(len(coords)) if m.im2col else ():
            d = im2col.outside_box(m, coords[k])
            if d is not None:
                text = f"coordinate {int(coords[k, d])} of dimension {d} lies outside the bounding box of im2col"
                raise OutOfBounds(self.say(text, k))
        row_by_row = self.row_count or m.padded
        self.first = None if row_by_row else tile.corner(m, coords)
        self.bounds = None if row_by_row else tile.bounds(m, coords)

    def box_rows(self, k: int) -> np.ndarray:
        """Returns the coordinates (rows, rank) at which the rows of copy ``k`` begin."""
        c = self.coords[k]
        if self.lines is not None:
            return np.stack([np.full(4, c[0]), self.lines[k]], axis=1)
        return im2col.pixels(self.map, c, self.offsets[k]) if self.map.im2col else self.plan.rows + c

    def chunks(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chunks of copy ``k``, as host address / 16, and their bytes in the tensor, (m,) in row order."""
        chunks, valid = tile.row_chunks(self.map, self.box_rows(k))
        return chunks.ravel(), valid.ravel()

    def global_footprints(self, write: bool) -> list[Footprint]:
        out = []
        for rows, key in self.bounds or ():
            keep, chunks = tile.window(self.map, 0, key).written
            size = CHUNK
            if keep is None:
                chunks, size = np.sort(chunks[self.plan.order.argsort()][:: self.plan.chunks]), CHUNK * self.plan.chunks
            if len(chunks):
                address = memory.wrapped(self.first[rows][:, None] + chunks[None, :]) * CHUNK
                out.append(Footprint("global", write, self.ctas[rows], Spans(address, size), rows))
        for k in range(len(self.coords)) if self.bounds is None else ():
            chunks, valid = self.chunks(k)
            if (valid > 0).any():
                some = chunks[valid > 0][None, :] * CHUNK
                out.append(Footprint("global", write, self.ctas[k : k + 1], Spans(some, CHUNK), np.array([k])))
        return out

    def phases(self, offset: np.ndarray) -> list[tuple[np.ndarray, tile.Plan]]:
        """Returns (rows, plan) for each phase of the swizzle that occurs among the shared addresses ``offset`` (j,)."""
        phase = offset // CHUNK % 64
        if len(phase) == 1 or (phase == phase[0]).all():
            return [(np.arange(len(offset)), tile.plan(self.map, int(phase[0]), self.row_count))]
        return [(np.flatnonzero(phase == p), tile.plan(self.map, p, self.row_count)) for p in np.unique(phase).tolist()]

    def shared_footprints(self, cta: np.ndarray, offset: np.ndarray, write: bool, source=None) -> list[Footprint]:
        source = np.arange(len(offset)) if source is None else source
        out = []
        for rows, p in self.phases(offset):
            first = offset[rows]
            first = first[:1] if (first == first[0]).all() else first
            out.append(Footprint("shared", write, cta[rows], first[:, None] + CHUNK * p.place, source[rows]))
        return out

    def check_place(self, offset: np.ndarray, what: str, source: np.ndarray | None = None) -> None:
        """Checks that the shared addresses ``offset`` (j,) are aligned and the boxes there inside shared memory (see
        ``check_shared``)."""
        for rows, p in self.phases(offset):
            size = (int(p.place[p.order[-1]]) + 1) * CHUNK
            self.check_shared(offset[rows], size, SHARED_ALIGN, what, rows if source is None else source[rows])


class TensorLoad(TensorCopy):
    """Tensor copies from global to shared memory, whose bytes mbarriers count."""

    engine = "tma"

    def aim(self, targets: Targets) -> None:
        self.counted(targets)
        self.check_place(targets.offset, "destination", targets.source)

    def footprints(self, wave) -> list[Footprint]:
        t = self.targets
        return [*self.global_footprints(write=False), *self.shared_footprints(t.cta, t.offset, True, t.source)]

    def run(self, wave) -> None:
        t, cells = self.targets, shared_cells(wave)
        several = len(t.source) > len(self.coords)
        for rows, p in self.phases(t.offset):
            sources, back = np.unique(t.source[rows], return_inverse=True) if several else (rows, None)
            data = self._data(sources, p, int(t.offset[rows[0]]) // CHUNK % 64)
            _put(cells, t.cta[rows], (t.offset[rows] - SHARED_BASE) // CHUNK, p, data if back is None else data[back])
        self.count_bytes(self.plan.bytes)

    def _data(self, chosen: np.ndarray, p: tile.Plan, phase: int) -> np.ndarray:
        """Returns the cells of the copies ``chosen``, (len(chosen), m), in the order of shared memory."""
        if self.bounds is None:
            return np.stack([self._by_rows(k)[p.order] for k in chosen.tolist()])
        if len(self.bounds) == 1:
            return self._window(chosen, tile.window(self.map, phase, self.bounds[0][1]), len(p.place))
        out = np.empty((len(chosen), len(p.place)), memory.CELL)
        for rows, key in self.bounds:
            here = np.flatnonzero(np.isin(chosen, rows))
            if len(here):
                out[here] = self._window(chosen[here], tile.window(self.map, phase, key), len(p.place))
        return out

    def _window(self, chosen: np.ndarray, w: tile.Window, count: int) -> np.ndarray:
        """Returns the cells of copies that lie alike to the edges, (len(chosen), count)."""
        held, first = self.wave.run.memory, self.first[chosen]
        say = lambda what, row: self.say(what, int(chosen[row]))  # noqa: E731
        data = self._rounded(memory.gather_boxes(held, first, w.chunks, say)) if len(w.chunks) else None
        if w.keep is None:
            return data
        out = np.full((len(chosen), count, 2), tile.FILL[self.map.nan_fill]).view(memory.CELL)[..., 0]
        if data is not None:
            out[:, w.keep] = data
        raw = out.view(np.uint8).reshape(len(chosen), count, CHUNK)
        for j, start in enumerate(first.tolist()) if len(w.tail) else ():
            for at, chunk in zip(w.tail.tolist(), w.tail_chunks.tolist()):
                here = memory.bytes_at(held, (start + chunk) * CHUNK, w.tail_bytes, say, j)
                raw[j, at, : w.tail_bytes] = self._rounded(here.copy())
        return out

    def _rounded(self, data: np.ndarray) -> np.ndarray:
        return tile.round_tf32(data) if self.map.type.startswith("tf32") else data

    def _by_rows(self, k: int) -> np.ndarray:
        """Returns the cells of copy ``k``, (m,) in row order, each row located by itself."""
        chunks, valid = self.chunks(k)
        out = np.full((len(chunks), 2), tile.FILL[self.map.nan_fill]).view(memory.CELL).ravel()
        say = lambda what, row: self.say(what, k)  # noqa: E731
        full, part = np.flatnonzero(valid == CHUNK), np.flatnonzero((valid > 0) & (valid < CHUNK))
        if len(full):
            out[full] = self._rounded(memory.gather(self.wave.run.memory, chunks[None, full], say)[0])
        raw = out.view(np.uint8).reshape(-1, CHUNK)
        for j in part.tolist():
            data = memory.bytes_at(self.wave.run.memory, int(chunks[j]) * CHUNK, int(valid[j]), say)
            raw[j, : valid[j]] = self._rounded(data.copy())
        return tile.unpacked(out, self.map) if self.map.padded else out


class TensorStore(TensorCopy):
    """Tensor copies from shared to global memory, in bulk groups; ``operation`` makes them reductions."""

    engine = "store"

    def aim(self, offset: np.ndarray, operation: str = "") -> None:
        if self.map.padded:
            # b4x16_p64 cannot be stored; the code of b6x16_p32 means b6p2x16, another layout, in a store.
            raise InvalidTensorMap(self.say(f"a store of type {self.map.type} does not exist or is not modelled", 0))
        self.offset = offset
        self.check_place(offset, "source")
        self.update = reduction(operation, self.map.type) if operation else None
        self._refuse_negative()
        self.grouped()

    def _refuse_negative(self) -> None:
        """Raises ``OutOfBounds`` if a row begins at a negative coordinate (an illegal instruction on an H200)."""
        for k in range(len(self.coords)) if self.row_count else np.flatnonzero((self.coords < 0).any(axis=1)).tolist():
            rows = self.box_rows(k)
            low = np.flatnonzero((rows < 0).any(axis=1))
            if len(low):
                text = f"a store to negative coordinates {rows[low[0]].tolist()}, which the hardware refuses"
                raise OutOfBounds(self.say(text, k))

    def footprints(self, wave) -> list[Footprint]:
        read = self.shared_footprints(self.ctas, self.offset, write=False)
        also = self.global_footprints(write=False) if self.update else []
        return [*read, *also, *self.global_footprints(write=True)]

    def run(self, wave) -> None:
        cells = shared_cells(wave)
        for rows, p in self.phases(self.offset):
            data = _get(cells, self.ctas[rows], (self.offset[rows] - SHARED_BASE) // CHUNK, p)
            if self.bounds is None:
                for j, k in enumerate(rows.tolist()):
                    chunks, valid = (x[p.order] for x in self.chunks(k))
                    keep = np.flatnonzero(valid > 0)
                    self._write(rows[j : j + 1], np.zeros(1, np.int64), chunks[keep], data[j : j + 1, keep])
                continue
            phase = int(self.offset[rows[0]]) // CHUNK % 64
            for alike, key in self.bounds:
                here = np.flatnonzero(np.isin(rows, alike)) if len(self.bounds) > 1 else np.arange(len(rows))
                keep, chunks = tile.window(self.map, phase, key).written
                if len(here):
                    chosen = data[here] if keep is None else data[here][:, keep]
                    self._write(rows[here], self.first[rows[here]], chunks, chosen)
        groups(wave, "bulk_group").finish(self)

    def _write(self, rows: np.ndarray, first: np.ndarray, chunks: np.ndarray, data: np.ndarray) -> None:
        """Writes or reduces ``data`` (r, n) of the copies ``rows`` at ``first`` (r,) + ``chunks`` (n,)."""
        if not len(chunks):
            return
        held = self.wave.run.memory
        say = lambda what, row: self.say(what, int(rows[row]))  # noqa: E731
        if self.update is None:
            memory.scatter_boxes(held, first, chunks, data, say)
            return
        raw, fn = self.update
        # Reductions of one operation may have equal addresses, so they are done one after the other.
        for j in range(len(rows)):
            old = memory.gather_boxes(held, first[j : j + 1], chunks, say)
            new = fn(old.view(raw), np.ascontiguousarray(data[j : j + 1]).view(raw))
            memory.scatter_boxes(held, first[j : j + 1], chunks, np.ascontiguousarray(new).view(memory.CELL), say)


def _put(cells: np.ndarray, cta: np.ndarray, first: np.ndarray, p: tile.Plan, data: np.ndarray) -> None:
    """Writes ``data`` (j, m), in the order of shared memory, to the boxes at cell ``first`` (j,) of ``cta`` (j,)."""
    if len(cta) == 1 and p.dense:
        at = int(first[0])
        cells[int(cta[0]), at : at + data.shape[1]] = data[0]
    elif p.dense and (first == first[0]).all():
        at = int(first[0])
        cells[cta, at : at + data.shape[1]] = data
    else:
        cells[cta[:, None], first[:, None] + p.place[p.order][None, :]] = data


def _get(cells: np.ndarray, cta: np.ndarray, first: np.ndarray, p: tile.Plan) -> np.ndarray:
    """Reads the boxes at cell ``first`` (j,) of ``cta`` (j,), as (j, m) cells in the order of shared memory."""
    if p.dense and (first == first[0]).all():
        at = int(first[0])
        return cells[cta, at : at + len(p.place)]
    return cells[cta[:, None], first[:, None] + p.place[p.order][None, :]]

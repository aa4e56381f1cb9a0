"""Decodes the rows of groups (``GroupedRows``), each of which has its blocked scales in atoms of its own.

A warp takes four rows, whatever their groups, and as many columns as its lanes store in sixteen bytes each. It starts
the loads of their codes, and in the meantime finds the groups of the rows from all offsets, and so their scales.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Int32, Int64, Uint32

from ...ptx.memory import load_global_if, store_global
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, ATOM_SHAPE
from ..arith import ceil_div, div, mod
from ..gemm.group_source import LAST, Window, clamped, sums_to
from ..gemm.grouped_config import WINDOW
from ..quantize.config import WARP
from .config import LANE_ROWS, WARPS, GroupRowsArguments, GroupRowsConfig
from .kernel import Dequantize

_QUARTER = ATOM_SHAPE[0][0]
_CHUNK = ATOM_BYTES // _QUARTER
"""Bytes of an atom for rows r, r + 32, r + 64 and r + 96."""


class Found(NamedTuple):
    """The rows of scales that a warp has found. rows: for each row of the warp its row of scales, counted over whole
    atoms, or a negative value if no group so far has it; atoms: of all groups so far."""

    rows: tuple[Int32, ...]
    atoms: Int32


class DequantizeGroupRows(Dequantize):
    """The host function and the kernel of one :class:`GroupRowsConfig`."""

    config: GroupRowsConfig

    @cute.jit
    def __call__(self, arguments: GroupRowsArguments, stream: CUstream):
        ctas = self.config.ctas(arguments.rows, arguments.k)
        self.kernel(arguments).launch(grid=(ctas, 1, 1), block=(WARP * WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, arguments: GroupRowsArguments):
        # the GEMM of these rows may start, and waits where it reads them
        cute.arch.griddepcontrol_launch_dependents()
        cfg, per_byte = self.config, self.config.format.elements_per_byte
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane, warp = mod(thread, WARP), div(thread, WARP)
        # consecutive CTAs go along K first
        across = ceil_div(arguments.k, cfg.cta_columns)
        first = (cta // across * WARPS + warp) * LANE_ROWS
        column = (cta % across * WARP + lane) * cfg.elements
        rows = [first + i for i in range(LANE_ROWS)]
        exist = [(row < arguments.rows) & (column < arguments.k) for row in rows]
        codes = arguments.data.toint() + div(column, per_byte)
        loaded = [self.load(codes + Int64(row) * arguments.stride, e) for row, e in zip(rows, exist)]
        scales = self.scales_of_groups(arguments, self.find(arguments, first), exist, div(column, cfg.format.block))
        for i in cutlass.range_constexpr(LANE_ROWS):
            words = self.values(loaded[i], scales[i], None, column)
            if exist[i]:
                out = arguments.out.toint() + Int64(rows[i]) * (arguments.k * (16 // cfg.elements))
                if cutlass.const_expr(cfg.order == "columns"):
                    store_global(out + column * (16 // cfg.elements), words)
                else:
                    self.store_in_order(out + (column - mod(column, 128)) * 2, mod(column, 128), words)

    @cute.jit
    def find(self, arguments: GroupRowsArguments, first: Int32):
        """Finds the scales of the warp's rows, which start at ``first``."""
        offsets = cute.make_tensor(arguments.offsets, cute.make_layout(arguments.count + 1))
        lane = cute.arch.lane_idx()
        reached = cutlass.min(cutlass.max(offsets[0], Int32(0)), arguments.rows)
        window = Window(reached, reached, reached, Int32(0))
        found = Found((Int32(-1),) * LANE_ROWS, Int32(0))
        for index in cutlass.range(self.config.capacity // WINDOW, unroll=1):
            group, end = index * WINDOW + lane, Int32(0)
            if group < arguments.count:
                end = offsets[group + 1]
            window = clamped(index * WINDOW, Boolean(False), end, arguments.rows, window)
            atoms = ceil_div(window.end - window.start, ATOM_ROWS)
            through = sums_to(atoms)
            base = (found.atoms + through - atoms) * ATOM_ROWS - window.start
            places = []
            for i, before in enumerate(found.rows):
                row = first + i
                lanes = cute.arch.vote_ballot_sync((row >= window.start) & (row < window.end))
                of_group = cute.arch.shuffle_sync(base, cute.arch.popc((lanes & -lanes) - 1))
                places.append(cutlass.select_(lanes != 0, of_group + row, before))
            found = Found(tuple(places), found.atoms + cute.arch.shuffle_sync(through, LAST))
        return found

    def scales_of_groups(
        self, arguments: GroupRowsArguments, found: Found, exist: list[Boolean], block: Int32
    ) -> list[Uint32]:
        """The codes of the scales of a lane's rows; 0 for scales that do not exist."""
        columns = ceil_div(div(arguments.k, self.config.format.block), ATOM_COLS)
        scales, shift = [], Uint32(mod(block, ATOM_COLS) * 8)
        for place, exists in zip(found.rows, exist):
            atom, row = div(place, ATOM_ROWS), mod(place, ATOM_ROWS)
            there = cutlass.select_(exists & (place >= 0) & (atom < arguments.atoms), Int32(1), Int32(0))
            at = (Int64(atom) * columns + div(block, ATOM_COLS)) * ATOM_BYTES
            at = at + (mod(row, _QUARTER) * _CHUNK + div(row, _QUARTER) * ATOM_COLS)
            word = load_global_if(there, arguments.scale.toint() + at, ATOM_COLS)[0]
            scales.append((word >> shift) & Uint32(0xFF))
        return scales

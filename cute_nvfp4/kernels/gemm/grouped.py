"""Cᵢ = alphaᵢ · Aᵢ · Bᵢᵀ for many problems in one launch: the roles of the GEMM, with work tiles from all groups.

The three forms (``grouped_config``) differ in where the tensor maps of a group are:

* "parameters": the host encodes four maps for each group as kernel parameters;
* "workspace": a kernel with one warp for each group writes the maps to global memory, from a table of sizes and
  addresses; the GEMM starts while it runs, and the GEMM's loads wait for it;
* "shared": offsets distribute the rows of one A to the groups, B is a stack, and one set of maps serves all groups.

``docs/explanation/grouped_gemm.md`` describes the layout of such rows' scales, why the form changes at 16 groups, and
rejected alternatives.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...scale_layout import ATOM_ROWS
from .arguments import MAP_BYTES, GroupedArguments, GroupTable, Operand
from .group_source import make_group_source
from .grouped_config import MAPS, GroupedConfig
from .host import OnArchitecture
from .operand_source import OperandMaps, map_pointer
from .operands import ELEMENT_TYPES, Loads, data_tensor, scale_tensor


def maps_of(loads: Loads) -> OperandMaps:
    """The copies that hold the tensor maps of one problem."""
    (a,), (b,) = loads
    return OperandMaps(a.data.atom, a.scales.atom, b.data.atom, b.scales.atom)


def operand_of_group(dtype: type, data: Int64, row_stride: Int64, scale: Int64, rows: Int32) -> Operand:
    """The operand that a group's words in global memory describe."""
    pointer = cute.make_ptr(dtype, data, cute.AddressSpace.gmem, assumed_align=16)
    scales = cute.make_ptr(cutlass.Uint8, scale, cute.AddressSpace.gmem, assumed_align=16)
    return Operand(pointer, scales, rows, row_stride, Int64(0), Int32(1), Int64(0))


WARP = 32


class GroupedGemm(OnArchitecture):
    """The host function and the kernels of one ``GroupedConfig``."""

    config: GroupedConfig

    @cute.jit
    def __call__(self, arguments: GroupedArguments, stream: CUstream):
        """Launches ``arguments.workers`` clusters."""
        cfg = self.config
        groups, batch = arguments.groups, arguments.batch
        sets = groups if cfg.maps == "parameters" else (arguments,)
        loads = tuple(
            Loads(
                (self.describe(0, self.with_scale_rows("a", x.a, groups), x.k, batch),),
                (self.describe(1, self.with_scale_rows("b", x.b, groups), x.k, batch),),
            )
            for x in sets
        )
        if cutlass.const_expr(cfg.maps == "workspace"):
            self.build_maps(loads[0], groups).launch(grid=(groups.count, 1, 1), block=(WARP, 1, 1), stream=stream)
        # the kernel gets the copies of the first group, and of the others only the tensor maps
        atoms = tuple(maps_of(x) for x in loads[1:])
        m, n, k = sets[0].a.rows, sets[0].b.rows, sets[0].k
        if cutlass.const_expr(cfg.maps == "parameters"):
            groups = tuple(group._replace(a=None, b=None) for group in groups)
        passed = arguments._replace(groups=groups, a=None, b=None, k=k, workers=None)
        cm, cn, ck = cfg.cluster_mnk
        self.kernel(loads[0], atoms, m, n, passed).launch(
            grid=(cm, cn, arguments.workers * ck),
            block=(self.threads, 1, 1),
            cluster=(cm, cn, ck),
            stream=stream,
            # the GEMM starts while the maps are being written, and its loads wait for them
            use_pdl=cfg.maps == "workspace",
            **self.launch,
        )

    def with_scale_rows(self, side: str, operand: Operand, groups: Any) -> Operand:
        """``operand``, with the rows of its scales if it is the operand whose rows the groups share."""
        return operand._replace(scale_rows=groups.atoms * ATOM_ROWS) if self.config.ragged == side else operand

    @cute.kernel
    def kernel(self, loads: Loads, atoms: tuple[OperandMaps, ...], m: Int32, n: Int32, arguments: GroupedArguments):
        problem = make_group_source(self.config, arguments, m, n, (maps_of(loads), *atoms))
        self.run(loads, None, problem)

    @cute.kernel
    def build_maps(self, loads: Loads, groups: GroupTable):
        """Writes the tensor maps of one group in each CTA, which is one warp: the maps of ``loads``, with the group's
        addresses, sizes and strides."""
        cute.arch.griddepcontrol_launch_dependents()
        cfg = self.config
        group, _, _ = cute.arch.block_idx()
        count = len(cfg.words)
        row = cute.make_tensor(groups.rows + Int64(group) * count, cute.make_layout(count))
        k = Int32(row[cfg.words.index("k")])
        shared = SmemAllocator().allocate_array(Int64, len(MAPS) * MAP_BYTES // 8, byte_alignment=MAP_BYTES)
        sides = (
            (loads.a[0], cfg.a_format, "m", "a"),
            (loads.b[0], cfg.b_format, "n", "b"),
        )
        number = 0
        for load, fmt, rows, side in sides:
            words = [row[cfg.words.index(f"{side}_{word}")] for word in ("data", "row_stride", "scale")]
            operand = operand_of_group(ELEMENT_TYPES[fmt], *words, Int32(row[cfg.words.index(rows)]))
            tensors = (data_tensor(operand, k, False), scale_tensor(operand, k, Int32(1), cfg.kind.block, False))
            for copy, tensor in zip((load.data, load.scales), tensors):
                place = shared + number * (MAP_BYTES // 8)
                with cute.arch.elect_one():
                    cpasync.copy_tensormap(copy.atom, place)
                cute.arch.sync_warp()
                cpasync.update_tma_descriptor(copy.atom, tensor, place)
                cute.arch.sync_warp()
                to = groups.maps.toint() + (Int64(group) * len(MAPS) + number) * MAP_BYTES
                cpasync.cp_fence_tma_desc_release(map_pointer(to, cute.AddressSpace.gmem), place)
                number += 1

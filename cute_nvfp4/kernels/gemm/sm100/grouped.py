"""Cᵢ = alphaᵢ · Aᵢ · Bᵢᵀ for many problems in one launch: the GEMM's roles, with tiles dealt from all groups.

Three forms, which differ in where the tensor maps of a group are (``core.grouped_config``):

* "parameters": the host encodes four maps for each group, and they are parameters of the kernel;
* "workspace": a kernel of one warp for each group writes them to global memory, from a table of sizes and addresses;
  the GEMM is launched along with it, and its loads wait for it;
* "shared": the groups are rows of one A, dealt by offsets, with a stack of B: one set of maps serves them all.

``docs/grouped_gemm.md`` says how scales of dealt rows lie, why the forms change at 16 groups, and what else was tried.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....scale_layout import ATOM_ROWS
from ..arguments import MAP_BYTES, GroupedArguments, GroupOffsets, GroupTable, Operand
from ..grouped_config import MAPS, GroupedConfig
from ..grouped_scheduler import ROW_WORDS
from ..operand_source import address_of_map, map_pointer
from .kernel import run_roles
from .operands import ELEMENT_TYPES, data_tensor, describe_a, describe_b, make_mma, scale_tensor
from .warp_roles import ROLES, WARP


class GroupedGemm:
    """The host function and the kernels of one ``GroupedConfig``."""

    def __init__(self, config: GroupedConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: GroupedArguments, stream: CUstream):
        """Launches ``arguments.workers`` clusters."""
        cfg = self.config
        mma = make_mma(cfg)
        groups, batch = arguments.groups, arguments.batch
        sets = groups if cfg.maps == "parameters" else (arguments,)
        rows_a, rows_b = self.scale_rows(groups)
        loads = tuple(
            (
                describe_a(cfg, mma, x.a._replace(scale_rows=rows_a), x.k, batch),
                describe_b(cfg, mma, x.b._replace(scale_rows=rows_b), x.k, batch),
            )
            for x in sets
        )
        if cutlass.const_expr(cfg.maps == "workspace"):
            self.build_maps(loads[0], groups).launch(grid=(groups.count, 1, 1), block=(WARP, 1, 1), stream=stream)
        # of all groups but one only the maps are passed on
        atoms = tuple(tuple(load[0] for side in both for load in side[:2]) for both in loads[1:])
        m, n, k = sets[0].a.rows, sets[0].b.rows, sets[0].k
        if cutlass.const_expr(cfg.maps == "parameters"):
            groups = tuple(group._replace(a=None, b=None) for group in groups)
        passed = arguments._replace(groups=groups, a=None, b=None, k=k, workers=None)
        cm, cn, ck = cfg.cluster_mnk
        self.kernel(*loads[0], atoms, m, n, passed).launch(
            grid=(cm, cn, arguments.workers * ck),
            block=(ROLES.threads, 1, 1),
            cluster=(cm, cn, ck),
            stream=stream,
            # the GEMM starts while the maps are written, and its loads wait for them
            use_pdl=cfg.maps == "workspace",
        )

    def scale_rows(self, groups: tuple | GroupTable | GroupOffsets) -> tuple:
        """Rows of the scales of A and of B, where they are not those of the data."""
        if self.config.maps != "shared":
            return None, None
        rows = groups.atoms * ATOM_ROWS
        return (rows, None) if self.config.ragged == "a" else (None, rows)

    @cute.kernel
    def kernel(self, load_a: tuple, load_b: tuple, atoms: tuple, m: Int32, n: Int32, arguments: GroupedArguments):
        groups, out = arguments.groups, arguments.out
        if cutlass.const_expr(self.config.maps == "parameters"):
            mine = tuple(load[0] for side in (load_a, load_b) for load in side[:2])
            groups = tuple(
                (g.m, g.n, g.k, g.out, g.stride, tuple(address_of_map(atom) for atom in m))
                for g, m in zip(groups, (mine, *atoms))
            )
        places = (out.pointer, m, n, out.stride, Int64(0), ())
        finish = (arguments.alpha, arguments.factors, None, None)
        run_roles(self.config, (load_a,), (load_b,), places, finish, (), arguments.k, arguments.batch, groups)

    @cute.kernel
    def build_maps(self, loads: tuple, groups: GroupTable):
        """Each CTA, one warp, writes the maps of a group: those of ``loads`` with its addresses, sizes and strides."""
        cute.arch.griddepcontrol_launch_dependents()
        cfg = self.config
        group, _, _ = cute.arch.block_idx()
        row = cute.make_tensor(groups.rows + Int64(group) * ROW_WORDS, cute.make_layout(ROW_WORDS))
        k = Int32(row[2])
        shared = SmemAllocator().allocate_array(Int64, len(MAPS) * MAP_BYTES // 8, byte_alignment=MAP_BYTES)
        for side in cutlass.range_constexpr(2):
            dtype = ELEMENT_TYPES[cfg.b_format if side else cfg.a_format]
            address, row_stride, scale = row[5 + 3 * side], row[6 + 3 * side], row[7 + 3 * side]
            data = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
            scales = cute.make_ptr(cutlass.Uint8, scale, cute.AddressSpace.gmem, assumed_align=16)
            x = Operand(data, scales, Int32(row[side]), row_stride, Int64(0), Int32(1), Int64(0))
            tensors = (data_tensor(x, k, False), scale_tensor(x, k, Int32(1), cfg.kind.block, False))
            for part in cutlass.range_constexpr(2):
                atom, place = loads[side][part][0], shared + (2 * side + part) * (MAP_BYTES // 8)
                with cute.arch.elect_one():
                    cpasync.copy_tensormap(atom, place)
                cute.arch.sync_warp()
                cpasync.update_tma_descriptor(atom, tensors[part], place)
                cute.arch.sync_warp()
                to = groups.maps.toint() + (Int64(group) * len(MAPS) + (2 * side + part)) * MAP_BYTES
                cpasync.cp_fence_tma_desc_release(map_pointer(to, cute.AddressSpace.gmem), place)

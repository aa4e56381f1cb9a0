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
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....scale_layout import ATOM_ROWS
from ..grouped_config import MAPS, GroupedConfig
from ..grouped_scheduler import ROW_WORDS
from ..operand_source import MAP_BYTES, address_of_map, map_pointer
from .kernel import run_roles
from .operands import ELEMENT_TYPES, Operand, data_tensor, describe_a, describe_b, make_mma, scale_tensor
from .warp_roles import ROLES, WARP


class GroupedGemm:
    """The host function and the kernels of one ``GroupedConfig``."""

    def __init__(self, config: GroupedConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        operands: tuple,
        groups: tuple,
        c: cute.Pointer,
        stride: Int64,
        alpha: Float32,
        factors: tuple,
        batch: Int32,
        workers: Int32,
        stream: CUstream,
    ):
        """Launches ``workers`` clusters.

        operands: (fields of an ``Operand`` for A, for B, K) of each group; of any group, from which the maps of all are
        made ("workspace"); or of the shared matrices. factors: (pointer, elements from a group's number to the next).
        groups: of each (m, n, k, output, its stride); or (rows of ``ROW_WORDS``, how many, place for the maps); or
        (offsets, how many, rows, scale atoms, status). c, stride, batch: output and matrices of the stack ("shared").
        """
        cfg = self.config
        mma = make_mma(cfg)
        rows_a, rows_b = self.scale_rows(groups)
        loads = tuple(
            (describe_a(cfg, mma, Operand(*a, rows_a), k, batch), describe_b(cfg, mma, Operand(*b, rows_b), k, batch))
            for a, b, k in operands
        )
        if cutlass.const_expr(cfg.maps == "workspace"):
            self.build_maps(loads[0], *groups).launch(grid=(groups[1], 1, 1), block=(WARP, 1, 1), stream=stream)
        # of all groups but one only the maps are passed on
        atoms = tuple(tuple(load[0] for side in both for load in side[:2]) for both in loads[1:])
        a, b, k = operands[0]
        out = (c, a[2], b[2], stride, Int64(0), ())
        cm, cn, ck = cfg.cluster_mnk
        self.kernel(*loads[0], atoms, groups, out, (alpha, factors), k, batch).launch(
            grid=(cm, cn, workers * ck),
            block=(ROLES.threads, 1, 1),
            cluster=(cm, cn, ck),
            stream=stream,
            # the GEMM starts while the maps are written, and its loads wait for them
            use_pdl=cfg.maps == "workspace",
        )

    def scale_rows(self, groups: tuple) -> tuple:
        """Rows of the scales of A and of B, where they are not those of the data."""
        if self.config.maps != "shared":
            return None, None
        rows = groups[3] * ATOM_ROWS
        return (rows, None) if self.config.ragged == "a" else (None, rows)

    @cute.kernel
    def kernel(
        self,
        load_a: tuple,
        load_b: tuple,
        atoms: tuple,
        groups: tuple,
        out: tuple,
        finish: tuple,
        k: Int32,
        batch: Int32,
    ):
        if cutlass.const_expr(self.config.maps == "parameters"):
            mine = tuple(load[0] for side in (load_a, load_b) for load in side[:2])
            groups = tuple((*g, tuple(address_of_map(atom) for atom in m)) for g, m in zip(groups, (mine, *atoms)))
        run_roles(self.config, (load_a,), (load_b,), out, (*finish, None, None), (), k, batch, groups)

    @cute.kernel
    def build_maps(self, loads: tuple, rows: cute.Pointer, count: Int32, maps: cute.Pointer):
        """Each CTA, one warp, writes the maps of a group: those of ``loads`` with its addresses, sizes and strides."""
        cute.arch.griddepcontrol_launch_dependents()
        cfg = self.config
        group, _, _ = cute.arch.block_idx()
        row = cute.make_tensor(rows + Int64(group) * ROW_WORDS, cute.make_layout(ROW_WORDS))
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
                to = maps.toint() + (Int64(group) * len(MAPS) + (2 * side + part)) * MAP_BYTES
                cpasync.cp_fence_tma_desc_release(map_pointer(to, cute.AddressSpace.gmem), place)

"""x of the streaming GEMM, from global memory to a stage by TMA, and from there to the registers of operand B.

TMA swizzles 16-bit elements in a stage, eight rows and 64 columns in 1024 bytes, and ldmatrix reads them. NVFP4 keeps
its layout, 32 bytes of codes and sixteen of scales a row, and every warp decodes what it needs of a stage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from ....ptx.async_copy import copy_bulk
from ....ptx.convert import e2m1x8_to_f16x2, e2m1x8_to_f16x2_by_table, e4m3x4_to_f16x2
from ....ptx.half import multiply_by_half
from ....ptx.memory import load_shared
from ....ptx.mma import load_matrices
from ....ptx.move import prmt
from ....scale_layout import ATOM_BYTES
from ....weight_layout import STEPS, TILE_K
from ...arith import div, mod
from ..arguments import OUT_DTYPES
from ..operands import TmaCopy
from .stream_arguments import FewRows
from .stream_config import MMA_COLUMNS, X_SCALE_BYTES, StreamConfig

ROW_BYTES = 2 * TILE_K
"""Bytes of a row of x in a packed tile: eight swizzled chunks of sixteen bytes."""
ROW_CODE_BYTES = TILE_K // 2


class SharedX(NamedTuple):
    """x in shared memory: (columns, WIDTH, STAGE), the address of its first byte, and the address of its scales."""

    sX: cute.Tensor
    address: Int32
    scales: Int32


class StageX(NamedTuple):
    """The copies of the stages of x: tXsX ((atom, rest), STAGE), tXgX ((atom, rest), REST_K), addresses of scales."""

    atom: cute.CopyAtom
    tXsX: cute.Tensor
    tXgX: cute.Tensor
    scales: Int64 | None
    shared_scales: Int32


Operands = list[list[list[Uint32]]]
"""The two registers of operand B of each step, for each eight rows of x."""


class X:
    """x in the form that ``config`` says."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.dtype = Uint8 if config.quantized_x else getattr(cutlass, OUT_DTYPES[config.dtype])
        self.width = config.stage_k // 2 if config.quantized_x else config.stage_k

    def layout(self) -> Any:
        """The layout of all stages, (columns, WIDTH, STAGE), swizzled unless x is NVFP4."""
        cfg = self.config
        shape = (cfg.columns, self.width, cfg.ring_stages)
        if cfg.quantized_x:
            return cute.make_layout(shape, stride=(self.width, 1, cfg.columns * self.width))
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, shape, order=(0, 1, 2))

    def describe(self, x: FewRows, k: Int32) -> TmaCopy:
        """Makes the TMA copy of x, on the host."""
        columns, alignment = (k // 2, 16) if self.config.quantized_x else (k, 8)
        layout = cute.make_layout((x.rows, columns), stride=(cute.assume(x.row_stride, alignment), 1))
        tensor = cute.make_tensor(x.data, layout)  # (M, K), or (M, K / 2) bytes
        one_stage = cute.slice_(self.layout(), (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        made = cpasync.make_tiled_tma_atom(op, tensor, one_stage, (self.config.columns, self.width))
        return TmaCopy(made[0], made[1])

    def prefetch(self, copy: TmaCopy) -> None:
        """Prefetches the tensor map, which has the latency of global memory."""
        cpasync.prefetch_descriptor(copy.atom)

    def allocate(self, smem: SmemAllocator) -> SharedX:
        cfg, layout = self.config, self.layout()
        if not cfg.quantized_x:
            sX = smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            return SharedX(sX, sX.iterator.toint(), Int32(0))
        sX = smem.allocate_tensor(self.dtype, layout, byte_alignment=128)
        scale_bytes = cfg.ring_stages * cfg.stage_tiles * cfg.columns * X_SCALE_BYTES
        scales = smem.allocate_array(Uint8, scale_bytes, byte_alignment=128)
        return SharedX(sX, sX.iterator.toint(), scales.toint())

    def stages(self, copy: TmaCopy, x: FewRows, shared: SharedX) -> StageX:
        gX = cute.local_tile(copy.tensor, (self.config.columns, self.width), (0, None))  # (columns, WIDTH, REST_K)
        tXsX, tXgX = cpasync.tma_partition(
            copy.atom, 0, cute.make_layout(1), cute.group_modes(shared.sX, 0, 2), cute.group_modes(gX, 0, 2)
        )  # ((atom, rest), STAGE), ((atom, rest), REST_K)
        return StageX(copy.atom, tXsX, tXgX, x.scale.toint() if self.config.quantized_x else None, shared.scales)

    @cute.jit
    def copy(self, x: StageX, k: Int32, stage: Int32, full: Int32):
        """Starts the copies of step ``k``, in the loading warp."""
        cfg = self.config
        pointer = cute.make_ptr(Int64, full, cute.AddressSpace.smem, assumed_align=8)
        cute.copy(x.atom, x.tXgX[None, k], x.tXsX[None, stage], tma_bar_ptr=pointer)
        if cutlass.const_expr(cfg.quantized_x):
            # the first rows of the atom of each tile's four columns of scales
            tile_bytes = cfg.columns * X_SCALE_BYTES
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(cfg.stage_tiles):
                    target = x.shared_scales + (stage * cfg.stage_tiles + i) * tile_bytes
                    source = x.scales + (Int64(k) * cfg.stage_tiles + i) * ATOM_BYTES
                    copy_bulk(target, source, Int32(tile_bytes), full)

    def load(self, shared: SharedX, stage: Int32, lane: Int32) -> list[Operands]:
        """Operand B of each packed tile of a stage."""
        cfg = self.config
        if cfg.quantized_x:
            return [self._decoded(shared, stage, lane, t) for t in range(cfg.stage_tiles)]
        if cfg.weights.of_fp8:
            row, c = div(lane, 4), mod(lane, 4)
            first = shared.address + row * ROW_BYTES + (div(c, 2) ^ row) * 16 + mod(c, 2) * 8
            first = first + stage * (cfg.stage_tiles * cfg.x_bytes)
            return [self._read_in_order_of_fp8(first + t * cfg.x_bytes) for t in range(cfg.stage_tiles)]
        # the address of the lane's row in a swizzled tile: chunk c of row r is at chunk c ^ r
        row = mod(lane, MMA_COLUMNS)
        first = shared.address + row * ROW_BYTES + (div(lane, MMA_COLUMNS) ^ row) * 16
        first = first + stage * (cfg.stage_tiles * cfg.x_bytes)
        return [self._read(first + t * cfg.x_bytes) for t in range(cfg.stage_tiles)]

    def _read(self, address: Int32) -> Operands:
        steps: Operands = [[] for _ in range(STEPS)]
        for n in range(self.config.columns // MMA_COLUMNS):
            for pair in range(STEPS // 2):
                found = load_matrices((address + n * (MMA_COLUMNS * ROW_BYTES)) ^ (pair * 64))
                steps[2 * pair].append(found[:2])
                steps[2 * pair + 1].append(found[2:])
        return steps

    def _read_in_order_of_fp8(self, address: Int32) -> Operands:
        """Reads columns 4c and 4c + 2 of each step, then 4c + 1 and 4c + 3."""
        steps: Operands = [[] for _ in range(STEPS)]
        for n in range(self.config.columns // MMA_COLUMNS):
            for step in range(STEPS):
                low, high = load_shared((address + n * (MMA_COLUMNS * ROW_BYTES)) ^ (step * 32), 8)
                steps[step].append([prmt(low, high, 0x5410), prmt(low, high, 0x7632)])
        return steps

    def _decoded(self, shared: SharedX, stage: Int32, lane: Int32, tile: int) -> Operands:
        """Decodes NVFP4. A lane has bytes c and c + 4 of the eight of each block of row g: elements 2c, 2c + 1, 8 + 2c,
        9 + 2c."""
        cfg = self.config
        row, c = div(lane, 4), mod(lane, 4)
        codes_at = shared.address + (stage * cfg.columns + row) * self.width + tile * ROW_CODE_BYTES
        scales_at = shared.scales + ((stage * cfg.stage_tiles + tile) * cfg.columns + row) * X_SCALE_BYTES
        two_bytes = Uint32(c) * 0x11 + 0x40
        steps: Operands = [[] for _ in range(STEPS)]
        for n in range(0, cfg.columns, MMA_COLUMNS):
            words = [w for i in (0, 16) for w in load_shared(codes_at + n * self.width + i, 16)]
            scales = e4m3x4_to_f16x2(load_shared(scales_at + n * X_SCALE_BYTES, 4)[0])
            bytes_of = [prmt(words[2 * s], words[2 * s + 1], two_bytes) for s in range(STEPS)]
            for pair in range(STEPS // 2):
                both = prmt(bytes_of[2 * pair], bytes_of[2 * pair + 1], Uint32(0x5410))
                values = e2m1x8_to_f16x2(both, cfg.arch) if cfg.arch.has_fp4_convert else e2m1x8_to_f16x2_by_table(both)
                for i in range(2):
                    numbers = values[2 * i : 2 * i + 2]
                    steps[2 * pair + i].append([multiply_by_half(v, scales[pair], i, cfg.dtype) for v in numbers])
        return steps

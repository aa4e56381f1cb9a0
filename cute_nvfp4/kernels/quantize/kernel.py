"""The common part of the quantization kernels: launch, tensors of a matrix, global scale, loads and stores."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from ...formats import LARGEST_GLOBAL_SCALE, SMALLEST_GLOBAL_SCALE
from ...ptx.arithmetic import div_rn, rcp_rn
from ...ptx.memory import load_global_if, store_global
from ...ptx.mma import MINUS_ONE_F16, diagonal
from ...ptx.move import f32_bits, f32_from_bits
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_SHAPE, cute_atom
from ..arith import ceil_div, div, mod
from .amax import Amax
from .arguments import QuantizeArguments, Strides
from .block.error_table import fill_error_table
from .block.fast_path import hidden_constants
from .block.optimal import optimal_scales
from .block.records import BlockContext, GlobalFactor
from .block.scale_table import fill_table
from .config import WARP, QuantizeConfig
from .fused import RmsnormArguments, SiluMulArguments


def address_of(tensor: cute.Tensor, coordinate: Any) -> Any:
    """The address of an element, for inline-PTX loads and stores, whose widths and policies CuTe does not have."""
    return (tensor.iterator + cute.crd2idx(coordinate, tensor.layout)).toint()


def bytes_at(address: Int64, layout: cute.Layout) -> cute.Tensor:
    """The bytes of global memory at ``address``. The compiler keeps this sum; it would rearrange a pointer's."""
    return cute.make_tensor(cute.make_ptr(Uint8, address, cute.AddressSpace.gmem), layout)


def atom_row(row: Int32) -> tuple[Int32, Int32]:
    """The coordinate of a row in a scale atom: (row mod 32, row div 32)."""
    return mod(row, ATOM_SHAPE[0][0]), div(row, ATOM_SHAPE[0][0])


class Matrices(NamedTuple):
    """One matrix of the batch, by rows and blocks of 16 (MX 32) elements. All tensors are of bytes.

    rows, columns: those that exist. mOther, mValues: for kernels that compute what they quantize.
    """

    mX: cute.Tensor  # (ROWS, COLUMNS), the first byte of a block
    mData: cute.Tensor  # (ROWS, BYTES)
    mScale: cute.Tensor  # (ROWS, COLUMNS), or the first atom of the blocked layout, ((32, 4), 4)
    rows: Int32
    columns: Int32
    mOther: cute.Tensor | None = None  # (ROWS, COLUMNS), a second input of x's dtype
    mValues: cute.Tensor | None = None  # (ROWS, COLUMNS), what is quantized, stored too

    def has(self, row: Int32, column: Int32) -> Boolean:
        """Whether the matrix has this block."""
        return (row < self.rows) & (column < self.columns)

    def blocked_scale(self, row: Any, atom: Int32, atom_column: Int32) -> Int64:
        """The address of four scales of a row in the blocked layout. row: its coordinate in the atom.

        Atoms are counted: the strides of ``cute_layout`` would take one more register, and ``optimal`` has none left.
        """
        number = atom * self.rest_k + atom_column
        return self.mScale.iterator.toint() + (Int64(number) * ATOM_BYTES + cute.crd2idx((row, 0), self.mScale.layout))

    @property
    def rest_k(self) -> Int32:
        """Scale atoms along K."""
        return ceil_div(self.columns, ATOM_COLS)


class QuantizeKernel:
    """The kernel of one :class:`QuantizeConfig` and its launch. Subclasses walk the matrix."""

    # the percentage of an SM's memory that is shared memory rather than L1
    smem_carveout = 100

    def __init__(self, config: QuantizeConfig) -> None:
        self.config = config

    @property
    def amax(self) -> Amax:
        """The search for the largest magnitude, for configurations that compute the global scale."""
        return Amax(self.config)

    @cute.jit
    def __call__(self, arguments: QuantizeArguments, stream: CUstream):
        """Launches ``arguments.ctas`` CTAs for each matrix."""
        # arguments that only the host uses do not become kernel parameters
        self.launch(arguments._replace(batch=None, ctas=None), arguments, stream)

    def launch(self, arguments: Any, sizes: QuantizeArguments, stream: CUstream) -> None:
        """Launches the kernel with ``arguments``, on as many CTAs as ``sizes`` says."""
        self.kernel(arguments).launch(
            grid=(sizes.ctas, sizes.batch, 1),
            block=(WARP * self.config.warps, 1, 1),
            cluster=(self.config.cluster, 1, 1) if self.config.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=self.smem_carveout,
        )

    def matrices(self, arguments: QuantizeArguments, batch: Int32) -> Matrices:
        """The tensors of matrix ``batch``."""
        cfg, rows, columns = self.config, arguments.rows, arguments.columns
        x, data, scale = arguments.x_strides, arguments.data_strides, arguments.scale_strides

        def tensor(pointer: cute.Pointer, strides: Strides, layout: cute.Layout) -> cute.Tensor:
            return cute.make_tensor(pointer + Int64(batch) * strides.batch, layout)

        def layout(row: Any, column: Any) -> cute.Layout:
            return cute.make_layout((rows, columns), stride=(row, column))

        mX = tensor(arguments.x, x, layout(x.row, cfg.block_bytes))
        mData = tensor(arguments.data, data, layout(data.row, 1))
        mScale = tensor(arguments.scale, scale, cute_atom() if cfg.layout == "blocked" else layout(scale.row, 1))
        return Matrices(mX, mData, mScale, rows, columns)

    def like_x(self, matrices: Matrices, pointer: cute.Pointer, strides: Strides) -> cute.Tensor:
        """The tensor of another matrix in x's dtype, (ROWS, COLUMNS): the first byte of a block."""
        layout = cute.make_layout((matrices.rows, matrices.columns), stride=(strides.row, self.config.block_bytes))
        return cute.make_tensor(pointer, layout)

    def context(self, arguments: QuantizeArguments, smem: SmemAllocator, thread: Int32, cta: Int32) -> BlockContext:
        """The record that all blocks share. cta: 0 in the CTA that stores a computed global scale."""
        cfg = self.config
        largest = self.amax.of_tensor(arguments, smem, thread) if cfg.global_scale == "computed" else None
        factor = self.global_factor(arguments.global_in, arguments.global_out, thread + cta, largest)
        lane = mod(thread, WARP)
        optimal = optimal_scales(cfg, factor, lane) if cfg.tries_all_scales else None
        errors = fill_error_table(cfg, smem, factor, optimal.all_inverses, thread, lane) if cfg.error_table else None
        return BlockContext(
            factor,
            constants=hidden_constants(cfg, arguments.powers),
            table=fill_table(cfg, smem, factor, thread) if cfg.has_fast_path else None,
            minus_one=diagonal(MINUS_ONE_F16, lane) if cfg.defers_undecided else None,
            optimal=optimal,
            errors=errors,
            seed=arguments.seed if cfg.stochastic else None,
            signs=Uint32(arguments.signs) if cfg.hadamard else None,
        )

    @cute.jit
    def global_factor(
        self, global_in: cute.Pointer, global_out: cute.Pointer, thread: Int32, largest: Uint32 | None = None
    ) -> GlobalFactor:
        """The global scale: none, given, or computed from the largest magnitude, whose bits are ``largest`` or in
        ``global_in``. Thread 0 stores a computed one."""
        cfg = self.config
        value = Float32(1.0)
        if cutlass.const_expr(largest is not None):
            value = f32_from_bits(largest)
        elif cutlass.const_expr(cfg.global_scale != "none"):
            value = cute.make_tensor(global_in, cute.make_layout(1))[0]
        if cutlass.const_expr(cfg.global_scale in ("amax", "computed")):
            least = Float32(cfg.full_scale * SMALLEST_GLOBAL_SCALE)
            value = div_rn(cute.arch.fmax(value, least), Float32(cfg.full_scale))
            value = cute.arch.fmin(value, Float32(LARGEST_GLOBAL_SCALE))
            if thread == 0:
                cute.make_tensor(global_out, cute.make_layout(1))[0] = value
        inside = (value >= Float32(SMALLEST_GLOBAL_SCALE)) & (value <= Float32(LARGEST_GLOBAL_SCALE))
        valid = cutlass.select_(inside, Int32(1), Int32(0))
        # arithmetic goes on with 1 in place of an invalid scale, and none of its results is stored
        value = cutlass.select_(inside, value, Float32(1.0))
        shift = f32_from_bits(Uint32(0x7F000000) - (f32_bits(value) & Uint32(0x7F800000)))
        return GlobalFactor(value, rcp_rn(value), value * shift, shift, valid)

    def load(self, address: Int64, exists: Boolean) -> list[Uint32]:
        """The words of a block, which the lane loads itself; zeros if the block does not exist."""
        width = min(self.config.vector_bytes, self.config.block_bytes)
        predicate = cutlass.select_(exists, Int32(1), Int32(0))
        starts = range(0, self.config.block_bytes, width)
        return [word for start in starts for word in load_global_if(predicate, address + start, width)]

    def store(self, address: Int64, words: tuple[Uint32, ...]) -> None:
        """Stores the codes of a block."""
        for start in range(0, len(words), 4):
            store_global(address + 4 * start, words[start : start + 4])


class FusedLaunch:
    """The launch of a kernel that computes what it quantizes; its arguments contain ``QuantizeArguments``."""

    @cute.jit
    def __call__(self, arguments: RmsnormArguments | SiluMulArguments, stream: CUstream):
        """Launches ``arguments.quantize.ctas`` CTAs."""
        sizes = arguments.quantize
        # arguments that only the host uses do not become kernel parameters
        self.launch(arguments._replace(quantize=sizes._replace(batch=None, ctas=None)), sizes, stream)

"""Stores of the output from registers to global memory, by each thread for itself.

A thread has ``config.epi_tile_n`` neighbours of a row. It stores them sixteen bytes at a time to a row-major output. In
a column-major output the 32 threads of a warp have 32 neighbours along M, so that plain stores fill whole sectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .arguments import Output
from .config import QUANTIZED, GemmConfig
from .epilogue import OUT_TYPES, OutputMatrix, Position
from .quantized_output import QuantizedStore, global_scaling

VECTOR_BYTES = 16


def rounded(config: GemmConfig, values: cute.Tensor) -> cute.Tensor:
    """fp32 registers, rounded to the output's dtype."""
    result = cute.make_rmem_tensor(values.layout, OUT_TYPES[config.out])
    result.store(values.load().to(OUT_TYPES[config.out]))
    return result


@dataclass(frozen=True)
class ColumnStore:
    """Stores to a column-major output, element by element."""

    config: GemmConfig

    @cute.jit
    def write(self, values: cute.Tensor, at: Position, out: OutputMatrix, buffer: cutlass.Constexpr[int], warp: Int32):
        numbers = rounded(self.config, values)
        first = out.pointer + (Int64(at.batch) * out.batch_stride + at.row + Int64(at.column) * out.stride)
        # counting the columns left once and adding strides takes four instructions for each store instead of eight
        left = cutlass.select_(at.row < out.m, out.n - at.column, Int32(0))
        for i in cutlass.range_constexpr(self.config.epi_tile_n):
            if i < left:
                cute.make_tensor(first, cute.make_layout(1))[0] = numbers[i]
            first = first + out.stride


@dataclass(frozen=True)
class RowStore:
    """Stores to a row-major output: sixteen bytes at a time where rows are aligned to them, else element by element."""

    config: GemmConfig

    @cute.jit
    def write(self, values: cute.Tensor, at: Position, out: OutputMatrix, buffer: cutlass.Constexpr[int], warp: Int32):
        numbers = rounded(self.config, values)
        first = out.pointer + (Int64(at.batch) * out.batch_stride + Int64(at.row) * out.stride + at.column)
        vector = min(VECTOR_BYTES // self.config.out_bytes, self.config.epi_tile_n) if self.config.vector else 1
        for i in cutlass.range_constexpr(0, self.config.epi_tile_n, vector):
            inside = (at.row < out.m) & (at.column + i + vector <= out.n)
            if inside:
                target = cute.make_tensor((first + i).align(vector * self.config.out_bytes), cute.make_layout(vector))
                cute.autovec_copy(cute.make_tensor(numbers.iterator + i, cute.make_layout(vector)), target)


ThreadStore = ColumnStore | RowStore | QuantizedStore


def thread_store(config: GemmConfig, out: Output) -> ThreadStore:
    """The class by which threads store the output of ``config``."""
    if config.out == QUANTIZED:
        return QuantizedStore(config, out.scale, global_scaling(out.global_scale))
    return (RowStore if config.out_major == "n" else ColumnStore)(config)

"""The epilogue function: from sums to output values, by alpha and device scalars, a gate and a bias, all in fp32.

An epilogue tile is ``config.epi_tile_n`` columns of the CTA's rows. A thread has one row of it in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..factors import Factor, apply_shift, factor_of
from .arguments import OUT_DTYPES, Bias, GroupFactor
from .config import GemmConfig
from .gates import GATES

OUT_TYPES = {name: getattr(cutlass, dtype) for name, dtype in OUT_DTYPES.items()}


class OutputMatrix(NamedTuple):
    """The output (M, N, L) in global memory. stride: elements between rows (or between columns that are contiguous)."""

    pointer: cute.Pointer
    m: Int32
    n: Int32
    stride: Int64
    batch_stride: Int64


class Position(NamedTuple):
    """A thread's place in the output: its row, its first column, and the matrix."""

    row: Int32
    column: Int32
    batch: Int32


class Result(NamedTuple):
    """The output that a work tile belongs to, and the factor of the sums of each product."""

    out: OutputMatrix
    factors: list[Factor]


@dataclass(frozen=True)
class OneResult:
    """The results of a problem with one output, which all work tiles share."""

    result: Result

    def of(self, batch: Int32) -> Result:
        return self.result


def device_scalar(pointer: cute.Pointer) -> Any:
    """The value that ``pointer`` points to."""
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def product_factors(alpha: Float32, factors: tuple[tuple[cute.Pointer, ...], ...], power: float = 1.0) -> list[Factor]:
    """The factor of each product: alpha times ``power`` and the product's device scalars."""
    return [factor_of(alpha, [device_scalar(x) for x in pointers], power) for pointers in factors]


def group_factor(alpha: Float32, factors: tuple[GroupFactor, ...], group: Int32, power: float = 1.0) -> Factor:
    """The factor of a group: alpha times ``power`` and the group's device scalars."""
    return factor_of(alpha, [device_scalar(x.pointer + group * x.stride) for x in factors], power)


@cute.jit
def add_bias_along_m(bias: Bias, result: cute.Tensor, at: Position, out: OutputMatrix):
    """Adds one bias value to each row of the output."""
    first = bias.pointer + Int64(at.batch) * bias.batch_stride
    number = Float32(0.0)
    if at.row < out.m:
        number = device_scalar(first + at.row).to(Float32)
    for i in cutlass.range_constexpr(cute.size(result)):
        result[i] = result[i] + number


@cute.jit
def add_bias_along_n(bias: Bias, result: cute.Tensor, at: Position, out: OutputMatrix):
    """Adds one bias value to each column of the output."""
    first = bias.pointer + Int64(at.batch) * bias.batch_stride
    # lane i reads the value of column i, and all lanes get it from there
    lane = cute.arch.lane_idx()
    own = Float32(0.0)
    if (lane < cute.size(result)) & (at.column + lane < out.n):
        own = device_scalar(first + (at.column + lane)).to(Float32)
    for i in cutlass.range_constexpr(cute.size(result)):
        result[i] = result[i] + cute.arch.shuffle_sync(own, i)


@cute.jit
def add_bias_along_own_n(bias: Bias, result: cute.Tensor, at: Position, out: OutputMatrix):
    """Adds one bias value to each column, where the lanes of a warp have different columns: each reads its own."""
    first = bias.pointer + Int64(at.batch) * bias.batch_stride + at.column
    for i in cutlass.range_constexpr(cute.size(result)):
        if at.column + i < out.n:
            result[i] = result[i] + device_scalar(first + i).to(Float32)


@dataclass(frozen=True)
class EpilogueFunction:
    """The map from the sums of all products to outputs: alpha · x, or gate(alpha · x) · (alpha · y), plus the bias."""

    config: GemmConfig
    bias: Bias | None = None

    def __call__(self, values: list[cute.Tensor], result: Result, at: Position) -> cute.Tensor:
        """The output values of one epilogue tile, in fp32 registers. values: the sums of each product."""
        outputs, alphas = cute.make_rmem_tensor(values[0].layout, Float32), [x.alpha for x in result.factors]
        for sums, factor in zip(values, result.factors):
            apply_shift(sums, factor, range(cute.size(sums)))
        if self.config.products == 1:
            outputs.store(values[0].load() * alphas[0])
        else:
            for i in range(cute.size(outputs)):
                outputs[i] = GATES[self.config.gate](values[0][i] * alphas[0]) * (values[1][i] * alphas[1])
        if self.config.bias:
            along_n = add_bias_along_own_n if self.config.arch.generation == "sm120" else add_bias_along_n
            add_bias = add_bias_along_m if self.config.bias == "m" else along_n
            add_bias(self.bias, outputs, at, result.out)
        return outputs

"""The arguments of the quantization kernels and of their host functions."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.signature import INT32, INT64, VARYING_INT32, PerConfig, Pointer, Scalar
from .config import QuantizeConfig


def _scale_alignment(config: QuantizeConfig) -> int:
    return 16 if config.layout == "blocked" else 4 if config.scale_word else 1


class Strides(NamedTuple):
    """Bytes between rows, and bytes between matrices."""

    row: Scalar = INT64
    batch: Scalar = INT64


class Seed(NamedTuple):
    """The two halves of the 64-bit seed of stochastic rounding."""

    low: Scalar = INT32
    high: Scalar = INT32


class Powers(NamedTuple):
    """1 and 2**16, hidden from the compiler: products with them move bits where shifts would cost more."""

    one: Scalar = INT32
    two_to_16: Scalar = INT32


class Walk(NamedTuple):
    """How CTAs walk the work tiles of a matrix, which are counted along one dimension first.

    inner: work tiles along that dimension, which is K, or the rows where x is read transposed. count: work tiles of a
    matrix. Only the kernel of rows uses the other fields; other kernels get zeros. outer_step, inner_step: ``ctas``
    divided by ``inner``, and the remainder: the distance to a CTA's next work tile. each, rest: with runs, the work
    tiles of a CTA, and the number of CTAs that have one more.
    """

    inner: Scalar = INT32
    count: Scalar = INT32
    outer_step: Scalar = INT32
    inner_step: Scalar = INT32
    each: Scalar = INT32
    rest: Scalar = INT32


class Chunks(NamedTuple):
    """How warps walk a matrix for its largest magnitude: in chunks, as it lies in memory, along its rows first.

    row_bytes: of a row; in a transposed read that rotates, a row is one row of blocks. in_row, count: chunks of a row,
    and of the matrix. row_step, chunk_step: the distance to a warp's next chunk.
    """

    row_bytes: Scalar = INT32
    in_row: Scalar = INT32
    count: Scalar = INT32
    row_step: Scalar = INT32
    chunk_step: Scalar = INT32


class QuantizeArguments(NamedTuple):
    """Quantizes ``batch`` matrices of ``rows`` × ``columns`` blocks.

    x: (batch, rows, K); in a transposed read the row stride is that of K. data: codes (batch, rows, bytes). scale:
    blocked scales, which have no row stride, or (batch, rows, columns). global_in: the global scale or the largest
    magnitude, if the configuration reads one. global_out: the global scale, if the kernel computes one. columns: blocks
    of a row. signs: bit i is set where the rotation multiplies its element i by −1. ctas: for each matrix. chunks:
    where the kernel itself finds the largest magnitude.
    """

    x: Pointer = Pointer("Uint8", lambda c: c.vector_bytes)
    data: Pointer = Pointer("Uint8", 8)
    scale: Pointer = Pointer("Uint8", _scale_alignment)
    global_in: Pointer = Pointer("Float32", 4)
    global_out: Pointer = Pointer("Float32", 4)
    rows: Scalar = INT32
    columns: Scalar = INT32
    batch: Scalar = INT32
    x_strides: Strides = Strides()
    data_strides: Strides = Strides()
    scale_strides: Strides = Strides()
    seed: Seed = PerConfig(lambda c: Seed(VARYING_INT32, VARYING_INT32) if c.stochastic else Seed())
    signs: Scalar = INT32
    powers: Powers = Powers()
    ctas: Scalar = INT32
    walk: Walk = Walk()
    chunks: Chunks | None = PerConfig(lambda c: Chunks() if c.global_scale == "computed" else None)


class AmaxArguments(NamedTuple):
    """Raises ``amax``, which holds a magnitude, to the largest finite magnitude of ``batch`` matrices.

    x_strides, chunks: of x as it lies in memory. signs: as in :class:`QuantizeArguments`. ctas: for each matrix.
    """

    x: Pointer = Pointer("Uint8", lambda c: c.vector_bytes)
    amax: Pointer = Pointer("Uint32", 4)
    batch: Scalar = INT32
    x_strides: Strides = Strides()
    chunks: Chunks = Chunks()
    ctas: Scalar = INT32
    signs: Scalar = INT32

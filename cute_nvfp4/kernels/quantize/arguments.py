"""The arguments of the quantization kernels' host functions, and of the kernels."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.signature import INT32, INT64, VARYING_INT32, PerConfig, Pointer, Scalar
from .config import QuantizeConfig


def _scale_alignment(config: QuantizeConfig) -> int:
    return 16 if config.layout == "blocked" else 4 if config.scale_word else 1


class Strides(NamedTuple):
    """Bytes from one row to the next, and from one matrix to the next."""

    row: Scalar = INT64
    batch: Scalar = INT64


class Seed(NamedTuple):
    """The halves of the 64-bit seed of stochastic rounding."""

    low: Scalar = INT32
    high: Scalar = INT32


class Powers(NamedTuple):
    """1 and 2**16, which the compiler must not know: products with them move bits where shifts would cost more."""

    one: Scalar = INT32
    two_to_16: Scalar = INT32


class Walk(NamedTuple):
    """How CTAs walk the work tiles of a matrix, which are counted along one dimension first.

    inner: work tiles along that dimension: K, or the rows where x is read transposed. count: work tiles of a matrix.
    Only the kernel of rows uses what follows; others get zeros. outer_step, inner_step: ``ctas`` divided by ``inner``,
    and the remainder: how far a CTA's next work tile is. each, rest: in runs, work tiles of a CTA, and how many CTAs
    have one more.
    """

    inner: Scalar = INT32
    count: Scalar = INT32
    outer_step: Scalar = INT32
    inner_step: Scalar = INT32
    each: Scalar = INT32
    rest: Scalar = INT32


class Chunks(NamedTuple):
    """How warps walk the chunks of a matrix for its largest magnitude: as it lies in memory, along its rows first.

    row_bytes: of a row; a row of a transposed read that rotates is a row of blocks. in_row, count: chunks of a row, and
    of the matrix. row_step, chunk_step: how far a warp's next chunk is.
    """

    row_bytes: Scalar = INT32
    in_row: Scalar = INT32
    count: Scalar = INT32
    row_step: Scalar = INT32
    chunk_step: Scalar = INT32


class QuantizeArguments(NamedTuple):
    """Quantizes ``batch`` matrices of ``rows`` × ``columns`` blocks.

    x: (batch, rows, K); of a transposed read the row stride is that of K. data: codes, (batch, rows, bytes). scale:
    blocked scales, which have no row stride, or (batch, rows, columns). global_in: the global scale or the largest
    magnitude, global_out: the global scale that the kernel computes; read and written if the configuration has them.
    columns: blocks of a row. signs: bit i is set where the rotation multiplies its element i by −1. ctas: for each
    matrix. chunks: where the kernel itself looks for the largest magnitude.
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
    """Raises ``amax``, which holds a magnitude, to the largest finite one of ``batch`` matrices.

    x_strides, chunks: of x as it lies in memory. signs: as in :class:`QuantizeArguments`. ctas: for each matrix.
    """

    x: Pointer = Pointer("Uint8", lambda c: c.vector_bytes)
    amax: Pointer = Pointer("Uint32", 4)
    batch: Scalar = INT32
    x_strides: Strides = Strides()
    chunks: Chunks = Chunks()
    ctas: Scalar = INT32
    signs: Scalar = INT32

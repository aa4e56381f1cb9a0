"""The arguments of the host function of the GEMM of packed weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.signature import INT32, INT64, VARYING_FLOAT32, PerConfig, Pointer, Scalar, Signature
from ...dequantize.config import DequantizeArguments, DequantizeConfig, GroupRowsArguments, GroupRowsConfig
from ...quantize.fp8_config import Fp8RowsArguments
from ..arguments import OUT_DTYPES, PartialSums
from ..config import OUT_BYTES

X_DTYPES = OUT_DTYPES | {"float8_e4m3fn": "Float8E4M3FN"}


class PackedWeight(NamedTuple):
    """(L, row tiles, K tiles) packed tiles (``weight_layout``) of ``rows`` rows, or of so many pairs of rows,
    ``k_tiles`` along K; batches are ``batch_stride`` bytes apart (None: there is one)."""

    tiles: Pointer = Pointer("Uint8", 128)
    rows: Scalar = INT32
    k_tiles: Scalar = INT32
    batch_stride: Scalar | None = INT64


class RowsOfUp(NamedTuple):
    """The second weight of a gated product: codes and scales as those of the first."""

    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Uint8", 16)


class RowBatch(NamedTuple):
    """Bytes of codes, and of scales, from a matrix of a batch to the next."""

    codes: Scalar = INT64
    scales: Scalar = INT64


def batch_of(config: Any) -> RowBatch | None:
    """The record of a batch of rows in NVFP4."""
    return RowBatch() if config.batched else None


class RowWeight(NamedTuple):
    """Rows (L, rows, K / 2) of NVFP4 codes, ``row_stride`` bytes apart, and blocked scales, of which 128 rows have
    ``atoms`` atoms; up: of a gated product."""

    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Uint8", 16)
    up: RowsOfUp | None = PerConfig(lambda c: RowsOfUp() if c.gate else None)
    rows: Scalar = INT32
    row_stride: Scalar = INT64
    atoms: Scalar = INT32
    batch: RowBatch | None = PerConfig(batch_of)


class RowsOfX(NamedTuple):
    """x (L, rows, K / 2) of NVFP4 codes, ``row_stride`` bytes apart, and blocked scales, ``atoms`` for 128 rows."""

    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Uint8", 16)
    rows: Scalar = INT32
    row_stride: Scalar = INT64
    atoms: Scalar = INT32
    batch: RowBatch | None = PerConfig(batch_of)


def weight_of(config: Any) -> RowWeight | PackedWeight:
    """The record of a weight: packed, or as it lies."""
    return RowWeight() if config.weights.in_rows else PackedWeight()


def first_of(config: Any) -> Fp8RowsArguments | DequantizeArguments | GroupRowsArguments | None:
    """The record of what is done with x first."""
    if config.first is None:
        return None
    records = {DequantizeConfig: DequantizeArguments, GroupRowsConfig: GroupRowsArguments}
    return Signature(records.get(type(config.first), Fp8RowsArguments), config.first).declared


class Activations(NamedTuple):
    """x: (L, rows, K) numbers, strides in elements, multiples of 16 bytes."""

    data: Pointer = Pointer(lambda c: X_DTYPES[c.dtype], 16)
    rows: Scalar = INT32
    row_stride: Scalar = INT64
    batch_stride: Scalar = INT64


class OutputRows(NamedTuple):
    """out: (L, rows of x, rows of the weight), the last contiguous, strides in elements."""

    pointer: Pointer = Pointer(lambda c: OUT_DTYPES[c.out], lambda c: 16 if c.vector else int(OUT_BYTES[c.out]))
    row_stride: Scalar = INT64
    batch_stride: Scalar = INT64


class RowBias(NamedTuple):
    """A number for each row of the weight; those of matrices are ``batch_stride`` apart (None: there is one)."""

    pointer: Pointer = Pointer(lambda c: OUT_DTYPES[c.bias], lambda c: int(OUT_BYTES[c.bias]))
    batch_stride: Scalar | None = PerConfig(lambda c: INT64 if c.batched else None)


class RowScales(NamedTuple):
    """Float32 factors of the rows of the packed weight and, where that is in FP8, of x."""

    weight: Pointer = Pointer("Float32", 4)
    x: Pointer | None = PerConfig(lambda c: Pointer("Float32", 4) if c.weights.by_table else None)


class WgmmaArguments(NamedTuple):
    """out = alpha · x · weightᵀ + bias, or gate(alpha · x · gateᵀ) · (alpha · x · upᵀ). floats: x
    that is quantized, or decoded, first. row_scales: where both are FP8.
    factors: of each product the device scalars that multiply alpha. helped: k-tiles of each tile that helpers multiply.
    batch: L. workers: clusters.
    """

    weight: PackedWeight | RowWeight = PerConfig(weight_of)
    x: Activations | RowsOfX = PerConfig(lambda c: RowsOfX() if c.decodes_x else Activations())
    out: OutputRows = OutputRows()
    bias: RowBias | None = PerConfig(lambda c: RowBias() if c.bias else None)
    floats: Fp8RowsArguments | DequantizeArguments | None = PerConfig(first_of)
    row_scales: RowScales | None = PerConfig(lambda c: RowScales() if c.fp8 else None)
    alpha: Scalar = VARYING_FLOAT32
    factors: tuple[tuple[Pointer, ...], ...] = PerConfig(lambda c: ((Pointer("Float32", 4),) * c.factors,) * c.products)
    partials: PartialSums | None = PerConfig(lambda c: PartialSums() if c.scheduler != "static" else None)
    helped: Scalar | None = PerConfig(lambda c: INT32 if c.scheduler == "helped" else None)
    k: Scalar = INT32
    batch: Scalar = INT32
    workers: Scalar = INT32

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
    """A weight in packed tiles (L, row tiles, K tiles) (``weight_layout``), with ``k_tiles`` tiles along K. rows: rows
    of the weight, or pairs of rows of a gated product. batch_stride: bytes between matrices; None: there is one."""

    tiles: Pointer = Pointer("Uint8", 128)
    rows: Scalar = INT32
    k_tiles: Scalar = INT32
    batch_stride: Scalar | None = INT64


class RowsOfUp(NamedTuple):
    """The up weight of a gated product, in rows: codes and scales with the shapes and strides of the gate weight."""

    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Uint8", 16)


class RowBatch(NamedTuple):
    """Bytes from one matrix of a batch to the next, in the codes and in the scales."""

    codes: Scalar = INT64
    scales: Scalar = INT64


def batch_of(config: Any) -> RowBatch | None:
    """The record of a batch of NVFP4 or MXFP4 rows, or None for one matrix."""
    return RowBatch() if config.batched else None


class RowWeight(NamedTuple):
    """A weight in rows of 4-bit codes (L, rows, K / 2), ``row_stride`` bytes apart, and blocked scales, ``atoms`` scale
    atoms for each 128 rows. up: the second weight of a gated product."""

    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Uint8", 16)
    up: RowsOfUp | None = PerConfig(lambda c: RowsOfUp() if c.gate else None)
    rows: Scalar = INT32
    row_stride: Scalar = INT64
    atoms: Scalar = INT32
    batch: RowBatch | None = PerConfig(batch_of)


class RowsOfX(NamedTuple):
    """x in rows of NVFP4 codes (L, rows, K / 2), ``row_stride`` bytes apart, and blocked scales, ``atoms`` scale atoms
    for each 128 rows."""

    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Uint8", 16)
    rows: Scalar = INT32
    row_stride: Scalar = INT64
    atoms: Scalar = INT32
    batch: RowBatch | None = PerConfig(batch_of)


def weight_of(config: Any) -> RowWeight | PackedWeight:
    """The record of a weight: packed tiles, or rows."""
    return RowWeight() if config.weights.in_rows else PackedWeight()


def first_of(config: Any) -> Fp8RowsArguments | DequantizeArguments | GroupRowsArguments | None:
    """The arguments of the kernel that quantizes or decodes x before the product, or None."""
    if config.first is None:
        return None
    records = {DequantizeConfig: DequantizeArguments, GroupRowsConfig: GroupRowsArguments}
    return Signature(records.get(type(config.first), Fp8RowsArguments), config.first).declared


class Activations(NamedTuple):
    """x (L, rows, K) in the configuration's dtype. Strides are in elements, and multiples of 16 bytes."""

    data: Pointer = Pointer(lambda c: X_DTYPES[c.dtype], 16)
    rows: Scalar = INT32
    row_stride: Scalar = INT64
    batch_stride: Scalar = INT64


class OutputRows(NamedTuple):
    """out (L, rows of x, rows of the weight), the last mode contiguous. Strides are in elements."""

    pointer: Pointer = Pointer(lambda c: OUT_DTYPES[c.out], lambda c: 16 if c.vector else int(OUT_BYTES[c.out]))
    row_stride: Scalar = INT64
    batch_stride: Scalar = INT64


class RowBias(NamedTuple):
    """A bias value for each row of the weight. batch_stride: elements between matrices; None: there is one matrix."""

    pointer: Pointer = Pointer(lambda c: OUT_DTYPES[c.bias], lambda c: int(OUT_BYTES[c.bias]))
    batch_stride: Scalar | None = PerConfig(lambda c: INT64 if c.batched else None)


class RowScales(NamedTuple):
    """Float32 factors of the rows of the packed weight and, where the product is in FP8, of the rows of x."""

    weight: Pointer = Pointer("Float32", 4)
    x: Pointer | None = PerConfig(lambda c: Pointer("Float32", 4) if c.weights.by_table else None)


class WgmmaArguments(NamedTuple):
    """out = alpha · x · weightᵀ + bias, or out = gate(alpha · x · gateᵀ) · (alpha · x · upᵀ).

    floats: the arguments of the kernel that quantizes or decodes x first. row_scales: the factors of rows in FP8.
    factors: for each product, the device scalars that multiply alpha. helped: k-tiles of each work tile that helpers
    multiply. batch: matrices (L). workers: clusters of the launch.
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

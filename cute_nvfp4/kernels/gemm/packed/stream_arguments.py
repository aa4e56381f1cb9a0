"""The arguments of the host function of the streaming GEMM of packed weights."""

from __future__ import annotations

from typing import NamedTuple

from ....runtime.signature import INT32, INT64, VARYING_FLOAT32, PerConfig, Pointer, Scalar
from ...dequantize.config import DequantizeArguments
from ..arguments import OUT_DTYPES, PartialSums
from ..config import OUT_BYTES
from ..sm90.arguments import PackedWeight, first_of
from .stream_config import StreamConfig


def _out_alignment(config: StreamConfig) -> int:
    return int(OUT_BYTES[config.out]) * (4 if config.vector else 1)


class FewRows(NamedTuple):
    """x (rows, K) in 16 bits or, if ``quantized_x``, bytes of NVFP4 codes (rows, K / 2) with blocked scales.
    row_stride: elements, or bytes of codes; a multiple of 16 bytes."""

    data: Pointer = Pointer(lambda c: "Uint8" if c.quantized_x else OUT_DTYPES[c.dtype], 16)
    scale: Pointer | None = PerConfig(lambda c: Pointer("Uint8", 16) if c.quantized_x else None)
    rows: Scalar = INT32
    row_stride: Scalar = INT64


class StreamArguments(NamedTuple):
    """out = alpha · x · weightᵀ, or gate(alpha · x · gateᵀ) · (alpha · x · upᵀ).

    out: (rows of x, rows of the weight), the last mode contiguous. floats: the arguments of the kernel that decodes x
    first. factors: for each product, the device scalars that multiply alpha. partials: two slots and two flags for each
    CTA.
    """

    weight: PackedWeight = PackedWeight(batch_stride=None)
    x: FewRows = FewRows()
    out: Pointer = Pointer(lambda c: OUT_DTYPES[c.out], _out_alignment)
    out_stride: Scalar = INT64
    floats: DequantizeArguments | None = PerConfig(first_of)
    alpha: Scalar = VARYING_FLOAT32
    factors: tuple[tuple[Pointer, ...], ...] = PerConfig(lambda c: ((Pointer("Float32", 4),) * c.factors,) * c.products)
    partials: PartialSums = PartialSums()
    k: Scalar = INT32
    ctas: Scalar = INT32

"""The arguments of the GEMMs' host functions and kernels: for one or two products, and for groups."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...formats import NVFP4
from ...runtime.signature import INT32, INT64, VARYING_FLOAT32, PerConfig, Pointer, Scalar
from .config import OUT_BYTES, QUANTIZED, GemmConfig
from .grouped_config import GroupedConfig

MAP_BYTES = 128
"""Bytes of a tensor map."""

ELEMENT_DTYPES = {
    "nvfp4": "Float4E2M1FN",
    "mxfp4": "Float4E2M1FN",
    "mxfp8": "Float8E4M3FN",
    "mxfp8_e5m2": "Float8E5M2",
}
OUT_DTYPES = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32", QUANTIZED: "Uint8"}


def data_alignment(unpacked: bool) -> int:
    """The alignment in bytes that TMA needs of an operand's address and strides; ``unpacked``: TMA unpacks it."""
    return 32 if unpacked else 16


class Operand(NamedTuple):
    """One matrix (rows, K, L) as address, sizes and strides: strides of data in elements, of scales in bytes.

    batches: 1 where all of L share one matrix of data, else L. Scales always have L matrices, ``scale_batch`` apart.
    Each of two interleaved matrices starts at a row of its own and has ``rows`` rows. scale_rows: rows of the scales,
    where they differ from the data's: the scales of each group are padded to whole atoms. The host function sets it.
    """

    data: Pointer = Pointer("Uint8", 16)
    scale: Pointer = Pointer("Uint8", 16)
    rows: Scalar = INT32
    row_stride: Scalar = INT64
    batch_stride: Scalar = INT64
    batches: Scalar = INT32
    scale_batch: Scalar = INT64
    scale_rows: Any = None


A = Operand(data=Pointer(lambda c: ELEMENT_DTYPES[c.a_format], lambda c: data_alignment(c.unpacked[0])))
B = Operand(data=Pointer(lambda c: ELEMENT_DTYPES[c.b_format], lambda c: data_alignment(c.unpacked[1])))


def _out_alignment(config: GemmConfig) -> int:
    if config.vector:
        return 16
    return NVFP4.block_bytes if config.out == QUANTIZED else int(OUT_BYTES[config.out])


def _if_quantized(pointer: Pointer) -> PerConfig:
    return PerConfig(lambda config: pointer if config.out == QUANTIZED else None)


_OUT = Pointer(lambda c: OUT_DTYPES[c.out], _out_alignment)


class Output(NamedTuple):
    """The result (M, N, L). stride, batch_stride: elements from one row to the next (from one column to the next where
    columns are contiguous) and from one matrix to the next. scale, global_scale: the blocked scale factors of a
    quantized result, and the global scale that it is quantized with."""

    pointer: Pointer = _OUT
    stride: Scalar = INT64
    batch_stride: Scalar | None = INT64
    scale: PerConfig = _if_quantized(Pointer("Uint8", 16))
    global_scale: PerConfig = _if_quantized(Pointer("Float32", 4))


class Bias(NamedTuple):
    """Values (L, N) or (L, M), ``batch_stride`` elements apart; a stride of 0 shares one vector among all of L."""

    pointer: Pointer = Pointer(lambda c: OUT_DTYPES[c.bias_dtype], lambda c: int(OUT_BYTES[c.bias_dtype]))
    batch_stride: Scalar = INT64


class PartialSums(NamedTuple):
    """Global memory for stream-K's partial sums, and the flags that say which of them are written."""

    workspace: Pointer = Pointer("Float32", 16)
    flags: Pointer = Pointer("Int32", 4)


class GemmArguments(NamedTuple):
    """C = gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ), or alpha · A · Bᵀ + bias: the matrices as the kernel sees them.

    a, b: ``config.counts`` operands each. factors: for each product, the device scalars that multiply alpha. batch: L.
    workers: the number of clusters to launch.
    """

    a: tuple[Operand, ...] = PerConfig(lambda c: (A,) * c.counts[0])
    b: tuple[Operand, ...] = PerConfig(lambda c: (B,) * c.counts[1])
    out: Output = Output()
    bias: Bias | None = PerConfig(lambda c: Bias() if c.bias else None)
    alpha: Scalar = VARYING_FLOAT32
    factors: tuple[tuple[Pointer, ...], ...] = PerConfig(lambda c: ((Pointer("Float32", 4),) * c.factors,) * c.products)
    partials: PartialSums | None = PerConfig(lambda c: PartialSums() if c.scheduler == "stream_k" else None)
    k: Scalar = INT32
    batch: Scalar = INT32
    workers: Scalar = INT32


class Group(NamedTuple):
    """One problem of a list. Its output has m rows, ``stride`` elements apart, and n columns; in a slot without a group
    the output is empty."""

    a: Operand = A
    b: Operand = B
    m: Scalar = INT32
    n: Scalar = INT32
    k: Scalar = INT32
    out: Pointer = _OUT
    stride: Scalar = INT64


class GroupTable(NamedTuple):
    """Groups in global memory: ``count`` rows of ``GroupedConfig.words``, and room for their tensor maps."""

    rows: Pointer = Pointer("Int64", MAP_BYTES)
    count: Scalar = INT32
    maps: Pointer = Pointer("Int64", MAP_BYTES)


class GroupOffsets(NamedTuple):
    """``count`` groups that share ``rows`` rows. offsets: count + 1, from each group's first row to the last one's end.
    atoms: atom rows of the scale factors. status: one word, in which the kernel reports wrong offsets."""

    offsets: Pointer = Pointer("Int32", 4)
    count: Scalar = INT32
    rows: Scalar = INT32
    atoms: Scalar = INT32
    status: Pointer = Pointer("Int32", 4)


class GroupFactor(NamedTuple):
    """One device scalar for each group, ``stride`` elements apart (0: one for all groups), that multiplies alpha."""

    pointer: Pointer = Pointer("Float32", 4)
    stride: Scalar = INT32


def _groups(config: GroupedConfig) -> tuple:
    if config.maps == "parameters":
        return (Group(),) * config.slots
    return GroupTable() if config.maps == "workspace" else GroupOffsets()


def _unless_listed(declared: Any) -> PerConfig:
    return PerConfig(lambda config: None if config.maps == "parameters" else declared)


class GroupedArguments(NamedTuple):
    """Cᵢ = alphaᵢ · Aᵢ · Bᵢᵀ for groups: a tuple of ``Group``, a ``GroupTable``, or ``GroupOffsets`` (``config.maps``).

    a, b, k: the matrices that all groups are parts of ("shared"); any one group's, from whose tensor maps the kernel
    makes all others ("workspace"); none where each group has its own ("parameters"). out: the output of all groups, or
    of any one. batch: matrices of the stack.
    """

    groups: tuple | GroupTable | GroupOffsets = PerConfig(_groups)
    a: Operand | None = _unless_listed(A)
    b: Operand | None = _unless_listed(B)
    k: Scalar | None = _unless_listed(INT32)
    out: Output = Output(batch_stride=None)
    alpha: Scalar = VARYING_FLOAT32
    factors: tuple[GroupFactor, ...] = PerConfig(lambda c: (GroupFactor(),) * c.factors)
    batch: Scalar = INT32
    workers: Scalar = INT32

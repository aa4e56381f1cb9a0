"""The arguments of the host function of the grouped GEMM of packed weights."""

from __future__ import annotations

from typing import NamedTuple

from ....runtime.signature import INT32, VARYING_FLOAT32, PerConfig, Pointer, Scalar
from ...dequantize.config import GroupRowsArguments
from ...quantize.fp8_config import Fp8RowsArguments
from ..arguments import MAP_BYTES, OUT_DTYPES, GroupFactor
from ..config import OUT_BYTES
from .arguments import Activations, OutputRows, PackedWeight, RowScales, RowWeight, first_of, weight_of
from .grouped_config import GroupedWgmmaConfig

IDS = {"int32": "Int32", "int64": "Int64"}
"""Dtypes of the ids of experts, where ``maps`` is one of them."""


class RowsOfGroups(NamedTuple):
    """``count`` groups of consecutive rows of one x by their count + 1 offsets, and a stack of weights. ``status`` is
    one word, which the kernel writes. atoms: of x's scales, of 128 rows each, where those are in groups' own."""

    offsets: Pointer | None = PerConfig(lambda c: None if c.maps in IDS else Pointer("Int32", 4))
    count: Scalar = INT32
    status: Pointer = Pointer("Int32", 4)
    atoms: Scalar | None = PerConfig(lambda c: INT32 if c.counts_atoms else None)


class PackedGroup(NamedTuple):
    """One problem of a list; it has no rows of x in a slot that no group has. row_scales: where weights are packed for
    FP8; for rows of one x of all its rows, and of the rows of a stack of weights, those of each padded to 16."""

    weight: PackedWeight | RowWeight = PerConfig(weight_of)
    x: Activations = Activations()
    row_scales: RowScales | None = PerConfig(lambda c: RowScales() if c.weights.by_table or c.weights.of_fp8 else None)
    out: OutputRows = OutputRows()
    k: Scalar = INT32


class PackedGroupTable(NamedTuple):
    """Groups in global memory: ``count`` rows of ``GroupedWgmmaConfig.words``, and a place for their tensor maps."""

    rows: Pointer = Pointer("Int64", MAP_BYTES)
    count: Scalar = INT32
    maps: Pointer = Pointer("Int64", MAP_BYTES)


class RoutedRows(NamedTuple):
    """Rows of groups that are slots of a mixture of experts: ``slots[r]`` is that of row r.

    Row r of a gathered x is its row ``slots[r] // top``. weights: of slots, which multiply rows of the output; bias:
    (groups, rows of the weight), of two products the first's and then the second's. Where the kernel sorts slots
    itself, ``slots`` are the ids of their experts, of which ``first`` is that of group 0.
    """

    slots: Pointer = Pointer(lambda c: IDS.get(c.maps, "Int32"), lambda c: 8 if c.maps == "int64" else 4)
    top: Scalar = INT32
    weights: Pointer | None = PerConfig(
        lambda c: (
            Pointer(OUT_DTYPES[c.routed.weighted], int(OUT_BYTES[c.routed.weighted])) if c.routed.weighted else None
        )
    )
    bias: Pointer | None = PerConfig(lambda c: Pointer("Float32", 4) if c.routed.biased else None)
    first: Scalar | None = PerConfig(lambda c: INT32 if c.maps in IDS else None)


def _groups(config: GroupedWgmmaConfig) -> tuple:
    if config.maps == "parameters":
        return (PackedGroup(),) * config.slots
    return PackedGroupTable() if config.maps == "workspace" else RowsOfGroups()


class GroupedWgmmaArguments(NamedTuple):
    """outᵢ = alphaᵢ · xᵢ · weightᵢᵀ for groups: a tuple of ``PackedGroup``, a ``PackedGroupTable`` or ``RowsOfGroups``.

    Or, gated, gate(alphaᵢ · xᵢ · gateᵢᵀ) · (alphaᵢ · xᵢ · upᵢᵀ); factors: of each product.
    one: the matrices of which the groups have rows; those of any group where a kernel makes the tensor maps of all from
    one's; of none where each group has its own. routed: where rows are slots. floats: x that is quantized or decoded
    first.
    workers: CTAs.
    """

    groups: tuple | PackedGroupTable | RowsOfGroups = PerConfig(_groups)
    one: PackedGroup | None = PerConfig(lambda c: None if c.maps == "parameters" else PackedGroup())
    routed: RoutedRows | None = PerConfig(lambda c: RoutedRows() if c.routed.of_slots else None)
    floats: Fp8RowsArguments | GroupRowsArguments | None = PerConfig(first_of)
    alpha: Scalar = VARYING_FLOAT32
    factors: tuple[tuple[GroupFactor, ...], ...] = PerConfig(lambda c: ((GroupFactor(),) * c.factors,) * c.products)
    workers: Scalar = INT32

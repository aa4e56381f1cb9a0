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
"""Dtypes of expert ids, by the value of ``maps`` that names them."""


class RowsOfGroups(NamedTuple):
    """``count`` groups of consecutive rows of one x, by count + 1 offsets, and a stack of weights. status: one word, in
    which the kernel reports wrong offsets. atoms: scale atoms (of 128 rows) of x, where each group starts at its own
    atom."""

    offsets: Pointer | None = PerConfig(lambda c: None if c.maps in IDS else Pointer("Int32", 4))
    count: Scalar = INT32
    status: Pointer = Pointer("Int32", 4)
    atoms: Scalar | None = PerConfig(lambda c: INT32 if c.counts_atoms else None)


class PackedGroup(NamedTuple):
    """One problem of a list. A slot of the list that no group uses has zero rows of x.

    row_scales: the factors of rows, where weights are packed for FP8. Where groups are rows of one x, they cover all
    rows of x, and the rows of all weights of the stack, each weight padded to a multiple of 16.
    """

    weight: PackedWeight | RowWeight = PerConfig(weight_of)
    x: Activations = Activations()
    row_scales: RowScales | None = PerConfig(lambda c: RowScales() if c.weights.by_table or c.weights.of_fp8 else None)
    out: OutputRows = OutputRows()
    k: Scalar = INT32


class PackedGroupTable(NamedTuple):
    """Groups in global memory: ``count`` rows of ``GroupedWgmmaConfig.words``, and the memory for their tensor maps."""

    rows: Pointer = Pointer("Int64", MAP_BYTES)
    count: Scalar = INT32
    maps: Pointer = Pointer("Int64", MAP_BYTES)


class RoutedRows(NamedTuple):
    """Rows of groups that are slots of a mixture of experts: ``slots[r]`` is the slot of row r.

    top: slots of a token. Row r of a gathered x is its row ``slots[r] // top``.
    weights: router weights by slot, which multiply rows of the output.
    bias: (groups, rows of the weight); of two products first the gate's values, then the up product's.
    first: where the kernel itself sorts slots, the id of the expert of group 0; ``slots`` are then ids of experts.
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
    """outᵢ = alphaᵢ · xᵢ · weightᵢᵀ, or outᵢ = gate(alphaᵢ · xᵢ · gateᵢᵀ) · (alphaᵢ · xᵢ · upᵢᵀ), for many groups.

    groups: a tuple of ``PackedGroup``, a ``PackedGroupTable`` or ``RowsOfGroups``.
    one: the matrices whose rows the groups are; for maps in a workspace any group, from whose tensor map a kernel makes
        those of all groups; for maps as parameters None.
    routed: what belongs to rows that are slots. floats: the arguments of the kernel that quantizes or decodes x first.
    factors: for each product, a group's device scalars that multiply alpha. workers: CTAs of the launch.
    """

    groups: tuple | PackedGroupTable | RowsOfGroups = PerConfig(_groups)
    one: PackedGroup | None = PerConfig(lambda c: None if c.maps == "parameters" else PackedGroup())
    routed: RoutedRows | None = PerConfig(lambda c: RoutedRows() if c.routed.of_slots else None)
    floats: Fp8RowsArguments | GroupRowsArguments | None = PerConfig(first_of)
    alpha: Scalar = VARYING_FLOAT32
    factors: tuple[tuple[GroupFactor, ...], ...] = PerConfig(lambda c: ((GroupFactor(),) * c.factors,) * c.products)
    workers: Scalar = INT32

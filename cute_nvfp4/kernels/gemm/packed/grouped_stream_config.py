"""What the streaming GEMM of groups of few rows is compiled for, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ....errors import explain
from ....runtime.signature import INT32, VARYING_FLOAT32, PerConfig, Pointer, Scalar
from ..arguments import GroupFactor, PartialSums
from ..grouped_config import MAX_GROUPS, WINDOW, Columns, GroupTableConfig
from ..sm90.grouped_arguments import PackedGroup, RowsOfGroups
from .stream_config import StreamConfig, can_implement


@dataclass(frozen=True, kw_only=True)
class GroupedStreamConfig(GroupTableConfig, StreamConfig):
    """A ``StreamConfig`` for groups of consecutive rows of one x, each with a weight of a stack.

    A group of more than ``columns`` rows is multiplied in several passes, each of which reads its weight. capacity:
    groups that the table has room for, a multiple of 32. gathered: whether rows of x are found by an index. cut_bytes:
    of weights, which a multiprocessor streams in the time in which the parts of a work tile are added up.
    """

    tables: ClassVar[dict[str, Columns]] = {"rows": Columns(("start", "m", "row"), ())}
    tensor_maps: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[tuple[str, ...]] = ()

    maps: str = "rows"
    capacity: int = WINDOW
    gathered: bool = False
    cut_bytes: int = 48 << 10

    @property
    def cut_cost(self) -> int:
        """Steps of a CTA that take as long as to add up the parts of a work tile."""
        return self.cut_bytes // (self.stage_tiles * self.tile_bytes)


def can_implement_groups(c: GroupedStreamConfig) -> str:
    """Why no kernel can be made of ``c``, or an empty string."""
    if c.quantized_x:
        return explain("x of a streaming kernel of groups", got="NVFP4", expected="numbers of 16 bits")
    if c.weights.by_table:
        return explain("dtype of a streaming kernel of groups", got=c.dtype, expected="bfloat16 or float16")
    if c.maps not in c.tables:
        return explain("maps", got=c.maps, expected=f"one of {', '.join(c.tables)}")
    if c.capacity % WINDOW or not WINDOW <= c.capacity <= MAX_GROUPS:
        return explain("capacity", got=c.capacity, expected=f"a multiple of {WINDOW} up to {MAX_GROUPS}")
    return can_implement(c)


class RowIndex(NamedTuple):
    """Row r of the groups is row ``slots[r] // top`` of x."""

    slots: Pointer = Pointer("Int32", 4)
    top: Scalar = INT32


class GroupedStreamArguments(NamedTuple):
    """outᵢ = alphaᵢ · xᵢ · weightᵢᵀ, or gate(alphaᵢ · xᵢ · gateᵢᵀ) · (alphaᵢ · xᵢ · upᵢᵀ), for the groups of rows of x.

    one: the matrices of which the groups have rows. partials: two slots and flags a CTA. ctas: to launch.
    """

    groups: RowsOfGroups = RowsOfGroups()
    one: PackedGroup = PackedGroup()
    index: RowIndex | None = PerConfig(lambda c: RowIndex() if c.gathered else None)
    alpha: Scalar = VARYING_FLOAT32
    factors: tuple[tuple[GroupFactor, ...], ...] = PerConfig(lambda c: ((GroupFactor(),) * c.factors,) * c.products)
    partials: PartialSums = PartialSums()
    ctas: Scalar = INT32

"""The configuration of the streaming grouped GEMM for few rows a group, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, NamedTuple

from ....errors import explain
from ....runtime.signature import INT32, VARYING_FLOAT32, PerConfig, Scalar
from ....weight_layout import DTYPES, PACKINGS, Packing
from ....weight_layout_fp8 import OF_FP8
from ..arguments import GroupFactor, PartialSums
from ..grouped_config import MAX_GROUPS, WINDOW, Columns, GroupTableConfig
from ..routed_config import RoutedConfig
from ..sm90.grouped_arguments import IDS, PackedGroup, RoutedRows, RowsOfGroups
from .stream_config import WARP, StreamConfig, can_implement


@dataclass(frozen=True, kw_only=True)
class GroupedStreamConfig(GroupTableConfig, StreamConfig):
    """A ``StreamConfig`` for groups of consecutive rows of one x, each with a weight of a stack.

    A group of more than ``columns`` rows takes several passes, each of which reads its weight.

    maps: "rows": the groups have offsets; "int32" or "int64", a dtype: each CTA finds the rows of up to 32 slots from
        the ids of their experts.
    capacity: groups that the table has room for, a multiple of 32.
    routed: what the kernel does where rows are slots of a mixture of experts.
    of_fp8: whether weights are packed for FP8, which decode exactly to x's 16 bits. Rows must be
        slots (``routed.of_slots``), to whose sums the kernel applies the factors of the weights' rows.
    cut_bytes: bytes of weights that an SM streams in the time that adding up the parts of a work tile takes.
    programmatic: whether the kernel may start while the launch before it still runs. "": no. "all": it waits for that
        launch before it reads anything. "x": it waits before it reads x and writes; that launch must itself have waited
        for those before it, and must write nothing but x that this one reads.
    """

    tables: ClassVar[dict[str, Columns]] = {
        "rows": Columns(("start", "m", "row"), ()),
        **dict.fromkeys(IDS, Columns(("start", "m", "row", "slot"), ())),
    }
    tensor_maps: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[tuple[str, ...]] = ()
    ways_to_start: ClassVar[tuple[str, ...]] = ("", "all", "x")
    columns_possible: ClassVar[tuple[int, ...]] = (8, 16, 24, 32)

    maps: str = "rows"
    capacity: int = WINDOW
    routed: RoutedConfig = field(default_factory=RoutedConfig)
    of_fp8: bool = False
    cut_bytes: int = 96 << 10

    gathered = property(attrgetter("routed.gathered"))

    @property
    def weights(self) -> Packing:
        return (OF_FP8 if self.of_fp8 else PACKINGS)[self.packing][DTYPES[self.dtype]]

    counts_atoms: ClassVar[bool] = False  # of x, which is not block-scaled

    @property
    def fp8(self) -> bool:
        """Whether both operands are in FP8, which this kernel does not support."""
        return False

    @property
    def column_quads(self) -> int:
        """Threads that share a row of x in the epilogue, with four elements of the output each."""
        return self.out_rows // 4

    @property
    def thread_columns(self) -> int:
        """Rows of x that all threads together store at a time, a power of two."""
        return WARP * self.warps // self.column_quads

    @property
    def cut_cost(self) -> int:
        """Steps that a CTA multiplies in the time that adding up the parts of a work tile takes."""
        return self.cut_bytes // (self.stage_tiles * self.tile_bytes)


def can_implement_groups(c: GroupedStreamConfig) -> str:
    """The reason why no kernel implements ``c``, or an empty string."""
    if c.quantized_x:
        return explain("x of a streaming kernel of groups", got="NVFP4", expected="numbers of 16 bits")
    if c.weights.by_table:
        return explain("dtype of a streaming kernel of groups", got=c.dtype, expected="bfloat16 or float16")
    if c.of_fp8 and not c.routed.of_slots:
        expected = "rows of experts that are gathered, biased, activated or weighted"
        return explain("rows of a streaming kernel of weights packed for FP8", got="others", expected=expected)
    if c.routed.added:
        return explain("rows of the streaming kernel that are added to those of tokens", got="some", expected="none")
    if c.maps not in c.tables:
        return explain("maps", got=c.maps, expected=f"one of {', '.join(c.tables)}")
    if c.capacity % WINDOW or not WINDOW <= c.capacity <= MAX_GROUPS:
        return explain("capacity", got=c.capacity, expected=f"a multiple of {WINDOW} up to {MAX_GROUPS}")
    return c.routed.limit(c.products) or can_implement(c)


class GroupedStreamArguments(NamedTuple):
    """outᵢ = alphaᵢ · xᵢ · weightᵢᵀ, or gate(alphaᵢ · xᵢ · gateᵢᵀ) · (alphaᵢ · xᵢ · upᵢᵀ), for groups of rows of x.

    one: the matrices whose rows the groups are. routed: what belongs to rows that are slots. partials: two slots and
    two flags for each CTA. ctas: CTAs of the launch.
    """

    groups: RowsOfGroups = RowsOfGroups()
    one: PackedGroup = PackedGroup()
    routed: RoutedRows | None = PerConfig(lambda c: RoutedRows() if c.routed.of_slots else None)
    alpha: Scalar = VARYING_FLOAT32
    factors: tuple[tuple[GroupFactor, ...], ...] = PerConfig(lambda c: ((GroupFactor(),) * c.factors,) * c.products)
    partials: PartialSums = PartialSums()
    ctas: Scalar = INT32

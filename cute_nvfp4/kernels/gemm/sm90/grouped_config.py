"""The configuration of a grouped GEMM of packed weights on WGMMA."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import ClassVar

from ....errors import explain
from ...dequantize.config import GroupRowsConfig
from ..grouped_config import MAX_GROUPS, PARAMETER_GROUPS, WINDOW, Columns, GroupTableConfig
from ..routed_config import RoutedConfig
from .config import WgmmaConfig
from .limits import can_implement
from .schedules import Schedule, WholeTiles

GROUP_TILE_N = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 144, 256)
"""The most rows of x in a tile."""
SWIZZLED_BYTES = 128
"""Bytes of the widest swizzle atom, a row of x in a box."""
AHEAD_COLUMNS = 144
"""The widest tile for which a CTA alone on its SM loads the epilogue's inputs before the mainloop."""
BOX = 16
"""A copy has a multiple of 16 rows of x, unless a tile has fewer: CuTe aborts for 24 rows, or 72."""
_NARROWER = {128: (32, 64, 96), 256: (96, 128, 192)}
MOST_WIDTHS = 4
"""The most widths of tiles. More of them, or two in 80 registers, make ptxas serialise the wgmmas (its note C7512)."""
GATHERED_COLUMNS = 144
"""The widest tile of 16-bit rows that threads gather: these threads need registers, too."""


@dataclass(frozen=True, kw_only=True)
class GroupedWgmmaConfig(GroupTableConfig, WgmmaConfig):
    """A ``WgmmaConfig`` for many problems.

    All tiles of a group have the narrowest of ``widths`` that covers its rows of x in as few tiles as ``tile_n`` would.

    narrower: the widths besides ``tile_n``, in ascending order; None: the default ones for ``tile_n``.
    maps: where the tensor maps of x are. "rows": one map for the rows of all groups, which have one N and K;
        "parameters" of the kernel, one for each of ``slots`` groups; or a "workspace" in global memory.
    capacity: groups that the table in shared memory has room for, a multiple of 32.
    routed: what the kernel does where rows are slots of a mixture of experts.
    programmatic: "x" if the kernel starts while the launch before it still decodes x, and waits only for that.
    widest: in the configuration of one of ``widths``, the ``tile_n`` of all of them; else 0.
    """

    tables: ClassVar[tuple[str, ...]] = ("rows", "parameters", "workspace")
    tensor_maps: ClassVar[tuple[str, ...]] = ("x",)
    ways_to_start: ClassVar[tuple[str, ...]] = ("", "x")
    tiles_n: ClassVar[tuple[int, ...]] = GROUP_TILE_N

    schedule: Schedule = field(default_factory=WholeTiles)
    maps: str = "rows"
    narrower: tuple[int, ...] | None = None
    capacity: int = WINDOW
    slots: int = 0
    routed: RoutedConfig = field(default_factory=RoutedConfig)
    widest: int = 0

    gathered = property(attrgetter("routed.gathered"))

    @property
    def places(self) -> tuple[str, ...]:
        """Columns of the table for the addresses and strides of a listed group."""
        rows = ("weight_sf", "weight_stride") if self.weights.in_rows else ()
        return ("out", "stride", "weight", *rows, *(("weight_scales", "x_scales") if self.fp8 else ()))

    @property
    def table_columns(self) -> Columns:
        if self.maps == "rows":
            return Columns(("start", "m", "row"), ())
        maps = self.tensor_maps if self.maps == "parameters" else ()
        return Columns(("start", "m", "n", "k_tiles"), (*self.places, *maps))

    @property
    def words(self) -> tuple[str, ...]:
        """The int64 words of a group in global memory."""
        return ("m", "n", "k", *self.places, "x_data", "x_row_stride")

    @property
    def counts_atoms(self) -> bool:
        """Whether another kernel decodes x first, whose scales begin at a new scale atom in each group."""
        return isinstance(self.first, GroupRowsConfig)

    @property
    def row_factors(self) -> bool:
        return self.fp8 or bool(self.routed.weighted)

    @property
    def factor_pitch(self) -> int:
        # warpgroups may be at tiles of different widths at the same time
        return 4 * (self.widest or self.tile_n)

    @property
    def columns_of_two(self) -> int:
        # gathering threads take registers from the MMA warps, and 16-bit fragments take twice as many as those of FP8
        return 64 if len(self.widths) > 1 or (self.gathered and not self.fp8) else 80

    def asks_ahead(self, width: int) -> bool:
        """Whether registers are left, besides the accumulators of ``width`` columns, to load the epilogue's inputs
        before the mainloop: the loads have the latency of global memory."""
        return self.ctas_per_sm == 1 and self.arch.generation == "sm90" and width <= AHEAD_COLUMNS

    @property
    def box_k(self) -> int:
        """Elements along K of a box of x: the width of its swizzle, at most 128 bytes."""
        return min(self.stage_k, SWIZZLED_BYTES // self.x_item)

    @property
    def stage_boxes(self) -> int:
        """Boxes along K of a stage."""
        return self.stage_k // self.box_k

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of tiles, in rows of x."""
        narrower = _NARROWER.get(self.tile_n, ()) if self.narrower is None else self.narrower
        return *narrower, self.tile_n

    @property
    def box_rows(self) -> int:
        """Rows of x in one copy: a multiple of 16 if ``tile_n`` is, since a thread takes long to start a copy, and the
        whole tile where rows are gathered for one width. A narrower tile may end within a box."""
        common = math.gcd(*self.widths)
        whole = common % BOX == 0 or (self.gathered and len(self.widths) == 1)
        return common if whole else math.gcd(BOX, self.tile_n)


def can_implement_groups(c: GroupedWgmmaConfig) -> str:
    """The reason why no kernel implements ``c``, or an empty string."""
    if c.schedule != WholeTiles():
        return explain("schedule of a grouped GEMM of packed weights", got=c.schedule, expected=WholeTiles())
    if len(c.widths) > MOST_WIDTHS or any(a >= b or a % 8 for a, b in pairwise(c.widths)):
        expected = f"at most {MOST_WIDTHS - 1} multiples of 8 below {c.tile_n}, in order"
        return explain("narrower", got=c.narrower, expected=expected)
    if c.half_tiles:
        return explain("warpgroups of a grouped GEMM", got=c.warpgroups, expected="2 or 4")
    if c.bias:
        return explain("bias of a grouped GEMM", got=c.bias, expected="none")
    if c.maps not in c.tables:
        return explain("maps", got=c.maps, expected=f"one of {', '.join(c.tables)}")
    if c.capacity % WINDOW or not WINDOW <= c.capacity <= MAX_GROUPS:
        return explain("capacity", got=c.capacity, expected=f"a multiple of {WINDOW} up to {MAX_GROUPS}")
    if not (1 <= c.slots <= PARAMETER_GROUPS if c.maps == "parameters" else c.slots == 0):
        return explain("slots", got=c.slots, expected=f"1 to {PARAMETER_GROUPS} with maps as parameters, else 0")
    return _routed(c) or can_implement(c)


def _routed(c: GroupedWgmmaConfig) -> str:
    """The limits of rows that are slots."""
    routed = c.routed
    if routed.of_slots and c.maps != "rows":
        return explain("maps of routed rows", got=c.maps, expected="rows")
    if c.gathered and c.box_k * c.x_item != SWIZZLED_BYTES:
        return explain("bytes of a gathered row in a stage", got=c.box_k * c.x_item, expected=SWIZZLED_BYTES)
    if c.arch.generation == "sm90" and c.gathered and not c.fp8 and c.tile_n > GATHERED_COLUMNS:
        return explain("rows of a gathered tile in 16 bits", got=c.tile_n, expected=f"at most {GATHERED_COLUMNS}")
    if c.fp8 and routed.of_slots and (routed.weighted or not c.gathered):
        got = f"gathered {c.gathered}, weighted {routed.weighted!r}"
        return explain("routed rows in FP8", got=got, expected="the first product of experts")
    if reason := routed.limit(c.products):
        return reason
    if routed.added and not (routed.weighted and c.vector):
        got = f"weighted {routed.weighted!r}, vector {c.vector}"
        return explain("rows added to those of tokens", got=got, expected="weighted ones, stored in vectors")
    if routed.weighted and c.gate:
        return explain("router weights", got="a gated product", expected="the second product of experts")
    return ""

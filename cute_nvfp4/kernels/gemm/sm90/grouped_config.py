"""What a grouped GEMM of packed weights is compiled for."""

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
"""The most bytes of a row of x that are swizzled together."""
AHEAD_COLUMNS = 144
"""Columns of a tile up to which a CTA alone on its multiprocessor asks before the products for what follows them."""
BOX = 16
"""Rows of x that a copy has, or a multiple, unless a tile has fewer (and CuTe aborts for 24 rows, or 72)."""
_NARROWER = {128: (32, 64, 96), 256: (96, 128, 192)}
MOST_WIDTHS = 4
"""More of them, or two in 80 registers, and ptxas lets no two wgmma run at the same time (its note C7512)."""
GATHERED_COLUMNS = 144
"""Columns of a tile up to which it does so where threads that gather rows in 16 bits take registers, too."""


@dataclass(frozen=True, kw_only=True)
class GroupedWgmmaConfig(GroupTableConfig, WgmmaConfig):
    """A ``WgmmaConfig`` for many problems.

    A tile has at most ``tile_n`` rows of x; those of a group are all of the narrowest of ``widths`` that covers it.
    narrower: the widths beside ``tile_n``, in order; None for those of a table.
    maps: where the tensor maps of x are: "rows", one for the rows of all groups, which have one N and K; "parameters"
    of the kernel, one for each of ``slots`` groups; or a "workspace" in global memory. capacity: groups that the table
    has room for, a multiple of 32. programmatic: "x" for a launch that starts while the one before it still decodes x,
    and waits for that only. widest: of the configuration of one of ``widths``, the ``tile_n`` of all; else 0. routed:
    what is done where rows are slots of a mixture of experts.
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
        """Columns of addresses and strides of a listed group."""
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
        """Whether x is decoded before, of scales that begin at an atom of their own in each group."""
        return isinstance(self.first, GroupRowsConfig)

    @property
    def row_factors(self) -> bool:
        return self.fp8 or bool(self.routed.weighted)

    @property
    def factor_pitch(self) -> int:
        # warpgroups may be at tiles of different widths
        return 4 * (self.widest or self.tile_n)

    @property
    def columns_of_two(self) -> int:
        # threads that gather take registers from those that multiply, and 16-bit fragments twice those of FP8
        return 64 if len(self.widths) > 1 or (self.gathered and not self.fp8) else 80

    def asks_ahead(self, width: int) -> bool:
        """Whether registers are left, beside the sums of so many columns, for what the epilogue of a tile will need: it
        is as far away as memory."""
        return self.ctas_per_sm == 1 and self.arch.generation == "sm90" and width <= AHEAD_COLUMNS

    @property
    def box_k(self) -> int:
        """Elements along K of a box of x: as many as are swizzled together, 128 bytes at most."""
        return min(self.stage_k, SWIZZLED_BYTES // self.x_item)

    @property
    def stage_boxes(self) -> int:
        """Boxes along K of a stage."""
        return self.stage_k // self.box_k

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of x that a tile may have."""
        narrower = _NARROWER.get(self.tile_n, ()) if self.narrower is None else self.narrower
        return *narrower, self.tile_n

    @property
    def box_rows(self) -> int:
        """Rows of x that are copied at a time: a multiple of 16 where a tile is one, for a copy takes its thread
        long to start, and all where they are gathered for one width. A width may end within them."""
        common = math.gcd(*self.widths)
        whole = common % BOX == 0 or (self.gathered and len(self.widths) == 1)
        return common if whole else math.gcd(BOX, self.tile_n)


def can_implement_groups(c: GroupedWgmmaConfig) -> str:
    """Why no kernel can be made of ``c``, or an empty string."""
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
    """Limits of rows that are slots."""
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

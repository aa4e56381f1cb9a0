"""What a grouped GEMM is compiled for, and the table of groups that each CTA keeps in shared memory.

A group is one problem of the launch. The table has ``capacity`` groups; those beyond the launch's groups have no tiles.
Sizes are those of the kernel's A and B, which are the caller's B and A where the plan swaps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ...errors import explain
from .config import OUT_BYTES, GemmConfig
from .limits import can_implement

WINDOW = 32
"""Groups that a warp examines at once, one in each lane."""
MAX_GROUPS = WINDOW * WINDOW
"""Most groups: a warp finds a group in two steps, first among the starts of all windows, then within one window."""
PARAMETER_GROUPS = 16
"""Most groups whose tensor maps are parameters of the kernel (``docs/explanation/grouped_gemm.md``)."""
MAPS = ("a", "sfa", "b", "sfb")
_SIZES = ("start", "m", "n", "k_tiles")


def table_size(maps: str, groups: int) -> dict[str, int]:
    """``slots`` and ``capacity`` for ``groups`` groups: powers of two, so that few kernels serve all launches."""
    return {
        "slots": 1 << (groups - 1).bit_length() if maps == "parameters" else 0,
        "capacity": WINDOW << (-(-groups // WINDOW) - 1).bit_length(),
    }


class Columns(NamedTuple):
    """Names of the columns of a table: those of 4 bytes and those of 8 bytes."""

    ints: tuple[str, ...]
    longs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GroupTableConfig:
    """The layout of the table: the columns ``tables[maps]``, each for ``capacity`` groups. Columns of 8 bytes come
    first; the number of work tiles ("total") comes last.

    tensor_maps: the maps of a group. words: the int64 words of a group in global memory, from which another kernel
    makes its tensor maps: sizes, then the table's columns of 8 bytes, then what only the maps need.
    """

    tables: ClassVar[dict[str, Columns]]
    tensor_maps: ClassVar[tuple[str, ...]]
    words: ClassVar[tuple[str, ...]]

    maps: str
    capacity: int

    @property
    def table_columns(self) -> Columns:
        return self.tables[self.maps]

    @property
    def table_bytes(self) -> int:
        """Bytes of the table, with the number of work tiles at its end."""
        ints, longs = self.table_columns
        return self.capacity * (4 * len(ints) + 8 * len(longs)) + 16

    def column(self, name: str) -> int:
        """Bytes from the start of the table to a column."""
        ints, longs = self.table_columns
        if name in longs:
            return 8 * self.capacity * longs.index(name)
        return 8 * self.capacity * len(longs) + 4 * self.capacity * (len(ints) if name == "total" else ints.index(name))


@dataclass(frozen=True, kw_only=True)
class GroupedConfig(GroupTableConfig, GemmConfig):
    """A ``GemmConfig`` for many problems.

    maps: where the tensor maps of the groups are: "parameters" of the kernel, which the host builds; a "workspace" in
    global memory, which another kernel fills; or "shared", one set for all groups, where each operand is one tensor.
    capacity: groups that the table has room for, a multiple of 32. slots: with "parameters", the number of groups in
    the kernel's parameters. ragged: with "shared", the operand ("a" or "b") whose rows offsets distribute to the
    groups; the other operand is a stack of matrices.
    """

    tables: ClassVar[dict[str, Columns]] = {
        "parameters": Columns(_SIZES, ("out", "stride", *MAPS)),
        "workspace": Columns(_SIZES, ("out", "stride")),
        "shared": Columns(("start", "rows", "row", "atom"), ()),
    }
    tensor_maps: ClassVar[tuple[str, ...]] = MAPS
    words: ClassVar[tuple[str, ...]] = (
        *("m", "n", "k", "out", "stride"),
        *("a_data", "a_row_stride", "a_scale", "b_data", "b_row_stride", "b_scale"),
    )

    store: str = "direct"
    maps: str = "parameters"
    capacity: int = WINDOW
    slots: int = 0
    ragged: str = ""

    def __str__(self) -> str:
        words = (super().__str__(), f"{self.slots or self.capacity} groups, maps {self.maps}", self.ragged)
        return " ".join(word for word in words if word)


def can_implement_grouped(config: GroupedConfig) -> str:
    """Why no kernel can be made of ``config``: the limit, and by how much it is exceeded; "" if one can."""
    c = config
    if c.scheduler != "static":
        return explain(
            "scheduler of a grouped GEMM",
            got=c.scheduler,
            expected="static: many groups fill the device, and groups of different K have no equal steps to share",
        )
    if c.store != "direct":
        return explain("store of a grouped GEMM", got=c.store, expected="direct: a box would cross into the next group")
    if c.out not in OUT_BYTES or c.bias or c.products != 1:
        return explain("a grouped GEMM", got=f"bias {c.bias!r}, {c.products} products", expected="one product, no bias")
    if c.maps not in c.tables:
        return explain("maps", got=c.maps, expected=f"one of {', '.join(c.tables)}")
    if c.ragged not in (("a", "b") if c.maps == "shared" else ("",)):
        return explain("ragged", got=repr(c.ragged), expected="'a' or 'b' with shared maps, else ''")
    if c.capacity % WINDOW or not WINDOW <= c.capacity <= MAX_GROUPS:
        return explain("capacity", got=c.capacity, expected=f"a multiple of {WINDOW} up to {MAX_GROUPS}")
    if not (1 <= c.slots <= PARAMETER_GROUPS if c.maps == "parameters" else c.slots == 0):
        return explain("slots", got=c.slots, expected=f"1 to {PARAMETER_GROUPS} with maps as parameters, else 0")
    return can_implement(c)

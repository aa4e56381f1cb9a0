"""What the kernel of a grouped GEMM is compiled for, and the table of groups that each CTA keeps in shared memory.

A group is one problem of the launch. The table has a column for each of ``capacity`` groups; those that are not there
have no tiles. Sizes are those of the kernel's A and B, which are the caller's B and A where the plan swaps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ...errors import explain
from .config import OUT_BYTES, GemmConfig
from .limits import can_implement

WINDOW = 32
"""Groups that a warp looks at at a time, one a lane."""
MAX_GROUPS = WINDOW * WINDOW
"""A group is found in two looks: at the first of each window, then at a window."""
PARAMETER_GROUPS = 16
"""Most groups whose tensor maps are parameters of the kernel (``docs/explanation/grouped_gemm.md``)."""
MAPS = ("a", "sfa", "b", "sfb")
_SIZES = ("start", "m", "n", "k_tiles")


def table_size(maps: str, groups: int) -> dict[str, int]:
    """``slots`` and ``capacity`` for so many groups: powers of two, so that few kernels serve all."""
    return {
        "slots": 1 << (groups - 1).bit_length() if maps == "parameters" else 0,
        "capacity": WINDOW << (-(-groups // WINDOW) - 1).bit_length(),
    }


class Columns(NamedTuple):
    """Names of the columns of a table, of 4 and of 8 bytes."""

    ints: tuple[str, ...]
    longs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GroupTableConfig:
    """Where the columns of the table are: those of ``tables[maps]``, each for ``capacity`` groups; those of 8 bytes
    first, and last the number of work tiles ("total").

    tensor_maps: of a group. words: the int64 words of a group in global memory, from which another kernel makes its
    tensor maps: sizes, then the columns of 8 bytes of the table, then what only the maps need.
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
        """The table, and the number of work tiles after it."""
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

    maps: where the tensor maps of the groups are: "parameters" of the kernel, built on the host; a "workspace" in
    global memory, built by another kernel; or "shared", one set for all groups, where each operand is one tensor.
    capacity: groups that the table has room for, a multiple of 32. slots: with "parameters", groups that there are
    parameters for. ragged: with "shared", the side ("a" or "b") whose rows offsets distribute to the groups; the
    other is a stack of matrices.
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
    """Why no kernel can be made of ``config``: which limit, and by how much; an empty string if one can."""
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

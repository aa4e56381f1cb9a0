"""What the kernel of a grouped GEMM is compiled for, and the table of groups that each CTA keeps in shared memory.

A group is one problem of the launch. The table has a column for each of ``capacity`` groups; those that are not there
have no tiles. Sizes are those of the kernel's A and B, which are the caller's B and A where the plan swaps them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import explain
from .config import OUT_BYTES, GemmConfig
from .limits import can_implement

WINDOW = 32
"""Groups that a warp looks at at a time, one a lane."""
MAX_GROUPS = WINDOW * WINDOW
"""A group is found in two looks: at the first of each window, then at a window."""
PARAMETER_GROUPS = 16
"""Most groups whose tensor maps are parameters of the kernel (``docs/grouped_gemm.md``)."""
# columns of the table, of 4 and of 8 bytes: first work tile, sizes, first row and first scale atom in the shared
# matrix; output and its stride, addresses of the tensor maps
_SIZES = ("start", "m", "n", "k_tiles")
INTS = {"parameters": _SIZES, "workspace": _SIZES, "shared": ("start", "rows", "row", "atom")}
LONGS = {"parameters": ("out", "stride", "a", "sfa", "b", "sfb"), "workspace": ("out", "stride"), "shared": ()}
MAPS = ("a", "sfa", "b", "sfb")


@dataclass(frozen=True, kw_only=True)
class GroupedConfig(GemmConfig):
    """A ``GemmConfig`` for many problems.

    maps: where the tensor maps of the groups are: "parameters" of the kernel, built on the host; a "workspace" in
    global memory, built by another kernel; or "shared", one set for all groups, where each operand is one tensor.
    capacity: groups that the table has room for, a multiple of 32. slots: with "parameters", groups that there are
    parameters for. ragged: with "shared", the side ("a" or "b") whose rows are dealt to the groups by offsets; the
    other is a stack of matrices.
    """

    store: str = "direct"
    maps: str = "parameters"
    capacity: int = WINDOW
    slots: int = 0
    ragged: str = ""

    @property
    def table_bytes(self) -> int:
        """The table, and the number of work tiles after it."""
        return self.capacity * (4 * len(INTS[self.maps]) + 8 * len(LONGS[self.maps])) + 16

    def column(self, name: str) -> int:
        """Bytes from the start of the table to a column: those of 8 bytes come first."""
        longs, ints = LONGS[self.maps], INTS[self.maps]
        if name in longs:
            return 8 * self.capacity * longs.index(name)
        return 8 * self.capacity * len(longs) + 4 * self.capacity * (len(ints) if name == "total" else ints.index(name))

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
    if c.maps not in INTS:
        return explain("maps", got=c.maps, expected=f"one of {', '.join(INTS)}")
    if c.ragged not in (("a", "b") if c.maps == "shared" else ("",)):
        return explain("ragged", got=repr(c.ragged), expected="'a' or 'b' with shared maps, else ''")
    if c.capacity % WINDOW or not WINDOW <= c.capacity <= MAX_GROUPS:
        return explain("capacity", got=c.capacity, expected=f"a multiple of {WINDOW} up to {MAX_GROUPS}")
    if not (1 <= c.slots <= PARAMETER_GROUPS if c.maps == "parameters" else c.slots == 0):
        return explain("slots", got=c.slots, expected=f"1 to {PARAMETER_GROUPS} with maps as parameters, else 0")
    return can_implement(c)

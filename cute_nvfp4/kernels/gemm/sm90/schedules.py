"""The ways in which CTAs share the work of a GEMM of packed weights: one record for each, with its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ....errors import OperandError, explain

if TYPE_CHECKING:
    from .config import WgmmaConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A way to share the work. A schedule that lacks one of these fields has the value that stands here.

    raster: the order of work tiles, as in ``GemmTiling``. cluster_rows: CTAs of a cluster along the weight's rows,
    which load x for each other by multicast. split_k: CTAs of a cluster that share a tile along K; each stores some of
    its rows of x. k_groups: warpgroups that have the same rows of the weight and take stages in turn. overlap: k-tiles
    during whose products sums go to the other CTA.
    """

    raster: str = "m"

    scheduler: ClassVar[str]
    """The tile scheduler: "static", "stream_k" or "helped"."""
    cluster_rows: ClassVar[int] = 1
    split_k: ClassVar[int] = 1
    k_groups: ClassVar[int] = 1
    overlap: ClassVar[int] = 0

    def __str__(self) -> str:
        told = (f"{x.name}={value}" for x in fields(self) if (value := getattr(self, x.name)) != x.default)
        return f"{type(self).__name__}({', '.join(told)})"

    def limit(self, c: WgmmaConfig) -> str:
        """The reason why the schedule does not fit the tile of ``c``, or an empty string."""
        if self.raster not in ("m", "n"):
            return explain("raster", got=repr(self.raster), expected="'m' or 'n'")
        for name, values in _VALUES.items():
            if (got := getattr(self, name)) not in values:
                return explain(name, got=got, expected=" or ".join(map(str, values)))
        return self._limit(c)

    def _limit(self, c: WgmmaConfig) -> str:
        raise NotImplementedError

    @property
    def has_single_ctas(self) -> bool:
        """Whether each CTA works alone: without clusters, and on whole tiles except at the ends of equal shares."""
        return isinstance(self, WholeTiles) and self.cluster_rows == 1

    @property
    def words(self) -> dict[str, Any]:
        """All fields by name, as a table of plans stores them (``schedule_of``)."""
        return {name: getattr(self, name) for name in _WORDS}


_VALUES = {"cluster_rows": (1, 2, 4), "split_k": (1, 2, 4), "k_groups": (1, 2), "overlap": (0, 1, 2)}
_WORDS = ("scheduler", "raster", *_VALUES)


@dataclass(frozen=True, kw_only=True)
class WholeTiles(Schedule):
    """A CTA computes whole tiles."""

    scheduler: ClassVar = "static"
    cluster_rows: int = 1

    def _limit(self, c: WgmmaConfig) -> str:
        if c.tile_n % (8 * self.cluster_rows):
            return explain("cluster_rows", got=self.cluster_rows, expected=f"at most {c.tile_n // 8}: tile_n / 8")
        return ""


@dataclass(frozen=True, kw_only=True)
class EqualShares(WholeTiles):
    """Stream-K: CTAs, or clusters, get equal shares of all k-tiles."""

    scheduler: ClassVar = "stream_k"


@dataclass(frozen=True, kw_only=True)
class SharedTiles(Schedule):
    """A cluster for each tile: its ``split_k`` CTAs, and ``k_groups`` warpgroups of each, share the tile along K."""

    scheduler: ClassVar = "static"
    split_k: int = 1
    k_groups: int = 1

    def _limit(self, c: WgmmaConfig) -> str:
        if self.scheduler == "static" and c.k_parts == 1:
            return explain("split_k · k_groups of tiles shared along K", got=1, expected="more")
        if c.tile_n % (8 * c.k_parts):
            return explain("split_k", got=self.split_k, expected=f"a divisor of {c.tile_n} into multiples of 8")
        if self.k_groups > 1 and c.tile_n > {2: 128, 4: 64}.get(c.warpgroups, 0):
            got = f"{self.k_groups} with {c.warpgroups} warpgroups and tiles of {c.tile_n} columns"
            expected = "1, or 2 with 4 warpgroups, at most 64 columns, or 2 and at most 128"
            return explain("k_groups", got=got, expected=expected)
        return ""


@dataclass(frozen=True, kw_only=True)
class OverlappedSums(SharedTiles):
    """Two CTAs share a tile along K, and send sums during the products of ``overlap`` k-tiles."""

    split_k: ClassVar = 2
    k_groups: ClassVar = 1
    overlap: int = 1

    def _limit(self, c: WgmmaConfig) -> str:
        if c.stage_tiles != 1:
            return explain("stage_tiles of overlapped sums", got=c.stage_tiles, expected="1")
        if not self.overlap or c.part_columns % (32 * self.overlap):
            return explain("tile_n of overlapped sums", got=c.tile_n, expected=f"a multiple of {64 * self.overlap}")
        return super()._limit(c)


@dataclass(frozen=True, kw_only=True)
class Helped(SharedTiles):
    """Each tile has a CTA, or ``split_k`` CTAs of a cluster, and helpers multiply the last k-tiles of every tile."""

    scheduler: ClassVar = "helped"
    k_groups: ClassVar = 1

    def _limit(self, c: WgmmaConfig) -> str:
        if c.ctas_per_sm != 1:
            return explain("ctas_per_sm of tiles with helpers", got=c.ctas_per_sm, expected="1")
        return super()._limit(c)


SCHEDULES = (WholeTiles, SharedTiles, OverlappedSums, EqualShares, Helped)


def schedule_of(words: Mapping[str, Any]) -> Schedule:
    """The schedule whose fields ``words`` contains (``Schedule.words``); other keys are ignored.

    Raises:
        OperandError: no schedule has these fields.
    """
    words = {name: words[name] for name in _WORDS}
    for kind in SCHEDULES:
        found = kind(**{x.name: words[x.name] for x in fields(kind)})
        if found.words == words:
            return found
    raise OperandError.of("schedule", got=words, expected=f"one of {', '.join(x.__name__ for x in SCHEDULES)}")

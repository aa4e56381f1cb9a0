"""The ways in which CTAs share the work of a GEMM of packed weights: the fields that each has, and its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ....errors import explain

if TYPE_CHECKING:
    from .config import WgmmaConfig


class Schedule:
    """One of them, whose ``fields`` may have these values; the others of a configuration must be as in ``ABSENT``."""

    what: ClassVar[str]
    fields: ClassVar[dict[str, tuple[int, ...]]]

    def reason(self, c: WgmmaConfig) -> str:
        """Why ``c`` cannot be scheduled so, or an empty string."""
        for name, absent in ABSENT.items():
            values = self.fields.get(name, absent)
            if getattr(c, name) not in values:
                expected = " or ".join(map(str, values))
                return explain(f"{name} of {self.what}", got=getattr(c, name), expected=expected)
        return self.limit(c)

    def limit(self, c: WgmmaConfig) -> str:
        """Why the fields do not go with the tile."""
        return ""


ABSENT = {"cluster_rows": (1,), "split_k": (1,), "k_groups": (1,), "overlap": (0,), "ctas_per_sm": (1, 2)}


class WholeTiles(Schedule):
    """A CTA multiplies whole tiles, and stores them; ``cluster_rows`` CTAs load x for each other."""

    what = "whole tiles"
    fields: ClassVar = {"cluster_rows": (1, 2, 4)}

    def limit(self, c: WgmmaConfig) -> str:
        if c.tile_n % (8 * c.cluster_rows):
            return explain("cluster_rows", got=c.cluster_rows, expected=f"at most {c.tile_n // 8}: tile_n / 8")
        return ""


class EqualShares(WholeTiles):
    """All k-tiles are distributed in equal shares: stream-K."""

    what = "stream_k"


class SharedTiles(Schedule):
    """``split_k`` CTAs of a cluster, and ``k_groups`` warpgroups of each, share a tile along K."""

    what = "tiles shared along K"
    fields: ClassVar = {"split_k": (1, 2, 4), "k_groups": (1, 2)}

    def limit(self, c: WgmmaConfig) -> str:
        if c.tile_n % (8 * c.k_parts):
            expected = f"a divisor of {c.tile_n} into multiples of 8"
            return explain("split_k", got=c.split_k, expected=expected)
        if c.k_groups > 1 and c.tile_n > {2: 128, 4: 64}.get(c.warpgroups, 0):
            got = f"{c.k_groups} with {c.warpgroups} warpgroups and tiles of {c.tile_n} columns"
            expected = "1, or 2 with 4 warpgroups, at most 64 columns, or 2 and at most 128"
            return explain("k_groups", got=got, expected=expected)
        return ""


class OverlappedSums(SharedTiles):
    """Two CTAs share a tile along K, and send sums during the products of ``overlap`` k-tiles."""

    what = "overlapped sums"
    fields: ClassVar = {"split_k": (2,), "overlap": (1, 2)}

    def limit(self, c: WgmmaConfig) -> str:
        if c.stage_tiles != 1:
            return explain(f"stage_tiles of {self.what}", got=c.stage_tiles, expected="1")
        if c.part_columns % (32 * c.overlap):
            return explain(f"tile_n of {self.what}", got=c.tile_n, expected=f"a multiple of {64 * c.overlap}")
        return super().limit(c)


class Helped(SharedTiles):
    """A CTA, or ``split_k`` of a cluster, for each tile, and others that multiply the ends of K."""

    what = "tiles with helpers"
    fields: ClassVar = {"split_k": (1, 2, 4), "ctas_per_sm": (1,)}


def schedule_of(c: WgmmaConfig) -> Schedule | None:
    """The schedule of a configuration; None if there is none of this name."""
    if c.scheduler == "static":
        if c.overlap:
            return OverlappedSums()
        return SharedTiles() if c.k_parts > 1 else WholeTiles()
    return {"stream_k": EqualShares(), "helped": Helped()}.get(c.scheduler)


def limit_of_rows(c: WgmmaConfig) -> str:
    """Why weights that lie in rows (``gemm.packed.rows``) cannot be multiplied so, or an empty string: a stage has 128
    of K, and a CTA whole tiles of 128 rows."""
    whole = c.stage_tiles == 2 and not c.half_tiles
    if c.decodes_x and not (
        c.packing == "nvfp4_rows" and c.tile_n in (64, 128) and c.cluster_rows == c.ctas_per_sm == 1
    ):
        got = f"{c.packing}, tiles of {c.tile_n}, cluster_rows {c.cluster_rows}, ctas_per_sm {c.ctas_per_sm}"
        return explain("loading warps that decode x", got=got, expected="nvfp4_rows, tiles of 64 or 128, 1, 1")
    if c.batched and not c.weights.in_rows:
        return explain("packing of a batch", got=c.packing, expected="nvfp4_rows or mxfp4_rows")
    if not c.weights.in_rows or (whole and c.arch.generation == "sm90" and c.programmatic != "weights"):
        return ""
    got = f"{c.row_groups} warpgroups along rows, stages of {c.stage_tiles} tiles on {c.arch.name}"
    return explain("weights that lie in rows", got=got, expected="2 or 4, 2 tiles, on sm_90a, not started by weights")

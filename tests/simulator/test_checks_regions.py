"""A shadow that keeps the history of granules accessed alike once says what one that keeps each granule's says."""

from __future__ import annotations

import numpy as np
import pytest

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.regions import CtaShadow, Regions
from cute_nvfp4.sim.checks.shadow import Actor, Shadow

CTAS, GRANULES, WARPS = 3, 96, 2


class Told(list):
    """Collects reports: kind, and every conflict as (granule, epoch)."""

    def __call__(self, kind, who, index, bad, epochs) -> None:
        bad, index, epochs = np.broadcast_arrays(bad, index, epochs)
        self.append((kind, index[bad].tolist(), epochs[bad].tolist()))


class Twins:
    """The same accesses to a shadow by regions and to one by granules."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.clocks = Clocks(CTAS * WARPS, WARPS, 1, ("thread", "tensor", "bulk_read"))
        self.told, self.every = Told(), Told()
        self.regions, self.granules = CtaShadow(CTAS, GRANULES, self.told), Shadow(CTAS * GRANULES, self.every)

    def actor(self, warps: np.ndarray, kind: str, label: int, distinct: bool) -> Actor:
        c = self.clocks
        component, clock = c.component(kind, warps)[:, None], c.now[warps][:, None]
        own = (component,) if kind == "tensor" else ()
        return Actor(
            c, None, ep.pack(label, component, clock), c.base(warps)[:, None], warps[:, None],
            c.component("thread", warps)[:, None], own=own, proxy=kind != "thread", distinct=distinct,
        )  # fmt: skip

    def step(self, label: int) -> None:
        """One access of a warp in each of some CTAs, to one tile or to tiles that differ, or one that lanes choose."""
        rng = self.rng
        ctas = np.sort(rng.choice(CTAS, rng.integers(1, CTAS + 1), replace=False))
        warps = ctas * WARPS + rng.integers(WARPS)
        if rng.random() < 0.3:
            self.clocks.meet(warps)
        if rng.random() < 0.3:
            self.clocks.named_arrive(warps, np.zeros_like(warps))
            self.clocks.named_open(np.repeat(ctas, WARPS) * WARPS + np.tile(np.arange(WARPS), len(ctas)), np.array([0]))
        kind = str(rng.choice(["thread", "tensor", "bulk_read"]))
        write = bool(rng.random() < (0.0 if kind == "bulk_read" else 0.4))
        flag = bool(rng.random() < 0.5)
        if rng.random() < 0.2:
            index = ctas[:, None] * GRANULES + rng.integers(0, GRANULES, (len(ctas), 4))
            who = self.actor(warps, kind, label, distinct=False)
            self.regions.part(index)
            self.regions.access(index, who, write, flag)
            self.granules.access(index, who, write, flag)
            return
        first, step = 8 * rng.integers(0, 8, len(ctas) if rng.random() < 0.4 else 1), rng.choice([1, 2])
        tile = first[:, None] + rng.permutation(step * np.arange(rng.choice([8, 16])))
        if rng.random() < 0.3:
            # rows of one CTA that read different tiles at once
            write, tile, ctas, warps = False, np.concatenate([tile, tile + 4]), np.r_[ctas, ctas], np.r_[warps, warps]
            tile = tile if len(tile) == len(ctas) else np.repeat(tile, len(ctas) // 2, axis=0)
        who = self.actor(warps, kind, label, distinct=len(set(ctas.tolist())) == len(ctas))
        self.regions.tile(ctas, tile, who, write, flag)
        self.granules.access(ctas[:, None] * GRANULES + tile, who, write, flag)

    def agree(self) -> None:
        """What is known of every granule is the same, and so is all that was told."""
        every = np.arange(CTAS * GRANULES)
        at, mine, other = self.regions.leaders(every), self.regions.readers, self.granules.readers
        np.testing.assert_array_equal(self.regions.last[at], self.granules.last)
        np.testing.assert_array_equal(mine.mask[at], other.mask)
        assert mine.count == other.count
        for p in range(mine.count):
            held = (other.mask >> p & 1).astype(bool)
            np.testing.assert_array_equal(mine.store[p][at][held], other.store[p][held])
        assert self.told == self.every


def run(seed: int, steps: int = 120) -> Twins:
    twins = Twins(seed)
    for label in range(1, steps):
        twins.step(label)
        twins.agree()
    return twins


@pytest.mark.parametrize("seed", range(6))
def test_regions_know_what_granules_know(seed: int) -> None:
    twins = run(seed)
    assert len({kind for kind, *_ in twins.told}) > 2, "the accesses are to be hazards of several kinds"


def test_a_new_leader_that_takes_nothing_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CtaShadow, "_moved", lambda self, old, new: None)
    with pytest.raises(AssertionError):
        run(0)


def test_tiles_stay_whole_until_a_part_is_touched() -> None:
    moves: list[dict[int, int]] = []
    regions = Regions(16)

    def moved(old: np.ndarray, new: np.ndarray) -> None:
        moves.append(dict(zip(new.tolist(), old.tolist())))

    assert regions.leaders(np.arange(8), moved).tolist() == [0]
    assert regions.leaders(np.arange(8)[::-1].copy(), moved).tolist() == [0]
    assert regions.leaders(np.arange(16), moved).tolist() == [0, 8]
    assert regions.leaders(np.array([6, 7, 8]), moved).tolist() == [6, 8]
    assert regions.leaders(np.arange(16), moved).tolist() == [0, 6, 8, 9]
    assert moves == [{8: 0}, {6: 0, 9: 8}]
    regions.part(np.array([3]), moved)
    assert regions.leader.tolist() == [0, 0, 0, 3, 0, 0, 6, 6, 8, 9, 9, 9, 9, 9, 9, 9]
    assert regions.single.nonzero()[0].tolist() == [3, 8]

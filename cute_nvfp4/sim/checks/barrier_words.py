"""The 8 bytes of a valid mbarrier, which only mbarrier instructions may access (PTX ISA, "mbarrier: contents")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.machine.layout import SHARED_BASE

WORD = 8


class BarrierWords:
    """The words of shared memory that are live mbarriers.

    ``live`` (words,) marks them by their place in ``wave.shared``; ``pairs`` marks every 16 bytes with a live one.
    ``low`` and ``high`` are the bounds of all mbarriers so far, as bytes of a CTA's shared memory.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.live = np.zeros(state.wave.shared_stride * state.wave.count // WORD, bool)
        self.pairs = np.zeros(-(-len(self.live) // 2), bool)
        self.low, self.high = state.wave.shared_stride, 0

    def set(self, cta: np.ndarray, offset: np.ndarray, live: bool) -> None:
        """Marks the mbarriers at ``offset`` (k,) of CTAs (k,) as ``live``, or as invalidated."""
        at = offset - SHARED_BASE
        words = (cta * self.state.wave.shared_stride + at) // WORD
        self.live[words] = live
        self.pairs[words >> 1] = self.live[words] | self.live.take(words ^ 1, mode="clip")
        self.low, self.high = min(self.low, int(at.min())), max(self.high, int(at.max()) + WORD)

    def near(self, offset: np.ndarray, width: int) -> bool:
        """Whether ``width`` bytes at bytes ``offset`` of a CTA may overlap an mbarrier, by the bounds of them all."""
        return int(offset.max()) + width > self.low and int(offset.min()) < self.high

    def touched(self, byte: np.ndarray, size: int, who, write: bool) -> None:
        """Reports mbarriers among the ``size`` bytes at each ``byte``, of a shape that broadcasts with the actor's."""
        if not self.high:
            return
        if size == 2 * WORD and not self.pairs.take(byte >> 4, mode="clip").any():
            return
        first = byte >> 3
        for j in range(-(-size // WORD)):
            hit = self.live.take(first + j, mode="clip")
            if hit.any():
                self._report(hit, first + j, who, write)

    def _report(self, hit: np.ndarray, word: np.ndarray, who, write: bool) -> None:
        wave = self.state.wave
        at = tuple(int(x) for x in np.argwhere(hit)[0])
        cta, byte = divmod(int(word[at]) * WORD, wave.shared_stride)
        name = wave.mbarriers.name(cta, wave.mbarriers.slot_of[byte + SHARED_BASE])
        by = self.state.reporter.actor(who, at)
        self.state.findings.hazard(
            "mbarrier-bytes",
            f"{self.state.title}: the {name} is {'overwritten' if write else 'read'} by {by}: between "
            "mbarrier.init and mbarrier.inval only mbarrier instructions may touch its 8 bytes",
            who.instruction,
        )

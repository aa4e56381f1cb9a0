"""The 8 bytes of an mbarrier: between init and inval nothing else may touch them (PTX ISA, "mbarrier: contents")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.machine.layout import SHARED_BASE

WORD = 8


class BarrierWords:
    """Which words of shared memory are live mbarriers, by byte of ``wave.shared`` / 8."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.live = np.zeros(state.wave.shared_stride * state.wave.count // WORD, bool)
        self.pairs = np.zeros(-(-len(self.live) // 2), bool)
        self.low, self.high = state.wave.shared_stride, 0

    def set(self, cta: np.ndarray, offset: np.ndarray, live: bool) -> None:
        """Initialised, or invalidated: barriers at ``offset`` (k,) of CTAs (k,)."""
        at = offset - SHARED_BASE
        words = (cta * self.state.wave.shared_stride + at) // WORD
        self.live[words] = live
        self.pairs[words >> 1] = self.live[words] | self.live.take(words ^ 1, mode="clip")
        self.low, self.high = min(self.low, int(at.min())), max(self.high, int(at.max()) + WORD)

    def near(self, offset: np.ndarray, width: int) -> bool:
        """Whether writes of ``width`` bytes at bytes ``offset`` of a CTA may meet one: tiles and barriers lie apart."""
        return int(offset.max()) + width > self.low and int(offset.min()) < self.high

    def touched(self, byte: np.ndarray, size: int, who, write: bool) -> None:
        """An access to ``size`` bytes at ``byte``, of a shape that broadcasts with the actor's."""
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

"""Registers that the warps of a CTA hand to one another (PTX ISA, "setmaxnreg").

A CTA gets registers for its warps when it starts. ``setmaxnreg.dec`` puts some of a warp's into the pool of the CTA,
``.inc`` takes some from there, and waits until there are enough. Of warps that exit the ISA says nothing: they keep
theirs here.
"""

from __future__ import annotations

from math import prod

import numpy as np

from cute_nvfp4.sim.frontend.model import Kernel
from cute_nvfp4.sim.machine.protocols import Wave

REGISTERS = 65536
"""Of a multiprocessor."""
PARTITIONS = 4
"""Of a multiprocessor; each has a quarter of the warps and of the registers."""
UNIT = 8
"""Registers of a thread are given in such steps, and so 256 at a time to a warp."""


def registers_at_launch(kernel: Kernel, compiled: int) -> int:
    """Registers that a thread gets when its CTA starts, 0 where ``setmaxnreg`` does nothing.

    ptxas drops the instruction where no directive bounds the registers. ``compiled`` is the number in the machine code;
    0 where there is none: the bound itself then, which ptxas takes where the kernel asks for more.
    """
    most, ctas = kernel.directives.get("maxnreg"), kernel.directives.get("minnctapersm")
    threads = kernel.directives.get("reqntid") or kernel.directives.get("maxntid")
    bounds = list(most or ())
    if ctas and threads:
        warps = -(-prod(threads) // 32) * ctas[0]
        bounds.append(REGISTERS // PARTITIONS // -(-warps // PARTITIONS) // 32 // UNIT * UNIT)
    return -(-min(compiled or 256, *bounds) // UNIT) * UNIT if bounds else 0


class RegisterPool:
    """The registers of every CTA of a wave. ``each``: of a thread at the start. ``has``, ``asked`` (warps,): of a
    thread of the warp, and what it would have if it waited no more; ``free`` (CTAs,): in the pool."""

    def __init__(self, wave: Wave, each: int) -> None:
        self.wave, self.each = wave, each
        self.free = np.zeros(wave.count, np.int64)
        self.has = np.full(len(wave.cta_of_warp), each)
        self.asked = self.has.copy()

    def release(self, warps: np.ndarray, count: int) -> None:
        """``warps`` (k,) keep ``count`` registers a thread."""
        self._move(warps, np.minimum(self.has[warps], count))
        self.asked[warps] = self.has[warps]
        self.wave.progress += 1

    def ask(self, warps: np.ndarray, count: int) -> None:
        """``warps`` (k,) want ``count`` registers a thread."""
        self.asked[warps] = np.maximum(self.has[warps], count)

    def served(self, warps: np.ndarray) -> np.ndarray:
        """(k,) which of ``warps`` can have together what they asked for: those that come first do."""
        free, out = self.free.copy(), np.zeros(len(warps), bool)
        needs = 32 * (self.asked[warps] - self.has[warps])
        for row, (cta, need) in enumerate(zip(self.wave.cta_of_warp[warps].tolist(), needs.tolist())):
            if need <= free[cta]:
                free[cta] -= need
                out[row] = True
        return out

    def take(self, warps: np.ndarray) -> None:
        """``warps`` (k,) get what they asked for."""
        self._move(warps, self.asked[warps])

    def _move(self, warps: np.ndarray, count: np.ndarray) -> None:
        np.add.at(self.free, self.wave.cta_of_warp[warps], 32 * (self.has[warps] - count))
        self.has[warps] = count

    def describe(self, warp: int) -> str:
        """What a warp that waits wants, and why its CTA cannot give it."""
        mine = self.wave.cta_of_warp == self.wave.cta_of_warp[warp]
        threads = 32 * int(mine.sum())
        return (
            f"registers: its threads have {self.has[warp]} and ask for {self.asked[warp]}; the pool of the CTA got "
            f"{self.each * threads} when it started ({self.each} for each of {threads} threads), and "
            f"{32 * int(self.asked[mine].sum())} are needed for what its warps hold and ask for"
        )

"""The register pool of a CTA, through which its warps exchange registers (PTX ISA, "setmaxnreg").

A CTA gets registers for its warps when it starts. ``setmaxnreg.dec`` moves registers of a warp to the pool of the CTA;
``setmaxnreg.inc`` takes registers from the pool, and waits until it has enough. The ISA does not say what becomes of
the registers of warps that exit: here they keep them.
"""

from __future__ import annotations

from math import prod

import numpy as np

from cute_nvfp4.sim.frontend.model import Kernel
from cute_nvfp4.sim.machine.protocols import Wave

REGISTERS = 65536
"""32-bit registers of an SM."""
PARTITIONS = 4
"""Partitions of an SM, each with a quarter of its warps and of its registers."""
UNIT = 8
"""The allocation unit in registers of a thread, which is 256 registers of a warp."""


def registers_at_launch(kernel: Kernel, compiled: int) -> int:
    """Returns the registers that a thread gets when its CTA starts, or 0 if ``setmaxnreg`` does nothing.

    ptxas drops ``setmaxnreg`` if no directive of the kernel bounds the registers. ``compiled`` is the number in the
    machine code, or 0 if there is no machine code: then the result is the bound, which ptxas takes for a kernel that
    wants more.
    """
    most, ctas = kernel.directives.get("maxnreg"), kernel.directives.get("minnctapersm")
    threads = kernel.directives.get("reqntid") or kernel.directives.get("maxntid")
    bounds = list(most or ())
    if ctas and threads:
        warps = -(-prod(threads) // 32) * ctas[0]
        bounds.append(REGISTERS // PARTITIONS // -(-warps // PARTITIONS) // 32 // UNIT * UNIT)
    return -(-min(compiled or 256, *bounds) // UNIT) * UNIT if bounds else 0


class RegisterPool:
    """The register pools of the CTAs of a wave.

    ``each`` is the number of registers of a thread at the start, ``has`` (warps,) the number of a thread of each warp
    now, ``asked`` (warps,) the number that it asks for. ``free`` (CTAs,) counts the registers in each pool.
    """

    def __init__(self, wave: Wave, each: int) -> None:
        self.wave, self.each = wave, each
        self.free = np.zeros(wave.count, np.int64)
        self.has = np.full(len(wave.cta_of_warp), each)
        self.asked = self.has.copy()

    def release(self, warps: np.ndarray, count: int) -> None:
        """Makes ``warps`` (k,) keep at most ``count`` registers a thread, and moves the rest to the pools."""
        self._move(warps, np.minimum(self.has[warps], count))
        self.asked[warps] = self.has[warps]
        self.wave.progress += 1

    def ask(self, warps: np.ndarray, count: int) -> None:
        """Notes that ``warps`` (k,) ask for ``count`` registers a thread."""
        self.asked[warps] = np.maximum(self.has[warps], count)

    def served(self, warps: np.ndarray) -> np.ndarray:
        """Returns which of ``warps`` (k,) the pools can serve together, where earlier warps take precedence."""
        free, out = self.free.copy(), np.zeros(len(warps), bool)
        needs = 32 * (self.asked[warps] - self.has[warps])
        for row, (cta, need) in enumerate(zip(self.wave.cta_of_warp[warps].tolist(), needs.tolist())):
            if need <= free[cta]:
                free[cta] -= need
                out[row] = True
        return out

    def take(self, warps: np.ndarray) -> None:
        """Gives ``warps`` (k,) the registers that they asked for."""
        self._move(warps, self.asked[warps])

    def _move(self, warps: np.ndarray, count: np.ndarray) -> None:
        np.add.at(self.free, self.wave.cta_of_warp[warps], 32 * (self.has[warps] - count))
        self.has[warps] = count

    def describe(self, warp: int) -> str:
        """Returns, for a message, what a waiting warp asks for, and what its CTA has."""
        mine = self.wave.cta_of_warp == self.wave.cta_of_warp[warp]
        threads = 32 * int(mine.sum())
        return (
            f"registers: its threads have {self.has[warp]} and ask for {self.asked[warp]}; the pool of the CTA got "
            f"{self.each * threads} when it started ({self.each} for each of {threads} threads), and "
            f"{32 * int(self.asked[mine].sum())} are needed for what its warps hold and ask for"
        )

"""Which warp does what, and how many registers its threads may have."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
REGISTERS = 65536
"""Registers of a multiprocessor."""
MAX_REGISTERS = 255
"""Registers that one thread can name."""


@dataclass(frozen=True)
class Roles:
    """The warps of a CTA: ``epilogue`` warps first (warp w reads lanes 32·(w mod 4) … of tensor memory), then one that
    issues the MMAs and one that issues the loads."""

    epilogue: int = 4

    @property
    def mma_warp(self) -> int:
        return self.epilogue

    @property
    def load_warp(self) -> int:
        return self.epilogue + 1

    @property
    def threads(self) -> int:
        return WARP * (self.epilogue + 2)

    @property
    def epilogue_threads(self) -> int:
        return WARP * self.epilogue

    @property
    def registers(self) -> int:
        """Registers each thread may have, one CTA on a multiprocessor: so many that no role needs another's
        (setmaxnreg moves registers between roles where 65536 / threads is less than 255; with 192 threads it is 341).
        """
        return min(MAX_REGISTERS, REGISTERS // self.threads // 8 * 8)


ROLES = Roles()

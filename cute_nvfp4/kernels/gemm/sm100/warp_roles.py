"""Which warp does what, and how many registers its threads may have."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import GemmConfig

WARP = 32
REGISTERS = 65536
"""Registers of a multiprocessor."""
MAX_REGISTERS = 255
"""Registers that one thread can name."""


WARPGROUP = 4
"""Warps that have a row of tensor memory a thread."""


@dataclass(frozen=True)
class Roles:
    """The warps of a CTA: first ``groups`` of four epilogue warps (warp w reads lanes 32·(w mod 4) … of tensor memory),
    which take the epilogue tiles in turn, then one that issues the MMAs and one that issues the loads."""

    groups: int = 1

    @property
    def epilogue(self) -> int:
        return WARPGROUP * self.groups

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
    def registers(self) -> int:
        """Registers each thread may have, one CTA on a multiprocessor: so many that no role needs another's (setmaxnreg
        moves registers between roles; with 192 threads 65536 / threads is 341, with 320 it is 204)."""
        return min(MAX_REGISTERS, REGISTERS // self.threads // 8 * 8)


def roles(config: GemmConfig) -> Roles:
    """Two groups where a gate is computed and threads store: the code of half of the epilogue tiles, with which the
    kernel stays in an SM's instruction cache from a launch to the next."""
    whole = config.split_k == 1 and config.scheduler == "static" and config.tile_n // config.epi_tile_n % 2 == 0
    return Roles(2 if config.products == 2 and config.store == "direct" and whole else 1)

"""The role of each warp, and the registers of its threads."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import GemmConfig

WARP = 32
REGISTERS = 65536
"""Registers of an SM."""
MAX_REGISTERS = 255
"""Registers that one thread can name."""


WARPGROUP = 4
"""Warps of a warpgroup, whose threads have one row of tensor memory each."""


@dataclass(frozen=True)
class Roles:
    """The warps of a CTA: ``groups`` warpgroups of the epilogue, which take epilogue tiles in turn (warp w reads lanes
    32·(w mod 4) … of tensor memory), then the warp that issues MMAs and the warp that issues loads."""

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
        """Registers of each thread with one CTA on an SM. No role needs another's registers, which setmaxnreg would
        move: with 192 threads 65536 / threads is 341, with 320 threads it is 204."""
        return min(MAX_REGISTERS, REGISTERS // self.threads // 8 * 8)


def roles(config: GemmConfig) -> Roles:
    """The roles for ``config``: two warpgroups of the epilogue where it computes a gate and threads store. Each then
    has the code of half of the epilogue tiles, and the kernel stays in an SM's instruction cache between launches."""
    whole = config.split_k == 1 and config.scheduler == "static" and config.tile_n // config.epi_tile_n % 2 == 0
    return Roles(2 if config.products == 2 and config.store == "direct" and whole else 1)

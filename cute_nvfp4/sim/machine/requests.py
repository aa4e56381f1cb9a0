"""What is fixed about a memory instruction before it runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction


@dataclass(frozen=True)
class Access:
    """``count`` elements of ``element`` bytes in ``space``; ``kind`` is "load", "store" or "atomic"; ``policy`` has the
    cache qualifiers as written. ``counted`` is false for a part of an access that is announced as a whole.
    ``constant``: a load of what the launch must not write (ld.global.nc, ldu)."""

    instruction: Instruction
    space: str
    element: int
    count: int
    kind: str
    policy: tuple[str, ...] = ()
    counted: bool = True
    constant: bool = False

    @property
    def total(self) -> int:
        return self.element * self.count


def displaced(address: np.ndarray, offset: int) -> np.ndarray:
    """``[address + offset]`` in the address's own width, where it may wrap."""
    return address + np.array(offset, np.int64).astype(address.dtype) if offset else address

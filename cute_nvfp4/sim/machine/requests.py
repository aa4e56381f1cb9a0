"""``Access``: the properties of a memory access that its instruction fixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction


@dataclass(frozen=True)
class Access:
    """A load, store or atomic of ``count`` elements for each lane."""

    instruction: Instruction
    space: str  #: the state space: "generic", "global", "shared", "cluster", "local" or "param"
    element: int  #: bytes of an element
    count: int  #: elements of a lane
    kind: str  #: "load", "store" or "atomic"
    policy: tuple[str, ...] = ()  #: the memory order with its scope, and the cache qualifiers, as written
    counted: bool = True  #: False for a part of an access that the event ``requested`` announces as a whole
    constant: bool = False  #: whether it loads memory that the launch must not write (ld.global.nc, ldu)

    @property
    def total(self) -> int:
        return self.element * self.count


def displaced(address: np.ndarray, offset: int) -> np.ndarray:
    """Returns ``address + offset`` in the width of ``address``, in which it may wrap."""
    return address + np.array(offset, np.int64).astype(address.dtype) if offset else address

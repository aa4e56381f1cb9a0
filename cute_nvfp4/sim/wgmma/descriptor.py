"""Matrix descriptors of wgmma (PTX ISA, "Matrix Descriptor Format" of asynchronous warpgroup matrices).

Strides and swizzles mean what they mean to ``tcgen05``, whose tables of chunks serve here too; the bits differ.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError, MatrixDescriptor

LAYOUTS = ("none", "128B", "64B", "32B")
_UNUSED = ~(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62) & (1 << 64) - 1
_SAME = np.uint64(~0x3FC0 & (1 << 64) - 1)


@lru_cache(maxsize=4096)
def decode(desc: int) -> MatrixDescriptor:
    """The fields of a 64-bit descriptor, without the start address (bits 13-0)."""
    if desc & _UNUSED:
        raise DescriptorError(
            f"matrix descriptor {desc:#018x}: bits {desc & _UNUSED:#x} mean nothing to wgmma and must be 0"
        )
    layout = LAYOUTS[desc >> 62]
    return MatrixDescriptor(layout, (desc >> 16 & 0x3FFF) << 4, (desc >> 32 & 0x3FFF) << 4, desc >> 49 & 7)


def alike(desc: np.ndarray) -> np.ndarray:
    """(k,) keys, equal where only the start address differs, by a multiple of 1024 bytes."""
    return desc & _SAME

"""Matrix descriptors of wgmma (PTX ISA, "Matrix Descriptor Format" of the asynchronous warpgroup instructions).

Their strides and swizzles have the same meaning as in tcgen05, whose tables of chunk numbers serve here too. The bit
positions of the fields differ.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError, MatrixDescriptor

LAYOUTS = ("none", "128B", "64B", "32B")  # swizzling modes by code (bits 63-62)
_UNUSED = ~(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62) & (1 << 64) - 1
_SAME = np.uint64(~0x3FC0 & (1 << 64) - 1)


@lru_cache(maxsize=4096)
def decode(desc: int) -> MatrixDescriptor:
    """Returns the fields of a 64-bit descriptor, except its start address (bits 13-0). Raises ``DescriptorError`` when
    unused bits are set."""
    if desc & _UNUSED:
        raise DescriptorError(
            f"matrix descriptor {desc:#018x}: bits {desc & _UNUSED:#x} mean nothing to wgmma and must be 0"
        )
    layout = LAYOUTS[desc >> 62]
    return MatrixDescriptor(layout, (desc >> 16 & 0x3FFF) << 4, (desc >> 32 & 0x3FFF) << 4, desc >> 49 & 7)


def alike(desc: np.ndarray) -> np.ndarray:
    """Returns keys (k,), which are equal for descriptors with equal fields and equal start addresses modulo 1024."""
    return desc & _SAME

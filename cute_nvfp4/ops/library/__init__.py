"""The public functions as operators of ``torch.library``: ``torch.ops.cute_nvfp4`` (docs/torch.md).

Importing this package registers all of them. It imports the public functions only where they are called: those ask
``by_operator`` first, and so import it.
"""

from __future__ import annotations

from . import fused, gated, grouped, packed, packed_groups, packed_groups_gradients, products, quantization

__all__ = [
    "fused",
    "gated",
    "grouped",
    "packed",
    "packed_groups",
    "packed_groups_gradients",
    "products",
    "quantization",
]

"""The public functions, one file an operation: what is its own. ``operation`` has what all of them are.

``from cute_nvfp4 import gemm`` and its like are the public names; the modules also have ``compile_…`` functions.
Whatever is imported of this room registers all operators of torch.
"""

from __future__ import annotations

from . import library

__all__ = ["library"]

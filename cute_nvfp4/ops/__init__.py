"""The operations: one file for each, and ``operation`` for what all of them share.

Users import the public names from the package, as in ``from cute_nvfp4 import gemm``; the modules here also have
``compile_…`` functions. Importing any of these modules registers all operators of torch.
"""

from __future__ import annotations

from . import library

__all__ = ["library"]

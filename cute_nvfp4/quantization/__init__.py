"""The quantization rules in torch: definitions of what the kernels compute. Nothing here launches a kernel.

The names are imported on first use, as the package's are.
"""

from __future__ import annotations

from ..lazy import lazy_names

_PUBLIC = {"Hadamard": "hadamard", "RULE_NAMES": "rules", "rules_of": "rules"}

__all__ = sorted(_PUBLIC)
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

"""The quantization rules in torch: definitions of what the kernels compute. Nothing here launches a kernel.

The names are imported on first use, as those of the package are.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Hadamard": "hadamard",
    "RULE_NAMES": "rules",
    "rules_of": "rules",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module '{__name__}' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

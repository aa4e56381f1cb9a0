"""Layers, training, calibration and checkpoints on top of the operations.

The names are imported on first use, as those of the package are.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "AmaxObserver": "calibration",
    "CheckpointLayer": "checkpoint",
    "LinearRecipe": "training",
    "NVFP4Linear": "linear",
    "fake_quantize": "training",
    "load_checkpoint": "checkpoint",
    "quantized_linear": "training",
    "read_checkpoint": "checkpoint",
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

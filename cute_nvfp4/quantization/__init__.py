"""From torch tensors to block-scaled operands: rules, calibration, training, layers and checkpoints.

The names are imported on first use, as those of the package are.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "AmaxObserver": "calibration",
    "CheckpointLayer": "checkpoint",
    "Hadamard": "hadamard",
    "LinearRecipe": "training",
    "NVFP4Linear": "linear",
    "RULE_NAMES": "rules",
    "dequantize": "api",
    "explain_backend": "api",
    "fake_quantize": "training",
    "load_checkpoint": "checkpoint",
    "quantize": "api",
    "quantized_linear": "training",
    "read_checkpoint": "checkpoint",
    "rules_of": "rules",
    "tensor_amax": "api",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'cute_nvfp4.quantization' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cute_nvfp4.quantization.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

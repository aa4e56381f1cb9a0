"""Layers, training, calibration and checkpoints on top of the operations.

The names are imported on first use, as those of the package are.
"""

from __future__ import annotations

from ..lazy import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

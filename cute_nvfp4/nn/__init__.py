"""Layers, training, calibration and checkpoints on top of the operations.

The names are imported on first use, as the package's are.
"""

from __future__ import annotations

from ..lazy import lazy_names

_PUBLIC = {
    "AmaxObserver": "calibration",
    "CheckpointLayer": "layouts",
    "LinearRecipe": "training",
    "ModelReport": "report",
    "ExpertParallel": "expert_parallel",
    "MXFP4Linear": "linear",
    "NVFP4ColwiseParallel": "parallel",
    "NVFP4Linear": "linear",
    "NVFP4RowwiseParallel": "parallel",
    "PeerSums": "peer_sums",
    "QuantizedModel": "whole_model",
    "fake_quantize": "training",
    "fuse_routers": "routers",
    "gptq": "gptq_rounding",
    "load_checkpoint": "checkpoint",
    "quantize_model": "whole_model",
    "quantized_linear": "training",
    "read_checkpoint": "checkpoint",
    "rotate_model": "rotation",
    "select_linears": "selection",
}

__all__ = sorted(_PUBLIC)
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

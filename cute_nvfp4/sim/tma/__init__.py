"""The copy engines: tensor maps, what a tensor copy touches, and the operations that move bytes."""

from __future__ import annotations

from cute_nvfp4.sim.tma.descriptor import Im2col, InvalidTensorMap, TensorMap

__all__ = ["Im2col", "InvalidTensorMap", "TensorMap"]

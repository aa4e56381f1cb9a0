"""The copy engines: tensor maps, the memory that a tensor copy accesses, and the copies themselves."""

from __future__ import annotations

from cute_nvfp4.sim.tma.descriptor import Im2col, InvalidTensorMap, TensorMap

__all__ = ["Im2col", "InvalidTensorMap", "TensorMap"]

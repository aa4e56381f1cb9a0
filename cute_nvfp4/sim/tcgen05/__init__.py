"""Blackwell's tensor core and tensor memory: pure functions and queued operations (PTX ISA, "tcgen05")."""

from __future__ import annotations

from cute_nvfp4.sim.machine.tensor_memory import TensorMemory
from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError
from cute_nvfp4.sim.tcgen05.mma import Mma, MmaRuns

__all__ = ["DescriptorError", "Mma", "MmaRuns", "TensorMemory"]

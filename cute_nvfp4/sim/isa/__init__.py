"""The instruction set, one file a chapter; importing the package fills the opcode table."""

from __future__ import annotations

from cute_nvfp4.sim.isa import bits, compare, control, floats, integer, memory
from cute_nvfp4.sim.isa.table import OPCODES

__all__ = ["OPCODES", "bits", "compare", "control", "floats", "integer", "memory"]

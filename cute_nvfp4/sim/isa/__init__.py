"""The instruction set, in one module for each topic of the PTX ISA. Importing the package fills the opcode table."""

from __future__ import annotations

from cute_nvfp4.sim.frontend.opcodes import OPCODES
from cute_nvfp4.sim.isa import (  # noqa: F401
    atomic,
    bits,
    calls,
    clc,
    cluster,
    compare,
    control,
    convert,
    copy,
    fence,
    floats,
    integer,
    matrix,
    mbarrier,
    memory,
    tcgen05,
    tensormap,
    warp,
    wgmma,
)

__all__ = ["OPCODES"]

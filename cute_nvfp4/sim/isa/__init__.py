"""The instruction set, one file a chapter; importing the package fills the opcode table."""

from __future__ import annotations

from cute_nvfp4.sim.isa import (
    atomic,
    bits,
    clc,
    cluster,
    compare,
    control,
    convert,
    copy,
    floats,
    integer,
    matrix,
    mbarrier,
    memory,
    warp,
)
from cute_nvfp4.sim.isa.table import OPCODES

__all__ = [
    "OPCODES",
    "atomic",
    "bits",
    "clc",
    "cluster",
    "compare",
    "control",
    "convert",
    "copy",
    "floats",
    "integer",
    "matrix",
    "mbarrier",
    "memory",
    "warp",
]

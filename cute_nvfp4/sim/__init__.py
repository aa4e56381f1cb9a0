"""A CPU simulator that executes the PTX of compiled CuTe DSL kernels.

``host`` runs the compiled host code and captures launches; ``Program.parse`` reads PTX; ``run`` executes a launch on
``GlobalMemory``.
"""

from __future__ import annotations

from cute_nvfp4.sim.counters import MemoryCounter, Result
from cute_nvfp4.sim.errors import (
    Deadlock,
    DivergentBarrier,
    InvalidLanes,
    LaunchError,
    Misaligned,
    OutOfBounds,
    PtxSyntaxError,
    ReadOnlyWrite,
    StepLimit,
    Trap,
    UnsupportedInstruction,
)
from cute_nvfp4.sim.executor import run
from cute_nvfp4.sim.host import HostModule, Launch
from cute_nvfp4.sim.program import Program
from cute_nvfp4.sim.regions import GlobalMemory

__all__ = [
    "Deadlock",
    "DivergentBarrier",
    "GlobalMemory",
    "HostModule",
    "InvalidLanes",
    "Launch",
    "LaunchError",
    "MemoryCounter",
    "Misaligned",
    "OutOfBounds",
    "Program",
    "PtxSyntaxError",
    "ReadOnlyWrite",
    "Result",
    "StepLimit",
    "Trap",
    "UnsupportedInstruction",
    "run",
]

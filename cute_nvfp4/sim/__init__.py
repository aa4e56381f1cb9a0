"""A CPU simulator that executes the PTX of compiled CuTe DSL kernels.

``host`` runs the compiled host code and captures launches; ``Program.parse`` reads PTX; ``run`` executes a launch on
``GlobalMemory``.
"""

from __future__ import annotations

from cute_nvfp4.sim.errors import (
    BrokenRule,
    CopiesInFlight,
    Deadlock,
    DivergentBarrier,
    Hazard,
    InvalidLanes,
    LaunchError,
    MbarrierMisuse,
    Misaligned,
    MissingProxyFence,
    OutOfBounds,
    PtxSyntaxError,
    Race,
    ReadOnlyWrite,
    ResidencyError,
    StepLimit,
    TensorMemoryError,
    Trap,
    UndefinedRegister,
    UninitializedRead,
    UnsupportedInstruction,
)
from cute_nvfp4.sim.host.module import HostModule
from cute_nvfp4.sim.machine.global_memory import GlobalMemory
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.schedule import Schedule, adversarial
from cute_nvfp4.sim.observe.l2 import L2Traffic
from cute_nvfp4.sim.observe.result import EngineCounter, MemoryCounter, MmaCounter, Result, WaitCounter
from cute_nvfp4.sim.observe.trace import Trace
from cute_nvfp4.sim.program import Program
from cute_nvfp4.sim.runner import run

__all__ = [
    "BrokenRule",
    "CopiesInFlight",
    "Deadlock",
    "DivergentBarrier",
    "EngineCounter",
    "GlobalMemory",
    "Hazard",
    "HostModule",
    "InvalidLanes",
    "L2Traffic",
    "Launch",
    "LaunchError",
    "MbarrierMisuse",
    "MemoryCounter",
    "Misaligned",
    "MissingProxyFence",
    "MmaCounter",
    "OutOfBounds",
    "Program",
    "PtxSyntaxError",
    "Race",
    "ReadOnlyWrite",
    "ResidencyError",
    "Result",
    "Schedule",
    "StepLimit",
    "TensorMemoryError",
    "Trace",
    "Trap",
    "UndefinedRegister",
    "UninitializedRead",
    "UnsupportedInstruction",
    "WaitCounter",
    "adversarial",
    "run",
]

"""A CPU simulator that executes the PTX of compiled CuTe DSL kernels.

``HostModule`` runs the compiled host code and captures its launches, ``Program.parse`` reads PTX, and ``run`` executes
one launch on the tensors of a ``GlobalMemory``.
"""

from __future__ import annotations

from cute_nvfp4.sim import errors
from cute_nvfp4.sim.errors import *  # noqa: F403 (all errors are public here)
from cute_nvfp4.sim.host.module import HostModule
from cute_nvfp4.sim.machine.global_memory import GlobalMemory
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.schedule import Schedule, adversarial, holding_back
from cute_nvfp4.sim.observe.l2 import L2Traffic
from cute_nvfp4.sim.observe.result import EngineCounter, MemoryCounter, MmaCounter, Result, WaitCounter
from cute_nvfp4.sim.observe.timing import Timing
from cute_nvfp4.sim.observe.trace import Trace
from cute_nvfp4.sim.program import Program
from cute_nvfp4.sim.runner import run

__all__ = [
    *(name for name, value in vars(errors).items() if isinstance(value, type)),
    "EngineCounter",
    "GlobalMemory",
    "HostModule",
    "L2Traffic",
    "Launch",
    "MemoryCounter",
    "MmaCounter",
    "Program",
    "Result",
    "Schedule",
    "Timing",
    "Trace",
    "WaitCounter",
    "adversarial",
    "holding_back",
    "run",
]

"""``outcome_of``: the verdict that an error of a simulated launch stands for."""

from __future__ import annotations

from cute_nvfp4.errors import SimError, TargetError
from cute_nvfp4.sim.errors import ClockError, PtxSyntaxError, UnsupportedInstruction


def outcome_of(error: BaseException) -> str:
    """Returns the outcome that ``error`` stands for: "hazard", "not modelled" or "internal error"."""
    if isinstance(error, (UnsupportedInstruction, PtxSyntaxError, ClockError, TargetError)):
        return "not modelled"
    return "hazard" if isinstance(error, SimError) else "internal error"

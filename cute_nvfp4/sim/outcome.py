"""What an error that stopped a launch means."""

from __future__ import annotations

from cute_nvfp4.errors import SimError, TargetError
from cute_nvfp4.sim.errors import ClockError, PtxSyntaxError, UnsupportedInstruction


def outcome_of(error: BaseException) -> str:
    """The outcome that ``error`` means: hazard, not modelled or internal error."""
    if isinstance(error, (UnsupportedInstruction, PtxSyntaxError, ClockError, TargetError)):
        return "not modelled"
    return "hazard" if isinstance(error, SimError) else "internal error"

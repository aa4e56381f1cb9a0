"""The hazards that stop a simulated kernel; every one names the instruction that caused it."""

from __future__ import annotations

from cute_nvfp4.errors import SimError


class PtxSyntaxError(SimError):
    """The PTX text cannot be read; the message has the line."""


class UnsupportedInstruction(SimError):
    """An opcode, modifier, operand or operand count that the simulator does not model."""


class OutOfBounds(SimError):
    """An access outside every registered tensor, outside shared memory, or straddling an end."""


class Misaligned(SimError):
    """An address that is not a multiple of the access size (PTX ISA, "Operand alignment")."""


class ReadOnlyWrite(SimError):
    """A store or atomic on a tensor that was registered with ``writable=False``."""


class DivergentBarrier(SimError):
    """A warp-aligned instruction that some of the lanes it names can never reach."""


class Deadlock(SimError):
    """Every live warp waits, and nothing that could release one is left to run."""


class StepLimit(SimError):
    """The kernel used up its budget of executed blocks: it probably never ends."""


class Trap(SimError):
    """The kernel executed ``trap``."""


class LaunchError(SimError):
    """The host code asked for something a GPU would refuse, or that could not be captured."""


class InvalidLanes(SimError):
    """A warp-wide instruction whose member mask leaves out a lane that executes it."""

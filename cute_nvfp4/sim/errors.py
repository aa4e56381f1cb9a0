"""The errors that refuse or stop a simulated kernel; the message of a hazard names the instruction that caused it."""

from __future__ import annotations

from cute_nvfp4.errors import SimError


class PtxSyntaxError(SimError):
    """The PTX text cannot be parsed; the message names the line."""


class UnsupportedInstruction(SimError):
    """An opcode, modifier, operand or operand count that the simulator does not model."""


class OutOfBounds(SimError):
    """An access to bytes outside every registered tensor, or outside the shared, local or parameter memory."""


class Misaligned(SimError):
    """An address that is not a multiple of the access size (PTX ISA, "Operand alignment")."""


class ReadOnlyWrite(SimError):
    """A store to, or an atomic on, a tensor that was registered with ``writable=False``."""


class DivergentBarrier(SimError):
    """An instruction that lanes must execute together, and that some of these lanes can never reach."""


class Deadlock(SimError):
    """Every live warp waits, and no warp or asynchronous operation is left that could release one."""


class StepLimit(SimError):
    """A wave used up its budget of executed blocks or instructions: the kernel probably never ends."""


class Trap(SimError):
    """The kernel executed ``trap``."""


class LaunchError(SimError):
    """A launch or host code asks for something that a GPU would refuse, or that the simulator does not model."""


class InvalidLanes(SimError):
    """A warp-wide instruction that the wrong lanes execute: lanes are missing, or not in its member mask."""


class Hazard(SimError):
    """A hazard that a check found: the kernel may be wrong on a GPU even if this run computed the right results."""


class Race(Hazard):
    """Two accesses to the same bytes, at least one of them a write, that no synchronisation orders."""


class MissingProxyFence(Hazard):
    """Data that ordinary stores write and another proxy reads without a proxy fence (``fence.proxy``) between."""


class UninitializedRead(Hazard):
    """A read of shared or tensor memory that nobody has written, whose value the kernel depends on."""


class MbarrierMisuse(Hazard):
    """An mbarrier that is used before ``mbarrier.init`` or after ``mbarrier.inval``, or whose counts overflow."""


class BarrierMisuse(Hazard):
    """A named barrier that does not exist, whose participants name different thread counts, or where a warp may join
    the wrong phase."""


class TensorMemoryError(Hazard):
    """Tensor memory that is used without an allocation or in a forbidden way, freed wrongly, or never freed."""


class CopiesInFlight(Hazard):
    """A CTA ends while an asynchronous operation on its memory is still under way."""


class ResidencyError(Hazard):
    """CTAs that wait for CTAs which cannot be resident with them, or a cooperative launch that the GPU cannot hold."""


class BrokenRule(Hazard):
    """Code that breaks a rule of the PTX ISA, found in the code alone, without executing it (``checks.static``)."""


class UndefinedRegister(Hazard):
    """A register that was never written decides an address, a branch or a stored value."""


class ClockError(SimError):
    """The clock lacks a tool, a figure of its machine, or machine code that it can match with the PTX."""

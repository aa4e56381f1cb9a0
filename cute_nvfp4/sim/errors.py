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


class Hazard(SimError):
    """What a check found: the kernel may be wrong on a GPU even if this run gave the right numbers."""


class Race(Hazard):
    """Two accesses to the same bytes, at least one a write, that nothing orders."""


class MissingProxyFence(Hazard):
    """Data written by ordinary stores and read by the asynchronous proxy without ``fence.proxy.async`` between."""


class UninitializedRead(Hazard):
    """Shared or tensor memory that is read and that nobody has written."""


class MbarrierMisuse(Hazard):
    """An mbarrier used before ``mbarrier.init`` or after its end, or whose counts overflow."""


class BarrierMisuse(Hazard):
    """A named barrier whose participants disagree on their number, or of which a warp may come to the wrong phase."""


class TensorMemoryError(Hazard):
    """Tensor memory that is used without being allocated, freed wrongly, or never freed."""


class CopiesInFlight(Hazard):
    """A CTA ends while an asynchronous operation on its memory is still under way."""


class ResidencyError(Hazard):
    """CTAs that wait for others which the GPU cannot hold at the same time, or a launch that no GPU could hold."""


class BrokenRule(Hazard):
    """Code that breaks a rule of the ISA which no execution need show (``checks.static``)."""


class UndefinedRegister(Hazard):
    """A register that was never written decides an address, a branch or what is stored."""


class ClockError(SimError):
    """The clock lacks a tool, a figure of the machine, or code that it can lay beside the PTX."""

"""Whether a launch does the same under every schedule, read off one run of it.

A kernel whose warps meet at barriers and mbarriers only, and whose memory accesses are all ordered, is a net of
processes that may run in any order and give one result, if three things hold of what causes what (a vector clock of
all that is signalled, whether or not it orders memory):

* who asks for a phase of an mbarrier by its parity knows that the phase before has ended: an older phase of the same
  parity cannot be meant, however early the warp comes;
* the next phase cannot end before everybody who asks for this one has seen it: however late the warp comes, the parity
  still tells of this one;
* who arrives, or has bytes arrive, knows that the phase before has ended: the arrival counts in no other phase. So
  with named barriers.

Then any other run executes the same instructions with the same values. Say it is the first instruction that differs:
its warp has come there as in this run, and what it reads is the same, for all accesses to the same bytes are ordered
(the checks of this run say so); a wait sees the same phase, and a phase ends by the same arrivals. Nor can another run
stop: of the instructions that are left, one has only instructions before it that were executed, and nothing takes back
an arrival. What the checks find depends on that order alone, so they find the same. Lanes of a warp count as one, as
schedules have them, where they wait for the same (``lanes``). What decides more than that (atomics, polled memory,
clocks, work handed out) is a doubt where it is executed; allocation of tensor memory and of registers is not followed.

A flag, a word of global memory that is zero or not, is such a barrier too where all that reads it is a loop that goes
round while it is zero (``flag_polls``): its writes are its phases. They turn it by turns, and each writer knows of the
write before; who is let through knows of the last zero, so that it can have meant no older write; who makes it zero
knows of all that were let through. One CTA's knowledge of barriers says nothing in another cluster: of what a flag
brings from there, flags alone are kept.

    causes = Determined()
    run(program, launch, memory, others=[causes])
    assert not causes.doubts

``simulating(others=[causes])`` does so for launches of the package's operations.
"""

from __future__ import annotations

from collections.abc import Iterable

from cute_nvfp4.sim.equivalence.causes import Causes
from cute_nvfp4.sim.equivalence.flags import flag_polls, undecided
from cute_nvfp4.sim.equivalence.lanes import Lanes
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.schedule import Schedule, adversarial
from cute_nvfp4.sim.machine.wave import Wave

__all__ = ["FIRST", "Determined", "schedules"]

FIRST = 1, 6, 5
"""Of the adversarial schedules those that come first: engines late, roles late, all at random. What the checks do not
see, they show; and where a kernel asks whether it must wait, the answer is no in one and yes in another."""


def schedules(count: int) -> list[Schedule]:
    """``adversarial``, those of ``FIRST`` first."""
    every = adversarial(count)
    first = [i for i in FIRST if i < count]
    return [every[i] for i in (*first, *(i for i in range(count) if i not in first))]


class Determined:
    """A client of the machine's events that judges one run of one launch, or of several.

    ``doubts`` has the reasons why another schedule might do something else; where it stays empty, and the checks have
    found nothing, every schedule does what this run did.
    """

    def __init__(self) -> None:
        self.doubts: set[str] = set()

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        """The listeners that follow a wave; the machine asks for them."""
        lanes = Lanes(wave, self.doubts, flag_polls(wave.run.kernel))
        causes = Causes(wave, self.doubts, undecided(wave.run.kernel), lanes)
        # elsewhere lanes part for no other reason than the schedule
        return [lanes, causes] if wave.run.schedule.warps == "together" else [causes]

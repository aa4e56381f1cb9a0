"""Decides from one run of a launch whether every schedule gives the same result.

A kernel may synchronise by barriers and mbarriers only, and order all its memory accesses. It is then a network of
processes that may run in any order and give one result, if three conditions hold. "Knows" refers in them to a vector
clock of everything that is signalled, whether or not the signal orders memory.

* A warp that tests a phase of an mbarrier by its parity knows that the previous phase has completed. However early the
  warp comes, the parity cannot mean an older phase.
* The next phase cannot complete before every warp that tests this phase has seen it. However late a warp comes, the
  parity still means this phase.
* A warp that arrives, or whose copy completes bytes, knows that the previous phase has completed. The arrival counts in
  no other phase. The same holds for named barriers.

Then any other run executes the same instructions with the same values. Consider the first instruction that differs. Its
warp has come to it as in this run, and it reads the same values, because all accesses to the same bytes are ordered
(the checks of this run say so). A wait sees the same phase, and the same arrivals complete a phase. Another run cannot
stop earlier: among the remaining instructions, one depends only on executed ones, and nothing takes back an arrival.
The findings of the checks depend on that order alone, so they are the same too. The lanes of a warp count as one where
they wait for the same event (``lanes``). An instruction by which more than barriers decides (atomics, polled memory,
clocks, work distribution) is a doubt where it is executed. Allocation of tensor memory and registers is left out.

A flag is a word of global memory that is zero or not. It counts as such a barrier if only loops that repeat while it is
zero read it (``flag_polls``); its writes are its phases. Writes alternate between zero and other values, and each
writer knows of the previous write. A reader that goes on knows of the last zero, so it cannot have seen an older write.
A writer of zero knows of all readers that went on. Components of barriers have a meaning only in their cluster, so from
another cluster a flag brings knowledge of flags only.

    causes = Determined()
    run(program, launch, memory, others=[causes])
    assert not causes.doubts

``simulating(others=[causes])`` does the same for launches of the package's operations.
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
"""The adversarial schedules to run first: late engines, late roles, everything at random. They show faults that the
checks do not find, and between them a test of whether to wait has both answers."""


def schedules(count: int) -> list[Schedule]:
    """Returns the schedules of ``adversarial(count)``, those of ``FIRST`` first."""
    every = adversarial(count)
    first = [i for i in FIRST if i < count]
    return [every[i] for i in (*first, *(i for i in range(count) if i not in first))]


class Determined:
    """A client of the machine's events that judges one run of one launch, or of several.

    ``doubts`` has the reasons why another schedule might give another result. If it stays empty and the checks find
    nothing, every schedule gives the result of this run.
    """

    def __init__(self) -> None:
        self.doubts: set[str] = set()

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        """Returns the listeners that follow ``wave``."""
        lanes = Lanes(wave, self.doubts, flag_polls(wave.run.kernel))
        causes = Causes(wave, self.doubts, undecided(wave.run.kernel), lanes)
        # under other schedules, lanes may separate only because of the schedule
        return [lanes, causes] if wave.run.schedule.warps == "together" else [causes]

"""Where the launches of a session run: in its own process, unless its maker has another place for them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from cute_nvfp4.sim.machine.global_memory import GlobalMemory, Region
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.observe.overlap import Overlap
from cute_nvfp4.sim.observe.result import Result
from cute_nvfp4.sim.observe.touched import Runs
from cute_nvfp4.sim.program import Program
from cute_nvfp4.sim.runner import run

Timeline = Hashable
"""Names the order of work that a launch belongs to: a stream, or one of a graph."""


class Issued(NamedTuple):
    """A launch as it was issued: ``what`` names it; it is work ``number`` of ``timeline``."""

    what: str
    timeline: Timeline
    number: int


class Uses(Protocol):
    """Which bytes a launch has touched."""

    def runs(self) -> Iterator[tuple[Region, bool, Runs]]:
        """(tensor, whether it is written, which bytes)."""
        ...


class Execution(Protocol):
    """What runs a session's launches."""

    def __call__(
        self, program: Program, launch: Launch, memory: GlobalMemory, issued: Issued, compare: bool, options: Any
    ) -> tuple[Result, Uses | None]:
        """The result of one launch and, to ``compare`` it with what other streams do, what it touched.

        ``options`` are those of ``sim.run``, which says what is raised.
        """
        ...


@dataclass
class Here:
    """Runs launches in this process; remembers those of each timeline that may still run when the next one begins."""

    _overlaps: dict[Timeline, tuple[int, Overlap]] = field(default_factory=dict)

    def __call__(
        self, program: Program, launch: Launch, memory: GlobalMemory, issued: Issued, compare: bool, options: Any
    ) -> tuple[Result, Uses | None]:
        if not compare:
            return run(program, launch, memory, **options), None
        earlier, touched = self._overlap(issued).begin(launch, issued.what, memory)
        others = [touched, *options.get("others", ())]
        return run(program, launch, memory, **{**options, "others": others, "earlier": earlier}), touched

    def _overlap(self, issued: Issued) -> Overlap:
        """The launches on the timeline before this one; other work between keeps them from overlapping it."""
        last, overlap = self._overlaps.get(issued.timeline, (0, Overlap()))
        overlap = overlap if issued.number == last + 1 else Overlap()
        self._overlaps[issued.timeline] = issued.number, overlap
        return overlap

"""``Execution``, what runs the launches of a session, and ``Here``, which runs them in the session's own process."""

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
"""The key of an ordered sequence of work that a launch belongs to: a stream, or a captured stream of a graph."""


class Issued(NamedTuple):
    """The place of a launch in the order of issue."""

    what: str  #: the name of the launch in messages
    timeline: Timeline
    number: int  #: the position of the launch on its timeline, from 1


class Uses(Protocol):
    """The bytes of global memory that a launch has read and written."""

    def runs(self) -> Iterator[tuple[Region, bool, Runs]]:
        """Yields (tensor, whether the bytes are written, the bytes)."""
        ...


class Execution(Protocol):
    """A callable that runs the launches of a session."""

    def __call__(
        self, program: Program, launch: Launch, memory: GlobalMemory, issued: Issued, compare: bool, options: Any
    ) -> tuple[Result, Uses | None]:
        """Runs one launch; returns its result and, if ``compare`` is true, the bytes that it touched, else None.

        ``compare`` says whether to check the launch against earlier launches and other streams. ``options`` are the
        keyword arguments of ``sim.run``, whose errors are raised here too.
        """
        ...


@dataclass
class Here:
    """Runs launches in this process, and remembers for each timeline which launches the next one may overlap."""

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
        """Returns the launches that this one may overlap: none if other work was issued on the timeline between."""
        last, overlap = self._overlaps.get(issued.timeline, (0, Overlap()))
        overlap = overlap if issued.number == last + 1 else Overlap()
        self._overlaps[issued.timeline] = issued.number, overlap
        return overlap

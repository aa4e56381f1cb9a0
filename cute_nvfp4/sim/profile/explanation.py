"""A kernel line by line: its Python, the PTX of each line of Python, the SASS of each PTX instruction, their costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cute_nvfp4.sim.clock.timing import code_of
from cute_nvfp4.sim.errors import ClockError
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.observe.result import Result
from cute_nvfp4.sim.observe.timing import Cost
from cute_nvfp4.sim.profile.facts import Facts
from cute_nvfp4.sim.profile.hot_spots import place, python_text, summed
from cute_nvfp4.sim.profile.records import HotSpot
from cute_nvfp4.sim.program import Program


@dataclass(frozen=True)
class Row:
    """A line of Python, PTX or SASS, and its cost. ``id`` names it. ``of`` is the ``id`` of the line in the layer above
    that it was compiled from; it is "" for Python, and where the compiler names no such line."""

    id: str
    of: str
    cost: HotSpot


@dataclass(frozen=True)
class Explanation:
    """The lines of a launch's kernel, and their costs.

    ``clock`` is the machine that times are modelled on, "" for none. ``microseconds`` is the modelled time without what
    the host's launch costs, None without a clock. ``instructions`` counts the PTX instructions that warps issued.
    ``python`` is in the order of files and lines, ``ptx`` and ``sass`` in that of the code. ``sass`` is empty where
    ptxas or nvdisasm is missing; ``notes`` say so.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    clock: str
    microseconds: float | None
    instructions: int
    python: tuple[Row, ...]
    ptx: tuple[Row, ...]
    sass: tuple[Row, ...]
    notes: tuple[str, ...]

    def below(self, layer: str, row: Row) -> Iterator[Row]:
        """Yields the lines of a ``layer`` ("ptx", "sass") that were compiled from ``row`` of the layer above."""
        return (other for other in getattr(self, layer) if other.of == row.id)

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as a dictionary for JSON."""
        return asdict(self)


def explain(program: Program, launch: Launch, result: Result) -> Explanation:
    """Returns the lines of a launch's kernel, from the ``result`` of a run with counters, and with a clock if any."""
    facts, timing = Facts(program, launch, result), result.timing
    notes = list(facts.notes())
    lines = summed(facts, lambda n: facts.code[n].loc, lambda i: (place(i), python_text(i.loc)))
    if (without := lines.pop("", None)) is not None:
        notes.append(f"the compiler tells no line of Python for {without.share:.1%} of the cost")
    python = [Row(loc, "", cost) for loc, cost in sorted(lines.items(), key=lambda item: _file_and_line(item[0]))]
    instructions = summed(facts, lambda n: n, lambda i: (str(i.line), i.text))
    ptx = [Row(f"ptx{n}", facts.code[n].loc, cost) for n, cost in instructions.items()]
    return Explanation(
        launch.kernel,
        launch.grid,
        launch.block,
        launch.cluster,
        timing.machine if timing else "",
        timing.cycles / timing.cycles_per_us if timing else None,
        result.instructions,
        tuple(python),
        tuple(ptx),
        tuple(_sass(facts, notes)),
        tuple(notes),
    )


def _file_and_line(loc: str) -> tuple[str, int]:
    path, _, line = loc.rpartition(":")
    return path, int(line)


def _sass(facts: Facts, notes: list[str]) -> Iterator[Row]:
    """Yields the SASS, with its costs if there is a clock. Where there is no SASS, ``notes`` get the reason."""
    if facts.timing is not None:
        code: tuple[Cost, ...] = facts.timing.code
    else:
        try:
            listing = code_of(facts.program, facts.kernel).listing
        except ClockError as error:
            notes.append(f"PTX alone, no SASS: {error}")
            return
        code = tuple(Cost(s.address, s.text, s.source, 0, 0, {}, "", 0) for s in listing)
    for cost in code:
        share = cost.cycles / facts.warp_cycles if facts.timing else 0.0
        parts = {"stalls": cost.stalls} | cost.lost if cost.cycles else {}
        parts = {reason: cycles / facts.warp_cycles for reason, cycles in parts.items() if cycles}
        parts = dict(sorted(parts.items(), key=lambda item: -item[1]))
        of = f"ptx{cost.source}" if 0 <= cost.source < len(facts.code) else ""
        spot = HotSpot(f"{cost.address:04x}", cost.text, share, facts.timing is not None, 0, cost.issued, 0, parts)
        yield Row(f"sass{cost.address:x}", of, spot)

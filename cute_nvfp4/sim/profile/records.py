"""The records of a profile. Each value says where it is from: none is made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

COUNTED, MODELLED, NOT_MODELLED = "counted", "modelled", "not modelled"
SCHEMA = 1
"""Of ``Profile.to_dict``; grows when a key changes its meaning."""


@dataclass(frozen=True)
class Metric:
    """A value by the name that Nsight Compute gives it, or ours where it has none.

    ``source``: "counted" (exact: of the executed launch, or of its machine code), "modelled" (by the clock or the model
    of L2), or "not modelled", where ``value`` is None.
    """

    name: str
    unit: str
    value: int | float | str | None
    source: str


@dataclass(frozen=True)
class Section:
    """A section of the details page."""

    name: str
    metrics: tuple[Metric, ...]


@dataclass(frozen=True)
class HotSpot:
    """What one line of Python, or one PTX instruction, costs. ``share`` is of the time of all warps where ``modelled``,
    else of the executed instructions; ``reasons`` has its parts, "stalls" for issue and fixed latencies. ``executed``
    are PTX instructions of warps (counted), ``issued`` those of the machine code (modelled), ``bytes`` what they asked
    for of global and shared memory."""

    where: str
    text: str
    share: float
    modelled: bool
    executed: int
    issued: float
    bytes: int
    reasons: dict[str, float]


@dataclass(frozen=True)
class Saving:
    """What would make the launch faster: ``what`` costs time, in words; ``advice`` what to do; ``where`` the line that
    loses most by it, "" for none. ``microseconds`` are modelled, None where there is no clock; ``basis`` says how:
    "replay" (the launch again on a machine without it) or "share" (at most this, of what it takes)."""

    what: str
    advice: str
    where: str
    microseconds: float | None
    share: float
    basis: str


@dataclass(frozen=True)
class Profile:
    """One launch. ``python`` and ``ptx`` are the hot spots by line, the most first; ``savings`` the three things that
    would save most; ``clock`` the machine that times are modelled on, "" for none."""

    kernel: str
    device: str
    capability: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    stream: int
    clock: str
    sections: tuple[Section, ...]
    python: tuple[HotSpot, ...]
    ptx: tuple[HotSpot, ...]
    savings: tuple[Saving, ...]
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, Metric]]:
        """Every metric with the name of its section."""
        for section in self.sections:
            for metric in section.metrics:
                yield section.name, metric

    def value(self, name: str, section: str = "") -> int | float | str | None:
        """The value of a metric; the first of that name, or that of a ``section``. Raises ``KeyError`` for no such."""
        for of, metric in self.rows():
            if metric.name == name and section in ("", of):
                return metric.value
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the number of its schema."""
        return {"schema": SCHEMA} | asdict(self)

    def text(self) -> str:
        """The page as ``ncu --page details`` prints one."""
        from cute_nvfp4.sim.profile.written import text

        return text([self])

    def csv(self) -> str:
        """The rows that ``ncu --csv --page details`` prints, with a column for where each value is from."""
        from cute_nvfp4.sim.profile.written import csv_text

        return csv_text([self])

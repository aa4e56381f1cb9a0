"""The records of a profile. Each value says where it is from: none is made up."""

from __future__ import annotations

from dataclasses import dataclass

COUNTED, MODELLED, NOT_MODELLED = "counted", "modelled", "not modelled"


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

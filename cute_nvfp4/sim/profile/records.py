"""The records of a profile. Each value says where it is from."""

from __future__ import annotations

from dataclasses import dataclass

COUNTED, MODELLED, NOT_MODELLED = "counted", "modelled", "not modelled"


@dataclass(frozen=True)
class Metric:
    """A value under Nsight Compute's name for it, or a name of ours where Nsight Compute has none.

    ``source`` is "counted" (exact, from the executed launch or its machine code), "modelled" (by the clock or the
    model of L2), or "not modelled", where ``value`` is None.
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
    """The cost of a line of Python, a PTX instruction, or a SASS instruction.

    ``where`` and ``text`` name the line. ``share`` is its share of the time of all warps where ``modelled``, else its
    share of the executed instructions. ``executed`` counts the PTX instructions that warps issued (counted), ``issued``
    the SASS instructions (modelled). ``bytes`` counts what they asked for of global, shared and tensor memory.
    ``reasons`` has the parts of a modelled share, "stalls" for issue and fixed latencies.
    """

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
    """A cost that could be saved.

    ``what`` names the cost, and ``advice`` says what to do. ``where`` is the line that loses most by it, "" for none.
    ``microseconds`` is the modelled saving, None without a clock. ``share`` is its share of the launch's time, or of
    what was counted. ``basis`` says how the saving was found: "replay" (the launch was replayed on a machine where the
    cost is lower) or "share" (an upper bound, without a replay).
    """

    what: str
    advice: str
    where: str
    microseconds: float | None
    share: float
    basis: str

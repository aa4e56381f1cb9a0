"""``Timing``: the modelled time of a launch, as the clock gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Wait(NamedTuple):
    """A warp waited from ``begin`` to ``end`` because of ``reason``; ``source`` is the PTX instruction that waited."""

    begin: float
    end: float
    reason: str
    source: int


@dataclass(frozen=True)
class Timing:
    """A modelled time. ``microseconds`` is what two events around the launch would show, ``launch_us`` of it an empty
    kernel's; ``cycles`` are from the first CTA's start to the last one's end.

    ``lost`` has the share of the warps' time that each reason cost: "issue" (another warp was issuing, or a pipe was
    busy), "l2", "dram", "shared", "copies", "barrier", "mbarrier", "tensor" and so on; "stalls" is the rest, which is
    issue itself and the fixed latencies of the code. ``busy`` has the share of the time that L2 and DRAM worked and
    schedulers issued. ``bounds_us`` is the analytic roofline: what each would take alone, at full rate.
    ``coverage``: the share of the machine "code" that can be issued, and of the "events" (accesses, copies, arrivals)
    that found their instruction in it.
    """

    machine: str
    microseconds: float
    launch_us: float
    cycles: float
    lost: dict[str, float]
    busy: dict[str, float]
    bounds_us: dict[str, float]
    replayed_sms: int
    instructions: int
    waits: tuple[tuple[int, int, Wait], ...]
    coverage: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def bound_by(self) -> str:
        """The largest of what cost the warps time."""
        return max(sorted(self.lost), key=self.lost.__getitem__)

    @property
    def roofline_us(self) -> float:
        return self.launch_us + max(self.bounds_us.values())

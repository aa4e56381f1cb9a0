"""``Timing``: the modelled time of a launch, as the clock gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Wait(NamedTuple):
    """A warp waited from ``begin`` to ``end`` because of ``reason``; ``source`` is the PTX instruction that waited."""

    begin: float
    end: float
    reason: str
    source: int


class Phase(NamedTuple):
    """A part of a launch, in microseconds from the start of its first CTA; what cost the replayed warps most of it, and
    what share."""

    begin: float
    end: float
    bound_by: str
    share: float


class WarpTime(NamedTuple):
    """When a replayed warp of a CTA ran, in cycles; ``role`` is what it does besides computing."""

    cta: int
    warp: int
    role: str
    begin: float
    end: float


class Cost(NamedTuple):
    """What one instruction of the machine code costs in a launch, in cycles of warps; ``text`` is it as nvdisasm writes
    it, ``source`` the index of its PTX instruction (-1 for none). ``issued`` is by how many warps and how often,
    ``stalls`` the fixed latency behind it, of which the issue is a cycle, ``lost`` what warps have waited for before or
    at it, by reason ("mbarrier: copies" and "mbarrier: tensor" where those came last). Its ``pipe`` is busy for
    ``busy`` cycles of a scheduler. Replayed warps stand for all."""

    address: int
    text: str
    source: int
    issued: float
    stalls: float
    lost: dict[str, float]
    pipe: str
    busy: float

    @property
    def cycles(self) -> float:
        """All of the warps' time that it costs."""
        return self.stalls + sum(self.lost.values())


class SmTime(NamedTuple):
    """One replayed SM, which stands for ``weight``: cycles in which it had a warp, cycles of its warps, those of them
    before the first instruction of a warp can be issued, and how many instructions it has issued."""

    weight: float
    active: float
    warp_cycles: float
    start: float
    issued: int


GAINS = {
    "DRAM twice as fast": {"dram.bytes_per_cycle": 2.0, "dram.written_bytes_per_cycle": 2.0},
    "L2 twice as fast": {"l2.bytes_per_cycle": 2.0, "l2.to_sm": 2.0},
    "memory's latency halved": {f"{at}.latency_{p}": 0.5 for at in ("l2", "dram") for p in (10, 50, 90, 99, 100)},
    "arithmetic twice as fast": {f"interval.{pipe}": 0.5 for pipe in ("alu", "heavy", "lite", "xu", "fp64")},
    "tensor cores twice as fast": {
        **{f"mma.{name}.interval": 0.5 for name in ("HMMA.16", "HMMA.8", "IMMA.32")},
        **{f"wgmma.{name}": 0.5 for name in ("column", "a_ss", "a_rs", "b_column")},
        **{f"tcgen05.column_{ctas}_{rows}": 0.5 for ctas in (1, 2) for rows in (64, 128)},
    },
    "shared memory twice as fast": {"shared.cycles_per_pass": 0.5, "shared.latency": 0.5},
    "no bank conflicts": {"shared.conflict_passes": 0.0},
    "barriers at no cost": {f"{at}.wake": 0.0 for at in ("barrier", "mbarrier")},
    "code and parameters in caches": {"fetch.cycles_per_line": 0.0, "constant.cycles_per_line": 0.0},
}
"""What ``Timing.gains`` tries: figures of the machine, and by what they are multiplied."""


@dataclass(frozen=True)
class Timing:
    """A modelled time. ``microseconds`` is what two events around the launch would show, ``launch_us`` of it what a
    launch costs; ``launch_from`` says where that figure is from, as hosts differ by more than a microsecond. ``cycles``
    are from the first CTA's start to the last one's end.

    ``lost`` has the share of the warps' time that each reason cost: "issue" (another warp was issuing), "pipe" (it was
    busy), "l2", "dram", "shared", "copies", "barrier", "mbarrier", "tensor" and so on; "stalls" is the rest, which is
    issue itself and the fixed latencies of the code. ``busy`` has the share of the time that L1's unit, L2 and DRAM
    worked and schedulers issued, ``pipes`` that of each pipe. ``bytes`` went through L2, were read from and written to
    DRAM, asked for by loads of global memory, and held by L1. ``bounds_us`` is the analytic roofline: what each would
    take alone, at full rate. ``coverage``: the share of the machine "code" that can be issued, and of the "events"
    (accesses, copies, arrivals) that found their instruction in it. ``code`` has what each instruction of the machine
    code costs, in its order, ``sms`` the SMs that were replayed; ``limits`` are the CTAs an SM has room for, by what
    limits them.
    """

    machine: str
    microseconds: float
    launch_us: float
    launch_from: str
    cycles: float
    lost: dict[str, float]
    busy: dict[str, float]
    bounds_us: dict[str, float]
    replayed_sms: int
    instructions: int
    waits: tuple[tuple[int, int, Wait], ...]
    coverage: dict[str, float]
    warps: tuple[WarpTime, ...]
    cycles_per_us: float
    again: Callable[[Mapping[str, float]], float] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    pipes: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    registers: int = 0
    limits: dict[str, int] = field(default_factory=dict)
    code: tuple[Cost, ...] = field(default=(), repr=False)
    sms: tuple[SmTime, ...] = field(default=(), repr=False)

    @property
    def bound_by(self) -> str:
        """The largest of what cost the warps time."""
        return max(sorted(self.lost), key=self.lost.__getitem__)

    def phases(self, count: int = 4) -> tuple[Phase, ...]:
        """The launch in ``count`` parts of one length: of each, what its warps waited for longest (waits of 40 cycles
        and more), "issue" where they ran, or "tail" where most had not begun or had ended."""
        out, length = [], self.cycles / count
        for k in range(count):
            low, high = k * length, (k + 1) * length
            spent: dict[str, float] = {}
            for _, _, wait in self.waits:
                spent[wait.reason] = spent.get(wait.reason, 0.0) + _overlap(wait.begin, wait.end, low, high)
            alive = sum(_overlap(w.begin, w.end, low, high) for w in self.warps)
            spent |= {"issue": alive - sum(spent.values()), "tail": len(self.warps) * length - alive}
            most = max(sorted(spent), key=spent.__getitem__)
            out.append(Phase(self._us(low), self._us(high), most, spent[most] / (len(self.warps) * length)))
        return tuple(out)

    def gains(self) -> dict[str, float]:
        """Microseconds that each of ``GAINS`` would save, the most first. Each is a replay of its own."""
        saved = {name: self.microseconds - self.again(factors) for name, factors in GAINS.items()}
        return dict(sorted(saved.items(), key=lambda item: -item[1]))

    def events(self, launch: int = 0, name: str = "") -> list[dict[str, Any]]:
        """The time line in the Trace Event Format: a process is a CTA, its threads are warps; what they wait for lies
        under their own bars. Times are modelled microseconds from the start of the launch."""
        out: list[dict[str, Any]] = []
        for w in self.warps:
            at = {"pid": 1000 * launch + w.cta + 1, "tid": w.warp + 1}
            out.append({"ph": "M", "name": "process_name", **at, "args": {"name": f"{name} CTA {w.cta} (modelled)"}})
            role = f"warp {w.warp}" + (f", {w.role}" if w.role else "")
            out.append({"ph": "M", "name": "thread_name", **at, "args": {"name": role}})
            out.append({"ph": "X", "name": "runs", **at, "ts": self._us(w.begin), "dur": self._us(w.end - w.begin)})
        for cta, warp, wait in self.waits:
            at = {"pid": 1000 * launch + cta + 1, "tid": warp + 1, "args": {"PTX instruction": wait.source}}
            out.append(
                {
                    "ph": "X",
                    "name": wait.reason,
                    **at,
                    "ts": self._us(wait.begin),
                    "dur": self._us(wait.end - wait.begin),
                }
            )
        return out

    def _us(self, cycles: float) -> float:
        return round(cycles / self.cycles_per_us, 4)

    @property
    def roofline_us(self) -> float:
        return self.launch_us + max(self.bounds_us.values())


def _overlap(begin: float, end: float, low: float, high: float) -> float:
    return max(0.0, min(end, high) - max(begin, low))

"""The record of a launch's modelled time, which ``clock.timing.Clock`` fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Wait(NamedTuple):
    """A wait of one warp, in cycles from the start of the launch's first CTA."""

    begin: float
    end: float
    reason: str  # a key of ``Timing.lost``
    source: int  # index of the PTX instruction that waits


class Phase(NamedTuple):
    """A stretch of a launch, from ``begin`` to ``end`` in microseconds from the start of the first CTA. ``bound_by`` is
    the reason that cost the replayed warps most time in it, ``share`` the fraction of their time that it cost."""

    begin: float
    end: float
    bound_by: str
    share: float


class WarpTime(NamedTuple):
    """When a replayed warp ran, in cycles from the start of the launch's first CTA."""

    cta: int  # index of its CTA in the grid
    warp: int  # index of the warp in its CTA
    role: str  # asynchronous work that it issues: "copies", "tensor", "copies and tensor", or "" for none
    begin: float
    end: float


class Cost(NamedTuple):
    """The cost of one SASS instruction in a launch. Counts and cycles are sums over all warps of the launch: each
    replayed warp counts as often as its SM's weight says. In ``lost``, "mbarrier: copies" and "mbarrier: tensor" are
    waits that a copy or the tensor core ended, and "mbarrier" those that a thread ended."""

    address: int  # byte offset in the kernel's code
    text: str  # the instruction as nvdisasm writes it
    source: int  # index of its PTX instruction, -1 for none
    issued: float  # how often warps issue it
    stalls: float  # cycles of its stall count: the issue (one cycle), and the fixed latency until the next instruction
    lost: dict[str, float]  # cycles that warps wait before it or at it, by reason
    pipe: str  # the pipe that executes it, "" for an instruction that is never issued
    busy: float  # cycles for which it keeps that pipe of one scheduler busy

    @property
    def cycles(self) -> float:
        """The time of warps that the instruction costs."""
        return self.stalls + sum(self.lost.values())


class SmTime(NamedTuple):
    """The time of one replayed SM. Cycles and counts are those of this SM alone."""

    weight: float  # how many SMs of the GPU it stands for
    active: float  # cycles in which it held at least one warp
    warp_cycles: float  # cycles of its warps, summed
    start: float  # the part of ``warp_cycles`` before a warp can issue its first instruction
    issued: int  # instructions that its warps issued


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
    "barriers at no cost": dict.fromkeys(("barrier.wake", "mbarrier.wake", "cluster.barrier"), 0.0),
    "code and parameters in caches": {"fetch.cycles_per_line": 0.0, "constant.cycles_per_line": 0.0},
}
"""The changes that ``Timing.gains`` tries: the figures of the machine that change, and the factor of each."""


@dataclass(frozen=True)
class Timing:
    """The modelled time of a launch on ``machine``.

    ``microseconds`` is the time that two events around the launch would show. ``launch_us`` is the part of it that the
    host's launch costs, and ``launch_from`` the source of that figure: hosts differ by more than a microsecond.
    ``cycles`` count from the start of the first CTA to the end of the last one.
    ``lost`` is the share of the warps' time that each reason cost: "issue" (another warp was issuing), "pipe" (the pipe
    was busy), "l2", "dram", "shared", "copies", "barrier", "mbarrier", "tensor" and others. The rest of their time is
    the issue itself and the fixed latencies of the code.
    ``busy`` is the share of ``cycles`` in which "l1", "l2" and "dram" worked, and schedulers issued ("issue").
    ``bounds_us`` is the analytic roofline: the time of "dram" and of "issue" alone, at full rate.
    ``replayed_sms`` SMs issued ``instructions`` in the replay.
    ``waits`` are the replayed warps' waits of at least 40 cycles: (CTA, warp, wait); ``warps`` says when the warps ran.
    ``coverage`` has the share of the "code" that the replay can issue, and the share of the "events" (accesses, copies,
    arrivals) that found their instruction in the code.
    ``again`` returns the microseconds of one more replay, with figures of the machine multiplied by factors.
    ``notes`` say what may make the time wrong.
    ``pipes`` is the share of ``cycles`` in which each pipe is busy.
    ``bytes`` counts bytes through "l2", "dram_read" and "dram_written", those that loads of global memory "asked" for,
    and those of them that L1 "held".
    ``registers`` are those of a thread; ``limits`` are the CTAs that an SM has room for under each limit alone.
    ``code`` is the cost of each SASS instruction, in the order of the code; ``sms`` are the times of the replayed SMs.
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
        """The reason that cost the warps most time."""
        return max(sorted(self.lost), key=self.lost.__getitem__)

    def phases(self, count: int = 4) -> tuple[Phase, ...]:
        """Returns ``count`` stretches of equal length. A stretch is bound by what its warps waited for longest (in
        waits of at least 40 cycles), by "issue" where they mostly ran, or by "tail" where most had not begun or had
        ended."""
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
        """Returns the microseconds that each change of ``GAINS`` would save, the most first. Each takes a replay."""
        saved = {name: self.microseconds - self.again(factors) for name, factors in GAINS.items()}
        return dict(sorted(saved.items(), key=lambda item: -item[1]))

    def events(self, launch: int = 0, name: str = "") -> list[dict[str, Any]]:
        """Returns the time line in the Trace Event Format, in modelled microseconds from the start of the first CTA. A
        process is a CTA, and a thread is a warp, whose waits lie under its bar. ``launch`` numbers the launches of a
        file; ``name`` is part of the processes' names."""
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
        """The least that the roofline allows: ``launch_us`` and the largest of ``bounds_us``."""
        return self.launch_us + max(self.bounds_us.values())


def _overlap(begin: float, end: float, low: float, high: float) -> float:
    return max(0.0, min(end, high) - max(begin, low))

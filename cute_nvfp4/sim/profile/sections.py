"""The sections of Nsight Compute's details page, filled with the facts of a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cute_nvfp4.sim.machine.cluster import MAX_CLUSTER
from cute_nvfp4.sim.machine.multiprocessor import SHARED_RESERVED
from cute_nvfp4.sim.profile.facts import SCHEDULERS, Facts
from cute_nvfp4.sim.profile.records import COUNTED, MODELLED, NOT_MODELLED, Metric, Section

STALLS = {
    **dict.fromkeys(("l1", "l2", "dram", "memory"), "Long Scoreboard"),
    **dict.fromkeys(("shared", "alu", "heavy", "lite", "fp64", "xu", "uniform", "lsu", "control"), "Short Scoreboard"),
    **{"issue": "Not Selected", "pipe": "Math Pipe Throttle", "barrier": "Barrier", "fence": "Membar"},
    **{"fetch": "No Instruction", "constants": "IMC Miss"},
}
"""Nsight Compute's names for stalls, by the clock's reasons. Other reasons keep their names: "Stall mbarrier",
"Stall mbarrier: copies", "Stall mbarrier: tensor", "Stall copies", "Stall tensor", "Stall cluster" and so on."""


def sections(facts: Facts) -> tuple[Section, ...]:
    """Returns all sections, in the order of the page."""
    return tuple(Section(name, tuple(fill(facts))) for name, fill in _SECTIONS.items())


def _modelled(facts: Facts, name: str, unit: str, value: Callable[[], float]) -> Metric:
    """Returns a metric of the clock, which is "not modelled" without one."""
    if facts.timing is None:
        return Metric(name, unit, None, NOT_MODELLED)
    return Metric(name, unit, value(), MODELLED)


def _counted(name: str, unit: str, value: float | str | None) -> Metric:
    return Metric(name, unit, value, NOT_MODELLED if value is None else COUNTED)


def _missing(name: str, unit: str) -> Metric:
    return Metric(name, unit, None, NOT_MODELLED)


def _speed_of_light(facts: Facts) -> Iterator[Metric]:
    t = facts.timing
    yield _missing("DRAM Frequency", "Ghz")
    yield _modelled(facts, "SM Frequency", "Ghz", lambda: t.cycles_per_us / 1000)
    yield _modelled(facts, "Elapsed Cycles", "cycle", lambda: t.cycles)
    yield _modelled(facts, "Memory Throughput", "%", lambda: 100 * max(t.busy[name] for name in ("l1", "l2", "dram")))
    yield _modelled(facts, "DRAM Throughput", "%", lambda: 100 * t.busy["dram"])
    yield _modelled(facts, "Duration", "us", lambda: t.cycles / t.cycles_per_us)
    yield _modelled(facts, "L1/TEX Cache Throughput", "%", lambda: 100 * t.busy["l1"])
    yield _modelled(facts, "L2 Cache Throughput", "%", lambda: 100 * t.busy["l2"])
    yield _modelled(facts, "SM Active Cycles", "cycle", lambda: facts.active / facts.sms)
    yield _modelled(facts, "Compute (SM) Throughput", "%", lambda: 100 * max(t.busy["issue"], *t.pipes.values(), 0.0))


def _compute(facts: Facts) -> Iterator[Metric]:
    t = facts.timing
    yield _modelled(facts, "Executed Ipc Active", "inst/cycle", lambda: facts.issued / facts.active)
    yield _modelled(facts, "Executed Ipc Elapsed", "inst/cycle", lambda: facts.issued / facts.whole)
    yield _modelled(facts, "Issue Slots Busy", "%", lambda: 100 * facts.issued / (SCHEDULERS * facts.active))
    yield _modelled(facts, "Issued Ipc Active", "inst/cycle", lambda: facts.issued / facts.active)
    yield _modelled(
        facts, "SM Busy", "%", lambda: 100 * max(t.busy["issue"], *t.pipes.values(), 0.0) * _of_active(facts)
    )
    for pipe, share in (t.pipes if t else {}).items():
        yield Metric(f"Pipe {pipe}", "%", 100 * share * _of_active(facts), MODELLED)
    for mma in facts.result.mma:
        yield _counted(f"{mma.kind} Instructions", "inst", mma.operations)
        yield _counted(f"{mma.kind} Multiply-Adds", "", mma.multiply_adds)


def _of_active(facts: Facts) -> float:
    """Returns the factor from a share of the elapsed cycles to one of the active cycles."""
    return facts.whole / facts.active


def _memory(facts: Facts) -> Iterator[Metric]:
    t, counted = facts.timing, facts.counted
    moved = lambda: t.bytes["dram_read"] + t.bytes["dram_written"]  # noqa: E731
    yield _modelled(facts, "Memory Throughput", "Gbyte/s", lambda: moved() / (t.cycles / t.cycles_per_us) / 1000)
    yield _modelled(facts, "Mem Busy", "%", lambda: 100 * max(t.busy["l1"], t.busy["l2"]))
    yield _modelled(facts, "Max Bandwidth", "%", lambda: 100 * max(t.busy["l2"], t.busy["dram"]))
    asked = t is not None and t.bytes["asked"]
    hit = _modelled(facts, "L1/TEX Hit Rate", "%", lambda: 100 * t.bytes["held"] / asked if asked else 0.0)
    yield hit
    through = t is not None and t.bytes["l2"]
    dram = lambda: t.bytes["dram_read"] / through if through else 0.0  # noqa: E731
    yield _modelled(facts, "L2 Hit Rate", "%", lambda: 100 * max(0.0, 1 - dram()))
    yield _missing("L2 Compression Success Rate", "%")
    yield _modelled(facts, "Mem Pipes Busy", "%", lambda: 100 * t.pipes.get("lsu", 0.0))
    yield _modelled(facts, "DRAM Bytes Read", "byte", lambda: t.bytes["dram_read"])
    yield _modelled(facts, "DRAM Bytes Written", "byte", lambda: t.bytes["dram_written"])
    for kind in ("load", "store", "atomic"):
        of = [m for m in facts.result.memory if m.space == "global" and m.kind == kind]
        requests, sectors = sum(m.requests for m in of), sum(m.sectors for m in of)
        yield _counted(f"Global {kind.title()} Requests", "request", requests if counted else None)
        yield _counted(f"Global {kind.title()} Sectors", "sector", sectors if counted else None)
        if requests:
            yield _counted(f"Global {kind.title()} Sectors Per Request", "sector/request", sectors / requests)
            bytes_ = sum(m.bytes for m in of)
            yield _counted(f"Global {kind.title()} Bytes Per Sector", "byte/sector", bytes_ / sectors)
    shared = [m for m in facts.result.memory if m.space in ("shared", "cluster")]
    yield _counted("Shared Requests", "request", sum(m.requests for m in shared) if counted else None)
    yield _counted("Shared Passes", "pass", sum(m.passes for m in shared) if counted else None)
    yield _counted("Shared Bank Conflicts", "pass", facts.result.bank_conflicts if counted else None)
    copies = [e for e in facts.result.engines if e.engine in ("tma", "store", "copy")]
    yield _counted("Asynchronous Copies", "inst", sum(e.operations for e in copies) if counted else None)
    yield _counted("Asynchronous Bytes Read", "byte", sum(e.global_read for e in copies) if counted else None)
    yield _counted("Asynchronous Bytes Written", "byte", sum(e.global_written for e in copies) if counted else None)


def _scheduler(facts: Facts) -> Iterator[Metric]:
    slots = lambda: SCHEDULERS * facts.active  # noqa: E731
    eligible = lambda: facts.issued + facts.reasons.get("issue", 0.0)  # noqa: E731
    yield _modelled(facts, "One or More Eligible", "%", lambda: 100 * facts.issued / slots())
    yield _modelled(facts, "Issued Warp Per Scheduler", "", lambda: facts.issued / slots())
    yield _modelled(facts, "No Eligible", "%", lambda: 100 - 100 * facts.issued / slots())
    yield _modelled(facts, "Active Warps Per Scheduler", "warp", lambda: facts.warp_cycles / slots())
    yield _modelled(facts, "Eligible Warps Per Scheduler", "warp", lambda: eligible() / slots())


def stalls(facts: Facts) -> dict[str, float]:
    """Returns the cycles of warps by the name of their stall. Their sum is ``facts.warp_cycles``."""
    out = {"Selected": facts.issued, "Wait": facts.reasons["stalls"] - facts.issued, "start of a CTA": facts.start}
    for reason, cycles in facts.reasons.items():
        if reason != "stalls":
            name = STALLS.get(reason, reason)
            out[name] = out.get(name, 0.0) + cycles
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def _warp_state(facts: Facts) -> Iterator[Metric]:
    each = lambda: facts.warp_cycles / facts.issued  # noqa: E731
    yield _modelled(facts, "Warp Cycles Per Issued Instruction", "cycle", each)
    yield _modelled(facts, "Warp Cycles Per Executed Instruction", "cycle", each)
    threads = facts.result.thread_instructions / facts.result.instructions if facts.counted else None
    yield _counted("Avg. Active Threads Per Warp", "", threads)
    yield _missing("Avg. Not Predicated Off Threads Per Warp", "")
    for name, cycles in (stalls(facts) if facts.timing else {}).items():
        if cycles:
            yield Metric(f"Stall {name}", "cycle", cycles / facts.issued, MODELLED)


def _instructions(facts: Facts) -> Iterator[Metric]:
    schedulers = SCHEDULERS * facts.sms
    for kind in ("Executed", "Issued"):
        yield _modelled(facts, f"Avg. {kind} Instructions Per Scheduler", "inst", lambda: facts.issued / schedulers)
        yield _modelled(facts, f"{kind} Instructions", "inst", lambda: facts.issued)
    yield _counted("Executed PTX Instructions", "inst", facts.result.instructions)
    for klass, count in sorted(facts.result.classes.items(), key=lambda item: -item[1]):
        yield _counted(f"Executed PTX Instructions, {klass}", "inst", count)


def _launch(facts: Facts) -> Iterator[Metric]:
    launch = facts.launch
    yield _counted("Block Size", "", facts.threads)
    size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    yield _counted("Cluster Size", "", size)
    yield _counted("Grid Size", "", facts.ctas)
    yield _counted("Registers Per Thread", "register/thread", facts.registers or None)
    yield _missing("Shared Memory Configuration Size", "Kbyte")
    yield _counted("Driver Shared Memory Per Block", "byte/block", SHARED_RESERVED)
    yield _counted("Dynamic Shared Memory Per Block", "byte/block", launch.dynamic_smem)
    yield _counted("Static Shared Memory Per Block", "byte/block", facts.static_shared)
    yield _counted("# SMs", "SM", facts.sms)
    yield _counted("Threads", "thread", facts.ctas * facts.threads)
    waves = facts.ctas / (facts.sms * facts.ctas_per_sm)
    yield _counted("Waves Per SM", "", waves if facts.limits["registers"] else None)


def _occupancy(facts: Facts) -> Iterator[Metric]:
    launch, most = facts.launch, facts.sm.threads // 32
    size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    if size > 1:
        clusters = facts.device.max_active_clusters(size, facts.ctas_per_sm)
        yield Metric("Max Active Clusters", "cluster", clusters, MODELLED)
        yield _counted("Max Cluster Size", "block", MAX_CLUSTER)
    yield _missing("Block Limit Barriers", "block")
    names = {"sm": "SM", "registers": "Registers", "shared": "Shared Mem", "warps": "Warps"}
    for key, name in names.items():
        yield _counted(f"Block Limit {name}", "block", facts.limits[key])
    resident = facts.ctas_per_sm * facts.warps_of_cta if facts.limits["registers"] else None
    yield _counted("Theoretical Active Warps per SM", "warp", resident)
    yield _counted("Theoretical Occupancy", "%", None if resident is None else 100 * resident / most)
    yield _modelled(facts, "Achieved Occupancy", "%", lambda: 100 * facts.warp_cycles / facts.active / most)
    yield _modelled(facts, "Achieved Active Warps Per SM", "warp", lambda: facts.warp_cycles / facts.active)


def _source_counters(facts: Facts) -> Iterator[Metric]:
    branches = sum(count for name, count in facts.result.opcodes.items() if name.split(".")[0] in ("bra", "brx"))
    yield _counted("Branch Instructions Ratio", "", branches / max(1, facts.result.instructions))
    yield _counted("Branch Instructions", "inst", branches)
    yield _missing("Branch Efficiency", "%")
    yield _missing("Avg. Divergent Branches", "")


_SECTIONS: dict[str, Callable[[Facts], Iterator[Metric]]] = {
    "GPU Speed Of Light Throughput": _speed_of_light,
    "Compute Workload Analysis": _compute,
    "Memory Workload Analysis": _memory,
    "Scheduler Statistics": _scheduler,
    "Warp State Statistics": _warp_state,
    "Instruction Statistics": _instructions,
    "Launch Statistics": _launch,
    "Occupancy": _occupancy,
    "Source Counters": _source_counters,
}

"""The costs whose saving would gain most: what replays say of each, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cute_nvfp4.sim.profile.facts import Facts
from cute_nvfp4.sim.profile.hot_spots import by_python
from cute_nvfp4.sim.profile.records import HotSpot, Saving

MOST, LEAST = 3, 0.01
"""How many savings a profile has, and the smallest share of the time that is worth telling."""
_UNEVEN, _WASTED = 1.05, 1.1


@dataclass(frozen=True)
class Tried:
    """A change of ``Timing.gains`` in words: what costs the time, what to do, and the reasons of the waits that it
    shortens."""

    what: str
    advice: str
    reasons: tuple[str, ...]


TRIED = {
    "DRAM twice as fast": Tried(
        "DRAM's bandwidth: half of its bytes",
        "DRAM works {dram:.0%} of the time: read each byte once, keep what is used again in L2 or shared memory, store "
        "narrower types.",
        ("dram", "copies", "mbarrier: copies"),
    ),
    "L2 twice as fast": Tried(
        "bytes from L2: half of them",
        "L2 works {l2:.0%} of the time: larger tiles, multicast in a cluster, or L1 bring fewer bytes to the SMs.",
        ("l2", "copies", "mbarrier: copies"),
    ),
    "memory's latency halved": Tried(
        "waiting for answers of memory: half of its latency",
        "Ask earlier and for more at once: more stages, more loads in flight for each warp, more CTAs on an SM.",
        ("l2", "dram", "memory", "copies", "mbarrier: copies"),
    ),
    "arithmetic twice as fast": Tried(
        "arithmetic: half of it",
        "The busiest pipe is {pipe} with {pipe_share:.0%}: fewer, packed or cheaper instructions, or another pipe.",
        ("pipe", "issue", "alu", "heavy", "lite", "xu", "fp64"),
    ),
    "tensor cores twice as fast": Tried(
        "products: half of them",
        "Tensor cores work {tensor:.0%} of the time: narrower operands, larger tiles, or no padding of M and N.",
        ("tensor", "tensor memory", "mbarrier: tensor"),
    ),
    "shared memory twice as fast": Tried(
        "shared memory: half of its passes and latency",
        "Read wider (ld.shared.v4, ldmatrix), keep in registers what is read again, or load the next values before.",
        ("shared",),
    ),
    "no bank conflicts": Tried(
        "bank conflicts of shared memory",
        "{conflicts} are lost to conflicts: pad or swizzle the layout, so that a request's lanes meet different banks.",
        ("shared",),
    ),
    "barriers at no cost": Tried(
        "what barriers cost by themselves",
        "Meet less often: longer stages, fewer warps at a barrier, arrivals by one elected thread.",
        ("barrier", "mbarrier", "cluster"),
    ),
    "code and parameters in caches": Tried(
        "fetching code and parameters",
        "The code has {code:,} bytes: unroll less, and keep rare paths out of the way of what runs first.",
        ("fetch", "constants"),
    ),
}
"""The changes in words, by their names in ``timing.GAINS``."""


def savings(facts: Facts) -> tuple[Saving, ...]:
    """Returns the largest savings, three at most. Those without a replay come last, since they are bounds. Without a
    clock they are shares of what was counted, and say nothing of time."""
    found = sorted(_timed(facts) if facts.timing else _counted(facts), key=lambda s: -s.share)
    bounds = [s for s in found if s.basis == "share"][:MOST]
    replayed = [s for s in found if s.basis == "replay"]
    return (*replayed[: MOST - len(bounds[:1])], *bounds)[:MOST]


def _timed(facts: Facts) -> Iterator[Saving]:
    t = facts.timing
    duration = t.cycles / t.cycles_per_us
    spots, words = by_python(facts, None), _words(facts)
    for name, saved in t.gains().items():
        if saved >= LEAST * duration:
            tried = TRIED[name]
            where = _worst(spots, tried.reasons)
            yield Saving(tried.what, tried.advice.format(**words), where, saved, saved / duration, "replay")
    if facts.counted and (factors := _useless_sectors(facts)):
        saved, useful = t.microseconds - t.again(factors), 1 / factors["l2.to_sm"]
        if saved >= LEAST * duration:
            what = "sectors of which lanes use a part"
            advice = f"Loads use {useful:.0%} of the bytes that they fetch: neighbouring lanes want neighbouring bytes."
            yield Saving(what, advice, _most_wasted(facts), saved, saved / duration, "replay")
    if (saving := _uneven(facts, duration)) is not None:
        yield saving


def _words(facts: Facts) -> dict[str, object]:
    """Returns the figures of the launch that fill the gaps in the advice of ``TRIED``."""
    t, shared = facts.timing, [m for m in facts.result.memory if m.passes]
    arithmetic = {name: t.pipes.get(name, 0.0) for name in ("alu", "heavy", "lite", "xu", "fp64")}
    pipe = max(sorted(arithmetic), key=arithmetic.__getitem__)
    passes = sum(m.passes for m in shared)
    conflicts = f"{facts.result.bank_conflicts:,} of {passes:,} passes" if passes else "passes"
    out = {name: t.busy[name] for name in ("dram", "l2")} | {"tensor": t.pipes.get("tensor", 0.0)}
    return out | {"pipe": pipe, "pipe_share": arithmetic[pipe], "conflicts": conflicts, "code": 16 * len(t.code)}


def _worst(spots: tuple[HotSpot, ...], reasons: tuple[str, ...]) -> str:
    """Returns the line that loses most by ``reasons``, "" if none does."""
    lost = {spot.where: sum(spot.reasons.get(reason, 0.0) for reason in reasons) for spot in spots}
    most = max(lost, key=lost.__getitem__, default="")
    return most if most and lost[most] > 0 else ""


def _useless_sectors(facts: Facts) -> Mapping[str, float]:
    """Returns by which factors L2, its links and DRAM would be faster if loads fetched only what their lanes ask for;
    nothing if loads waste little. DRAM wastes only bytes that no lane asks for, in sectors that some lane asks for."""
    loads = [m for m in facts.result.memory if m.space == "global" and m.kind == "load"]
    fetched, asked = 32 * sum(m.sectors for m in loads), sum(m.bytes for m in loads)
    if not asked or fetched < _WASTED * asked:
        return {}
    factors = dict.fromkeys(("l2.bytes_per_cycle", "l2.to_sm"), fetched / asked)
    return factors | {"dram.bytes_per_cycle": max(1.0, facts.result.distinct_bytes.get("load", 0) / asked)}


def _most_wasted(facts: Facts) -> str:
    """Returns the line whose loads waste most bytes."""
    loads = [m for m in facts.result.memory if m.space == "global" and m.kind == "load"]
    worst = max(loads, key=lambda m: 32 * m.sectors - m.bytes)
    return worst.loc.rpartition("/")[2] or f"PTX:{worst.line}"


def _uneven(facts: Facts, duration: float) -> Saving | None:
    """Returns what an even distribution of work over the SMs would save at most, None if that is little. It is not more
    than the largest bound of the roofline leaves."""
    t = facts.timing
    longest, mean = max(sm.active for sm in t.sms), facts.active / facts.sms
    saved = min(longest - mean, t.cycles - t.cycles_per_us * max(t.bounds_us.values())) / t.cycles_per_us
    work = [sm.issued for sm in t.sms]  # their time is chance where they wait for memory
    if max(work) < _UNEVEN * facts.issued / facts.sms or saved < LEAST * duration:
        return None
    busy, waves = min(facts.ctas, facts.sms), facts.ctas / (facts.sms * facts.ctas_per_sm)
    advice = f"{facts.ctas:,} CTAs make {waves:.2f} waves"
    advice += f" and leave {facts.sms - busy} of {facts.sms} SMs without work" if busy < facts.sms else ""
    advice += ": smaller tiles, split-K, or a persistent kernel that shares the work."
    return Saving("SMs with less work than others", advice, "", saved, saved / duration, "share")


def _counted(facts: Facts) -> Iterator[Saving]:
    passes = sum(m.passes for m in facts.result.memory)
    if facts.result.bank_conflicts > LEAST * passes:
        share = facts.result.bank_conflicts / passes
        worst = max(facts.result.memory, key=lambda m: m.conflicts)
        advice = TRIED["no bank conflicts"].advice
        told = advice.format(conflicts=f"{facts.result.bank_conflicts:,} of {passes:,} passes")
        where = worst.loc.rpartition("/")[2] or f"PTX:{worst.line}"
        yield Saving("Bank conflicts of shared memory", told, where, None, share, "share")
    if factors := _useless_sectors(facts):
        useful = 1 / factors["l2.to_sm"]
        told = f"Loads use {useful:.0%} of the bytes that they fetch: neighbouring lanes want neighbouring bytes."
        yield Saving("Sectors of which lanes use a part", told, _most_wasted(facts), None, 1 - useful, "share")
    spots = by_python(facts, 1)
    if spots:
        (spot,) = spots
        told = f"One line executes {spot.share:.0%} of {facts.result.instructions:,} warp instructions."
        yield Saving("Instructions", told, spot.where, None, spot.share, "share")

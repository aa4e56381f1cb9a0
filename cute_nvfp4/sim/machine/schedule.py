"""When things happen: which warps go first, and when the asynchronous engines do what they were asked.

A GPU promises little about either, so a kernel must be right under every schedule. The default one is fast: warps of
many CTAs stay together, and engines work when nothing else can. The others look for trouble.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from cute_nvfp4.errors import OperandError, explain

POLICIES = ("batch", "eager", "lazy", "random")
WARPS = ("together", "random", "late", "held")
_DRAWN = WARPS[:3]


@dataclass(frozen=True)
class Schedule:
    """One way to interleave a launch; equal schedules give equal runs.

    ``tma`` (bulk and tensor loads), ``store`` (bulk stores and reductions), ``tensor`` (tcgen05 work) and ``copy``
    (cp.async) each have a policy: "batch" works when no warp can go on, and then does all there is; "eager" works at
    once; "lazy" does one operation, and only when nothing else in the CTAs can move; "random" works at random moments
    in a random order. ``warps`` is "together" (warps at the same place run as one) or "random" (they are split and
    picked at random, and ``mbarrier.try_wait`` sometimes fails although it could succeed, which the ISA allows), or
    "late" (as together, but who is furthest in the program goes first: roles that stand early in it come late), or
    "held" (warp ``seed`` of each CTA, counted round, goes on only when nothing else can, engines included).
    """

    seed: int = 0
    warps: str = "together"
    tma: str = "batch"
    store: str = "batch"
    tensor: str = "batch"
    copy: str = "batch"

    def __post_init__(self) -> None:
        for name in ("tma", "store", "tensor", "copy"):
            if getattr(self, name) not in POLICIES:
                raise OperandError(explain(f"schedule {name}", got=getattr(self, name), expected=" or ".join(POLICIES)))
        if self.warps not in WARPS:
            raise OperandError(explain("schedule warps", got=self.warps, expected=" or ".join(WARPS)))

    def policy(self, engine: str) -> str:
        return getattr(self, engine)

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in asdict(self).items())

    @staticmethod
    def parse(text: str) -> Schedule:
        """Reads ``"seed=3,tma=lazy"``; what is not named keeps its default. Raises ``OperandError``."""
        given: dict[str, object] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            known = Schedule.__dataclass_fields__
            if key not in known or not value or (key == "seed" and not value.lstrip("-").isdigit()):
                raise OperandError(
                    explain(f"schedule {text!r}", got=repr(part), expected=f"name=value with a name of {sorted(known)}")
                )
            given[key] = int(value) if key == "seed" else value
        return Schedule(**given)  # type: ignore[arg-type]


def holding_back(warps: int) -> list[Schedule]:
    """A schedule for each of a CTA's ``warps``, which holds that warp back beyond all others."""
    return [Schedule(n, warps="held", tma="eager", store="eager", tensor="eager", copy="eager") for n in range(warps)]


def adversarial(count: int, seed: int = 0) -> list[Schedule]:
    """``count`` schedules that look for trouble: the extremes first, then random ones."""
    extremes = [
        Schedule(seed),
        Schedule(seed, tma="lazy", store="lazy", tensor="lazy", copy="lazy"),
        Schedule(seed, tma="eager", store="eager", tensor="eager", copy="eager"),
        Schedule(seed, tma="eager", store="lazy", tensor="lazy", copy="lazy"),
        Schedule(seed, tma="lazy", store="lazy", tensor="eager", copy="eager"),
        Schedule(seed, warps="random", tma="random", store="random", tensor="random", copy="random"),
        Schedule(seed, warps="late", tma="eager", store="eager", tensor="eager", copy="eager"),
    ]
    out = extremes[:count]
    pick = random.Random(seed)
    while len(out) < count:
        names = {n: pick.choice(("eager", "lazy", "random")) for n in ("tma", "store", "tensor", "copy")}
        out.append(Schedule(pick.randrange(1 << 30), warps=pick.choice(_DRAWN), **names))
    return out

"""Schedules: which warps run first, and when the asynchronous engines run their operations.

A GPU promises little about either, so a kernel must be right under every schedule. The default schedule is fast: warps
of many CTAs stay together, and engines run when no warp can. The others look for hazards.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass

from cute_nvfp4.errors import OperandError, explain

POLICIES = ("batch", "eager", "lazy", "random")
WARPS = ("together", "random", "late", "held")
_DRAWN = WARPS[:3]


@dataclass(frozen=True)
class Schedule:
    """One way to interleave the warps and engines of a launch; equal schedules give equal runs.

    ``warps`` says which warps run first:

    * "together": warps at the same block run as one group, and the group in the lowest block runs first.
    * "random": groups are split and picked at random, and ``mbarrier.try_wait`` sometimes fails although the phase is
      over, which the ISA allows.
    * "late": as "together", but the group in the highest block runs first, so roles whose code comes early run late.
    * "held": warp ``seed`` (modulo the number of warps) of each CTA runs only when no other warp and no engine can.

    Each engine has a policy: "batch" runs all queued operations when no warp can go on; "eager" runs each operation
    before the next block of a warp; "lazy" runs one operation when no warp can go on; "random" runs operations at
    random moments in a random order. While warps go on, which may only poll, batch engines still get a turn every 64
    steps, lazy engines every 1024, and held warps every 4096. Raises ``OperandError`` for other words.
    """

    seed: int = 0  #: the seed of the random choices, and the held warp
    warps: str = "together"
    tma: str = "batch"  #: the policy of bulk and tensor copies to shared memory
    store: str = "batch"  #: the policy of bulk and tensor copies and reductions to global memory
    tensor: str = "batch"  #: the policy of tcgen05 operations
    copy: str = "batch"  #: the policy of cp.async

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
        """Parses a text such as ``"seed=3,tma=lazy"``, with defaults for what it does not name. Raises
        ``OperandError``."""
        given: dict[str, object] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            known = Schedule.__dataclass_fields__
            if key not in known or not value or (key == "seed" and not re.fullmatch("-?[0-9]+", value)):
                raise OperandError(
                    explain(f"schedule {text!r}", got=repr(part), expected=f"name=value with a name of {sorted(known)}")
                )
            given[key] = int(value) if key == "seed" else value
        return Schedule(**given)  # type: ignore[arg-type]


def holding_back(warps: int) -> list[Schedule]:
    """Returns a schedule for each of the ``warps`` warps of a CTA, which runs that warp only when nothing else can."""
    return [Schedule(n, warps="held", tma="eager", store="eager", tensor="eager", copy="eager") for n in range(warps)]


def adversarial(count: int, seed: int = 0) -> list[Schedule]:
    """Returns ``count`` schedules that look for hazards: the extremes first, then random ones that ``seed`` decides."""
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

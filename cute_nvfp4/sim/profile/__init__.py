"""The profile of a simulated launch: the details page of Nsight Compute, filled from counters and the clock."""

from __future__ import annotations

from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.observe.result import Result
from cute_nvfp4.sim.profile.explanation import Explanation, explain
from cute_nvfp4.sim.profile.facts import Facts
from cute_nvfp4.sim.profile.hot_spots import by_ptx, by_python
from cute_nvfp4.sim.profile.page import Profile
from cute_nvfp4.sim.profile.records import HotSpot, Metric, Saving, Section
from cute_nvfp4.sim.profile.savings import savings
from cute_nvfp4.sim.profile.sections import sections
from cute_nvfp4.sim.program import Program

__all__ = ["Explanation", "HotSpot", "Metric", "Profile", "Saving", "Section", "explain", "profile"]


def profile(program: Program, launch: Launch, result: Result) -> Profile:
    """Returns the profile of a launch that has ended with ``result``.

    Without a clock the modelled values are missing, and without counters all counts but those of instructions
    (``run(counters=True, clock=…)``).
    """
    facts = Facts(program, launch, result)
    return Profile(
        kernel=launch.kernel,
        device=facts.device.name,
        capability=".".join(map(str, facts.device.capability)),
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        stream=launch.stream,
        clock=facts.timing.machine if facts.timing else "",
        sections=sections(facts),
        python=by_python(facts),
        ptx=by_ptx(facts),
        savings=savings(facts),
        notes=tuple(facts.notes()),
    )

"""The profile of a simulated launch: what Nsight Compute's details page says, of counters and the clock."""

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
    """The profile of a launch that has ended, from its ``result``.

    What the clock says is missing where there was none, and counts other than instructions where they were not asked
    for (``run(counters=True, clock=…)``).
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

"""Times plans of a GEMM against each other on a GPU, so that the fastest can be kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .gemm_problem import Plan
from .packed_problem import PackedPlan

Call = Callable[[], object]
_FIRST_ROUNDS = 5
"""The rounds in which every plan is timed; after them, clearly slower plans drop out."""
_HOPELESS = 1.25


@dataclass(frozen=True)
class Timed:
    """A plan with its median and best time in microseconds over ``runs`` cold calls, or why it did not run."""

    plan: Plan | PackedPlan
    us: float = 0.0
    best_us: float = 0.0
    runs: int = 0
    error: str = ""


def time_plans(
    plans: Sequence[Plan | PackedPlan],
    prepare: Callable[[Plan | PackedPlan], Call],
    timer: Callable[[Call], float],
    *,
    rounds: int = 40,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Timed]:
    """Times ``plans`` in turn, round after round, so that a drift of the clock affects all of them alike.

    prepare: compiles and checks a plan and returns a call that runs it once; what it raises becomes that plan's error.
    timer: returns the nanoseconds of one call (``harness.timing.time_once`` with a cold L2). progress: is called with
    the current step, the amount done, and the total. After a few rounds, plans a quarter slower than the best drop out.

    Returns:
        Plans that ran, fastest median first, then plans that could not run.
    """
    calls: dict[Plan | PackedPlan, Call] = {}
    failed: list[Timed] = []
    for index, plan in enumerate(plans):
        progress("compiling and checking", index, len(plans))
        try:
            calls[plan] = prepare(plan)
        except Exception as error:  # any error is shown beside the plan
            failed.append(Timed(plan, error=f"{type(error).__name__}: {error}"))
    samples: dict[Plan | PackedPlan, list[float]] = {plan: [] for plan in calls}
    active = list(calls)
    for turn in range(rounds):
        progress(f"timing {len(active)} of {len(calls)} plans", turn, rounds)
        for plan in active:
            samples[plan].append(timer(calls[plan]))
        if turn + 1 >= _FIRST_ROUNDS:
            medians = {plan: statistics.median(samples[plan]) for plan in active}
            limit = _HOPELESS * min(medians.values(), default=0.0)
            active = [plan for plan in active if medians[plan] <= limit]
        # every other round starts at the other end, so that no plan is always first
        active.reverse()
    done = [
        Timed(plan, statistics.median(times) / 1e3, min(times) / 1e3, len(times)) for plan, times in samples.items()
    ]
    return [*sorted(done, key=lambda timed: timed.us), *failed]

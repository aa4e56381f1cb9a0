"""Fits the model of sm_100a's GEMM to the clock: ``python benchmarks/gemm_refit.py --plans 300 --choices 60``.

It draws problems of NVFP4 operands, and for each a random plan that the model puts within twice its fastest; the
simulator's clock of a B200 times the plan. It fits the model's unpublished constants (``CONSTANTS``) to these times.
Then it draws new problems, and the clock times the plans that the fitted model puts first: the loss of a choice is how
much longer the model's first plan takes than the fastest of them. Nothing is measured: all times are modelled.

The record (``results/gemm_refit_b200.json``) is written after every plan; a second call continues it. Without an
option, the script prints the record's fit and losses, and those of the constants that the fit has replaced. ``--seed``
draws other new problems. ``--jobs N`` times plans in N processes. Times do not depend on values: products are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clocked_plans import ARCH, Problem, Task, times_of
from common import RESULTS
from timing_b200 import version

from cute_nvfp4.planning import gemm, rates
from cute_nvfp4.planning.gemm_problem import GemmProblem, Plan
from cute_nvfp4.target import ARCHITECTURES

RECORD = RESULTS / "gemm_refit_b200.json"
CONSTANTS = (
    *("START_US", "STAGE_LATENCY_US", "CLUSTER_US", "DSMEM_LATENCY_US", "DSMEM_BYTES_S", "EPI_TILE_US"),
    *("DIRECT_FACTOR", "COLUMN_FACTOR"),
)
"""Constants of ``planning.rates`` that are fitted or assumed."""
FARTHEST, TRIED, NEAR = 2.0, 4, 1.25
WIDEST, FINEST = 8.0, 0.02
"""A fitted constant is at most this many times the value in use, and at least that value divided by it; the relative
step for derivatives."""


def problems(seed: int) -> Iterator[tuple[int, int, int]]:
    """Yields (m, n, k), each uniform on a logarithmic scale: launches of up to a few hundred tiles with short K, which
    the clock executes in seconds."""
    drawn = random.Random(seed)

    def between(low: int, high: int, step: int) -> int:
        return max(step, round(math.exp(drawn.uniform(math.log(low), math.log(high))) / step) * step)

    while True:
        yield between(1, 512, 1), between(256, 8192, 128), between(256, 4096, 256)


def problem_of(sizes: tuple[int, int, int]) -> Problem:
    return Problem("", 1, False, (sizes,))


def ranked(sizes: tuple[int, int, int]) -> list[tuple[float, Plan]]:
    """The model's microseconds and static plans, fastest first."""
    return problem_of(sizes).candidates()


def described(plan: Plan) -> dict[str, Any]:
    """The plan in the form of the record."""
    return {"swap": plan.swap, "tiling": plan.config.tiling | {"cluster": list(plan.config.cluster)}}


def plan_in(entry: dict[str, Any]) -> dict[str, Any]:
    """The plan of a record's entry."""
    return {name: entry[name] for name in ("swap", "tiling")}


def plan_of(sizes: tuple[int, int, int], entry: dict[str, Any]) -> tuple[GemmProblem, Plan]:
    tiling = entry["tiling"] | {"cluster": tuple(entry["tiling"]["cluster"])}
    problem = GemmProblem(*sizes)
    return problem, gemm.plan_with(problem, ARCHITECTURES[ARCH], rates.SM_COUNT, entry["swap"], tiling)


@contextlib.contextmanager
def constants(values: dict[str, float]) -> Iterator[None]:
    """Within this block the model uses these constants."""
    before = {name: getattr(rates, name) for name in values}
    try:
        for name, value in values.items():
            setattr(rates, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(rates, name, value)


def errors(plans: list[dict[str, Any]], values: dict[str, float]) -> list[float]:
    """Relative errors of the model with these constants."""
    return _errors(_known(plans), values)


def _errors(known: list[tuple[GemmProblem, Plan, float]], values: dict[str, float]) -> list[float]:
    with constants(values):
        return [gemm.predict_plan(plan, problem, rates.SM_COUNT).us / us - 1 for problem, plan, us in known]


def _known(plans: list[dict[str, Any]]) -> list[tuple[GemmProblem, Plan, float]]:
    return [(*plan_of(tuple(entry["sizes"]), entry), entry["us"]) for entry in plans]


def fit(plans: list[dict[str, Any]]) -> dict[str, float]:
    """The constants with the least mean square of relative errors, by the Levenberg-Marquardt method in logarithms.

    A constant that does not affect these times ends at its value in use divided by ``WIDEST``.
    """
    known, start = _known(plans), np.array([float(getattr(rates, name)) for name in CONSTANTS])

    def values(x: np.ndarray) -> dict[str, float]:
        return dict(zip(CONSTANTS, (start * np.exp(x)).tolist()))

    def found(x: np.ndarray) -> np.ndarray:
        return np.array(_errors(known, values(x)))

    at, damping = np.zeros(len(CONSTANTS)), 0.01
    now = found(at)
    while damping < 1e4:
        slopes = np.stack([(found(at + FINEST * unit) - now) / FINEST for unit in np.eye(len(at))], axis=1)
        normal = slopes.T @ slopes
        damped = normal + damping * np.diag(np.diag(normal) + 1e-6)
        after = np.clip(at - np.linalg.solve(damped, slopes.T @ now), -math.log(WIDEST), math.log(WIDEST))
        errors_after = found(after)
        before, least = now @ now, errors_after @ errors_after
        if least < before:
            at, now = after, errors_after
        damping *= 0.3 if least < (1 - 1e-5) * before else 10.0
    return {name: float(f"{value:.4g}") for name, value in values(at).items()}


def neighbours(at: dict[str, float], start: dict[str, float], step: float) -> list[dict[str, float]]:
    """Copies of ``at``, each with one constant changed by a relative step, within ``WIDEST`` of where the fit
    started."""
    steps = [(name, at[name] * factor) for name in CONSTANTS for factor in (1 + step, 1 / (1 + step))]
    return [at | {name: x} for name, x in steps if 1 / WIDEST <= x / start[name] <= WIDEST]


def loss(plans: list[dict[str, Any]], values: dict[str, float]) -> float:
    """The objective of ``fit``: the sum of squares of the model's relative errors with these constants."""
    return sum(error**2 for error in errors(plans, values))


def missing(seed: int, done: int, count: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """The first ``count`` problems of a seed without the first ``done``, each with its number."""
    return itertools.islice(enumerate(problems(seed)), done, max(done, count))


def draw_plans(record: dict[str, Any], count: int, jobs: int, save: Callable[[], None]) -> None:
    tasks, left = [], list(missing(1, len(record["plans"]), count))
    for number, sizes in left:
        found = ranked(sizes)
        near = [plan for us, plan in found if us <= FARTHEST * found[0][0]]
        tasks.append(Task(problem_of(sizes), random.Random(number).choice(near)))
    for (_, sizes), found in zip(left, times_of(tasks, jobs)):
        one = {"sizes": sizes, **described(found.plan), "us": round(found.us, 3), "seconds": round(found.seconds, 1)}
        record["plans"].append(one)
        save()


def draw_choices(record: dict[str, Any], seed: int, count: int, jobs: int, save: Callable[[], None]) -> None:
    """Times, for new problems, the first plans by the fitted constants and by those in use, unless the record has their
    times."""
    wanted, choices = [], record["choices"].setdefault(str(seed), [])
    for number, sizes in missing(seed, 0, count):
        if number == len(choices):
            choices.append({"sizes": sizes, "times": []})
        known = list(map(plan_in, choices[number]["times"]))
        plans = [ranked(sizes)[0][1]]
        with constants(record["fitted"]):
            found = ranked(sizes)
        plans = [plan for us, plan in found[:TRIED] if us <= NEAR * found[0][0]] + plans
        for plan in plans:
            if described(plan) not in known:
                known.append(described(plan))
                wanted.append((choices[number], Task(problem_of(sizes), plan)))
    for (choice, _), found in zip(wanted, times_of([task for _, task in wanted], jobs)):
        choice["times"].append(described(found.plan) | {"us": round(found.us, 3)})
        save()


def losses(choices: list[dict[str, Any]], values: dict[str, float]) -> list[float]:
    """How much longer the model's first plan with these constants takes than the fastest timed plan, for each problem
    whose first plan has a time."""
    out = []
    with constants(values):
        for choice in choices:
            first = described(ranked(tuple(choice["sizes"]))[0][1])
            mine = [t["us"] for t in choice["times"] if plan_in(t) == first]
            out += [us / min(t["us"] for t in choice["times"]) - 1 for us in mine]
    return out


def report(record: dict[str, Any]) -> None:
    plans, fitted, replaced = record["plans"], record["fitted"], record["replaced"]
    named = (("in use", {}), ("fitted", fitted), ("replaced", replaced))
    print(f"{len(plans)} plans by the clock {record['clock']}, {sum(p['seconds'] for p in plans):.0f} s")
    for name, values in named:
        found = errors(plans, values) if plans else [0.0]
        print(f"{name:18} mean error {statistics.mean(map(abs, found)):.1%}, with sign {statistics.mean(found):+.1%}")
    for name, value in fitted.items():
        in_use, before = float(getattr(rates, name)), replaced.get(name, math.nan)
        print(f"  {name:18} {in_use:12.4g} in use {value:12.4g} fitted {before:12.4g} replaced")
    for (seed, choices), (name, values) in itertools.product(record["choices"].items(), named):
        if lost := losses(choices, values):
            print(f"seed {seed}: {len(lost)} of {len(choices)} choices, {name}: mean loss {statistics.mean(lost):.1%}, "
                  f"worst {max(lost):.1%}, {sum(x <= 0.05 for x in lost)} within 5 %")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=0, metavar="N", help="times of N random plans")
    parser.add_argument("--choices", type=int, default=0, metavar="N", help="choices for N fresh problems")
    parser.add_argument("--seed", type=int, default=2, metavar="SEED", help="of the fresh problems")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    given = parser.parse_args()
    record = (
        json.loads(RECORD.read_text())
        if RECORD.exists()
        else {"plans": [], "fitted": {}, "choices": {}, "replaced": {}}
    )
    record["clock"] = record.get("clock", version())

    def save() -> None:
        RECORD.write_text(json.dumps(record) + "\n")

    draw_plans(record, given.plans, given.jobs, save)
    if given.plans:
        record["replaced"] = {name: float(getattr(rates, name)) for name in CONSTANTS}
        record["fitted"] = fit(record["plans"])
        save()
    if given.choices:
        draw_choices(record, given.seed, given.choices, given.jobs, save)
    report(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Lets the simulator's clock choose plans for a B200: ``python benchmarks/clocked_plans.py --write``. Measures nothing.

The problems are the contest's shapes and some layers of models. The analytic model ranks the candidates of each; the
clock times the first ``--top`` of those that the model puts within a fifth of its best. The fastest goes into
``cute_nvfp4/planning/clocked_plans.json``, which is written after every problem. Entries that this version of the clock
decided stay; ``--stale`` decides those of other versions again, ``--renew`` only times their plans again beside the
model's choice, and ``--only TEXT`` keeps to problems whose names contain the text. ``--jobs N`` times in N processes.

Nobody has published what a cluster's barriers and arrivals at other CTAs cost on a B200: the clock uses an H200's
figures. The choice must not depend on them: with a tenth of both it may lose at most ``TIE`` to the model's own choice,
or that choice stays. Times do not depend on values, so the script skips products and ignores results: tests check them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from b200_launches import operand
from timing_b200 import version

import cute_nvfp4
from cute_nvfp4.harness.evaluation import Options, task_of
from cute_nvfp4.kernels.gemm.limits import can_implement
from cute_nvfp4.planning import gemm as dense
from cute_nvfp4.planning import grouped
from cute_nvfp4.planning.clocked import ARCH, FILE, Sizes
from cute_nvfp4.planning.gemm_problem import GemmProblem, Plan
from cute_nvfp4.planning.grouped import GroupedProblem
from cute_nvfp4.planning.rates import SM_COUNT
from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.sim.clock import timing as clock
from cute_nvfp4.sim.clock.machine import machine
from cute_nvfp4.sim.tcgen05 import product
from cute_nvfp4.target import ARCHITECTURES

NEUTRAL = {"cluster.barrier": 0.1, "mbarrier.remote": 0.1}
"""Figures of the clock that come from an H200, and the factor that the second timing multiplies them by."""
TIE, NEAR = 1.01, 1.2
LAYERS = tuple((m, n, k) for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)) for m in (16, 128))
"""(m, n, k) of the linear layers of Llama-3.1-8B."""


class Problem(NamedTuple):
    """One problem of the table."""

    name: str
    products: int
    grouped: bool
    sizes: Sizes

    @property
    def key(self) -> tuple[int, bool, Sizes]:
        return self.products, self.grouped, self.sizes

    def candidates(self) -> list[tuple[float, Plan]]:
        """The model's microseconds and plans, fastest first, without plans that split K into equal shares."""
        arch, signature = ARCHITECTURES[ARCH], {"products": self.products, "gate": "silu" if self.products == 2 else ""}
        if self.grouped:
            problem = GroupedProblem(sizes=self.sizes)
            plans = grouped.candidates(problem, arch, SM_COUNT)
            return [(grouped.modelled_us(plan, problem, SM_COUNT), plan) for plan in plans]
        ((m, n, k),) = self.sizes
        found = dense.ranked(GemmProblem(m, n, k, **signature), arch, SM_COUNT)
        return [(p.us, plan) for p, plan in found if plan.config.scheduler == "static"]

    def call(self, plan: Plan) -> object:
        """Makes the operands, and returns what launches the plan once."""
        options = {"config": plan, "out_dtype": torch.float16}
        if self.grouped:
            return cute_nvfp4.grouped_gemm([(operand(m, k), operand(n, k)) for m, n, k in self.sizes], **options)
        ((m, n, k),) = self.sizes
        weights = [operand(n, k) for _ in range(self.products)]
        function = cute_nvfp4.gated_gemm if self.products == 2 else cute_nvfp4.gemm
        return function(operand(m, k), *weights, **options)


def problems() -> Iterator[Problem]:
    for name, products in (("nvfp4_group_gemm", 1), ("nvfp4_gemm", 1), ("nvfp4_dual_gemm", 2)):
        for case in task_of(Options(problem=name)).benchmarks:
            several = isinstance(case["m"], list)
            sizes = tuple(zip(*(case[x] if several else [case[x]] for x in "mnk")))
            yield Problem(f"{name} {sizes}", products, several, sizes)
    for sizes in LAYERS:
        yield Problem(f"layer {sizes}", 1, False, (sizes,))


class Time(NamedTuple):
    """A plan's time by the clock: microseconds, microseconds with the ``NEUTRAL`` figures, and the seconds that timing
    took."""

    us: float
    neutral_us: float
    plan: Plan
    seconds: float


def time_of(call: Callable[[], object], plan: Plan) -> Time:
    """The clock's time of a plan."""
    begin = time.perf_counter()
    without = mock.patch.object(product, "execute", lambda wave, runs: None)
    # a note on the launch's own cubin costs as much as the launch
    unnoted = mock.patch.object(clock, "_differing", lambda code, cubin, kernel: 0)
    with without, unnoted, simulated_gpu(ARCH, checks=False, clock="b200") as session:
        call()
        torch.cuda.synchronize()
        timing = session.launches[-1].result.timing
    more = machine("b200")["launch.duration_us"] - timing.launch_us
    us = more + timing.microseconds
    neutral = more + timing.again(NEUTRAL) if plan.config.cluster_size > 1 else us
    return Time(us, neutral, plan, time.perf_counter() - begin)


class Task(NamedTuple):
    """A plan of a problem for the clock to time."""

    problem: Problem
    plan: Plan


def timed(task: Task) -> Time:
    return time_of(lambda: task.problem.call(task.plan), task.plan)


def times_of(tasks: list[Task], jobs: int) -> Iterator[Time]:
    """The clock's times, in the order of the tasks. With several jobs, worker processes time the tasks."""
    if jobs == 1:
        yield from map(timed, tasks)
        return
    # spawn instead of fork: the compiler and torch may have threads already
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(timed, tasks)


def variants(plan: Plan) -> Iterator[Plan]:
    """Yields the plan and, where TMA stores its output, the same plan with stores by threads."""
    yield plan
    if plan.config.store == "tma":
        direct = plan.config.__class__(**vars(plan.config) | {"store": "direct"})
        if not can_implement(direct):
            yield Plan(direct, plan.swap, plan.workers)


def same(plan: Plan, entry: dict[str, Any]) -> bool:
    """Whether a plan is the one that an entry of the table holds."""
    tiling = plan.config.tiling
    return plan.swap == entry["swap"] and json.loads(json.dumps(tiling)) == entry["tiling"]


def tried(problem: Problem, top: int, old: dict[str, Any] | None = None) -> list[Plan]:
    """The plans for the clock to time, the model's choice first. old: an entry of the table; then only that entry's
    plan."""
    found = problem.candidates()
    near = [plan for us, plan in found if us <= NEAR * found[0][0]][:top]
    plans = [plan for first in near for plan in variants(first)]
    return plans if old is None else [plans[0], *(plan for plan in plans[1:] if same(plan, old))]


def decided(problem: Problem, times: list[Time]) -> dict[str, Any]:
    """The table's entry for a problem. times: the clock's times of its plans, the model's choice first."""
    own = times[0]
    best = min(times, key=lambda t: t.us)
    if best is not own and best.neutral_us > TIE * own.neutral_us:
        best = own
    return {
        **{"products": problem.products, "grouped": problem.grouped, "sizes": problem.sizes, "swap": best.plan.swap},
        **{"tiling": best.plan.config.tiling, "us": round(best.us, 3), "replaced_us": round(own.us, 3)},
        **{"modelled": True, "clock": version()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} of the package")
    parser.add_argument("--only", default="", metavar="TEXT", help="only problems whose names contain TEXT")
    parser.add_argument("--stale", action="store_true", help="also entries that another version of the clock decided")
    parser.add_argument("--again", action="store_true", help="also entries that this version of the clock decided")
    parser.add_argument("--renew", action="store_true", help="time only the plans of such entries again")
    parser.add_argument("--top", type=int, default=8, help="how many of the model's candidates the clock times")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    given = parser.parse_args()
    table = {}
    for raw in json.loads(FILE.read_text()):
        sizes = tuple(map(tuple, raw["sizes"]))
        table[raw["products"], raw["grouped"], sizes] = raw
    plans: dict[Problem, list[Plan]] = {}
    for problem in problems():
        old = table.get(problem.key)
        stale = old and (given.again or ((given.stale or given.renew) and old["clock"] != version()))
        if given.only in problem.name and (not old or stale):
            plans[problem] = tried(problem, given.top, old if given.renew else None)
    times = times_of([Task(problem, plan) for problem, some in plans.items() for plan in some], given.jobs)
    for problem, some in plans.items():
        print(problem.name, flush=True)
        found = []
        for one in itertools.islice(times, len(some)):
            print(f"  {one.us:7.2f} {one.neutral_us:7.2f} {one.plan}", flush=True)
            found.append(one)
        entry = table[problem.key] = decided(problem, found)
        print(f"  {entry['replaced_us']} → {entry['us']} us modelled", flush=True)
        if given.write:
            FILE.write_text("[\n" + ",\n".join(json.dumps(e) for e in table.values()) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

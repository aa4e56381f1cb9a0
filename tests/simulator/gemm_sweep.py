"""Every structure of GEMM kernel, each under adversarial schedules, and random problems.

    python -m tests.simulator.gemm_sweep [--schedules 20] [--random 200] [--seconds S] [--count N] [--part 1/2]
[--json FILE]     python -m tests.simulator.gemm_sweep --case m=3,n=5,pair=True,cluster_m=2 [--schedule seed=3,tma=lazy]

Every run has checks on and its result is judged: exact data must give the same bits under every schedule (other data
need not here: the order in which the simulator's tensor core sums is not specified, like the hardware's). A failure is
printed at once with the command that repeats it. Structures come in a mixed order, so that a part of the sweep is a
sample of the whole.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # a compile for each structure: nobody needs them again
    os.environ.setdefault("CUTE_NVFP4_CACHE", "0")

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from support import gemm_problems
from support.gemm_problems import Case
from support.gemm_structures import Pairs, random_case, structures

import cute_nvfp4.runtime.compile
from cute_nvfp4 import simulating
from cute_nvfp4.runtime.bounded import Bounded
from cute_nvfp4.sim import Schedule, adversarial


@dataclass(frozen=True)
class Outcome:
    """``error``: "" or what went wrong; ``schedule``: under which."""

    case: str
    schedules: int
    seconds: float
    error: str = ""
    schedule: str = ""

    @property
    def command(self) -> str:
        schedule = f" --schedule {self.schedule}" if self.schedule else ""
        return f'python -m tests.simulator.gemm_sweep --case "{self.case}"{schedule}'


def forget() -> None:
    """Drops compiled kernels: thousands of them are too many to keep."""
    cute_nvfp4.runtime.compile._memory.clear()
    for module in [module for name, module in sys.modules.items() if name.startswith("cute_nvfp4.")]:
        for kept in [kept for kept in vars(module).values() if isinstance(kept, Bounded)]:
            kept.clear()


def run_case(case: Case, schedules: list[Schedule]) -> Outcome:
    """Runs ``case`` under each schedule with checks on, and judges it."""
    start, schedule, done = time.perf_counter(), Schedule(), 0
    try:
        problem = gemm_problems.make(case)
        for schedule in schedules:
            with simulating(schedule=schedule):
                c = problem.run()
            gemm_problems.check(problem, c)
            done += 1
    except Exception as error:  # every kind is a finding, and the sweep goes on
        text = f"{type(error).__name__}: {error}"
        return Outcome(str(case), done, time.perf_counter() - start, text, str(schedule))
    return Outcome(str(case), done, time.perf_counter() - start)


def cases(seed: int, random_count: int, part: tuple[int, int]) -> list[tuple[str, Case]]:
    """("structure" or "random", case) in a mixed order."""
    every, pairs = structures(), Pairs(seed)
    found = [("structure", pairs.complete(structure)) for structure in every]
    generator = np.random.default_rng(seed)
    found += [("random", random_case(generator, every)) for _ in range(random_count)]
    random.Random(seed).shuffle(found)
    return found[part[0] - 1 :: part[1]]


def sweep(todo: list[tuple[str, Case]], options: argparse.Namespace) -> list[Outcome]:
    """Runs ``todo`` until it is done or the time is over."""
    begin, outcomes = time.perf_counter(), []
    for number, (kind, case) in enumerate(todo, 1):
        schedules = adversarial(options.schedules if kind == "structure" else 1, options.seed)
        outcome = run_case(case, schedules)
        outcomes.append(outcome)
        forget()
        seconds = time.perf_counter() - begin
        if outcome.error:
            print(f"FAILED {outcome.error}\n  repeat with: {outcome.command}", flush=True)
        elif number % options.every == 0:
            left = seconds / number * (len(todo) - number)
            failed = sum(bool(o.error) for o in outcomes)
            print(f"{number}/{len(todo)}, {failed} failed, {seconds:.0f} s, {left:.0f} s to go: {case}", flush=True)
        if options.seconds and seconds > options.seconds:
            break
    return outcomes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=20, metavar="N", help="for each structure (default: 20)")
    parser.add_argument("--random", type=int, default=200, metavar="N", help="random problems (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="stop after this long")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="only the first N")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="one of N parts, for several processes")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="say something after every N-th")
    parser.add_argument("--json", type=Path, help="write all outcomes here")
    parser.add_argument("--case", help="run this case only")
    parser.add_argument("--schedule", help="of --case; the default is --schedules adversarial ones")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.case is not None:
        chosen = [Schedule.parse(options.schedule)] if options.schedule else adversarial(options.schedules)
        outcomes = [run_case(Case.parse(options.case), chosen)]
        print(f"{outcomes[0].error or 'right'} ({outcomes[0].schedules} schedules, {outcomes[0].seconds:.1f} s)")
    else:
        todo = cases(options.seed, options.random, tuple(int(x) for x in options.part.split("/")))
        print(f"{len(todo)} cases", flush=True)
        outcomes = sweep(todo[: options.count or None], options)
        failed = sum(bool(o.error) for o in outcomes)
        runs = sum(o.schedules for o in outcomes)
        print(f"{len(outcomes)} cases, {runs} runs, {failed} failed, {sum(o.seconds for o in outcomes):.0f} s")
    if options.json:
        options.json.write_text(json.dumps([{**vars(o), "command": o.command} for o in outcomes], indent=1))
    return int(any(o.error for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())

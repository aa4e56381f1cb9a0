"""The command: see ``tests.long``."""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # a compile for each structure: nobody needs them again
    os.environ.setdefault("CUTE_NVFP4_CACHE", "0")

import argparse
import datetime
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests import long
from tests.long.families import FAMILIES, Family
from tests.long.ledger import ROOT, Ledger, Record, commit, simulator
from tests.long.shrink import shrunk
from tests.long.worker import Ended, Task, Worker, perform

LEDGER = ROOT / ".long" / "ledger.jsonl"
LIMIT = 120.0
"""Seconds of CPU time that a case may take under one schedule, before it counts as hung."""


def work(seed: int, only: list[str]) -> Iterator[tuple[Family, str, str]]:
    """(family, case, architecture) without end, the same for the same seed."""
    families = [FAMILIES[name] for name in only or FAMILIES]
    weights = np.array([family.weight for family in families], float)
    counts = dict.fromkeys(FAMILIES, 0)
    number = 0
    while True:
        generator = np.random.default_rng([seed, number])
        family = families[generator.choice(len(families), p=weights / weights.sum())]
        case = family.draw(generator, counts[family.name])
        yield family, family.text(case), str(generator.choice(list(family.archs)))
        counts[family.name] += 1
        number += 1


class Run:
    """Takes cases one by one, by several workers, until the time is over."""

    def __init__(self, ledger: Ledger, given: argparse.Namespace) -> None:
        self.ledger, self.given = ledger, given
        self.cases, self.lock = work(given.seed, given.only), threading.Lock()
        self.end = time.monotonic() + 60 * given.minutes
        self.failed = self.ran = self.skipped = 0

    def take(self) -> tuple[Family, str, str, tuple[str, ...]] | None:
        """The next case that has not passed on this commit; with the kernels it has passed with."""
        with self.lock:
            while time.monotonic() < self.end and (not self.given.count or self.ran < self.given.count):
                family, text, arch = next(self.cases)
                known = self.ledger.passed((family.name, text, arch))
                same = known and known.commit == commit() and not commit().endswith("+")
                if same and not self.given.again:
                    self.skipped += 1
                    continue
                self.ran += 1
                return family, text, arch, () if known is None or self.given.again else known.kernels
        return None

    def loop(self) -> None:
        """One worker's share."""
        worker = Worker()
        try:
            while (taken := self.take()) is not None:
                self.one(worker, *taken)
        finally:
            worker.close()

    def one(self, worker: Worker, family: Family, text: str, arch: str, seen: tuple[str, ...]) -> None:
        schedules = min(family.schedules, self.given.schedules or family.schedules)
        ended = worker.run(Task(family.name, text, arch, schedules, seen), LIMIT * schedules)
        if ended.outcome == "known":
            self.skipped += 1
            return
        smallest = "" if ended.outcome == "passed" else self.smallest(worker, family, text, arch, ended)
        record = Record(
            family.name, text, arch, ended.outcome, round(ended.seconds, 3), datetime.date.today().isoformat(),
            commit(), simulator(), ended.runs, ended.kernels, ended.error, smallest,
        )  # fmt: skip
        with self.lock:
            self.ledger.add(record)
            if ended.outcome != "passed":
                self.failed += 1
                print(
                    f"{ended.outcome.upper()} {ended.error}\n  under {ended.schedule}\n  {record.command}", flush=True
                )

    def smallest(self, worker: Worker, family: Family, text: str, arch: str, ended: Ended) -> str:
        """The smallest case that ends in the same kind of error."""
        kind = ended.error.partition(":")[0]
        schedules = min(family.schedules, 3)

        def fails(candidate: Any) -> bool:
            again = worker.run(Task(family.name, family.text(candidate), arch, schedules), LIMIT)
            return again.outcome == ended.outcome and again.error.partition(":")[0] == kind

        return family.text(shrunk(family.parse(text), fails, self.given.shrink))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.long", description=long.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="stop after this long (default: 60)")
    parser.add_argument("--resume", type=Path, default=LEDGER, metavar="LEDGER", help=f"default: {LEDGER}")
    parser.add_argument("--only", nargs="*", default=[], choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--seed", type=int, default=0, help="another order, and other cases")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="at most N cases")
    parser.add_argument("--schedules", type=int, default=0, metavar="N", help="at most N for each structure")
    parser.add_argument(
        "--shrink", type=float, default=120.0, metavar="S", help="seconds to look for a smaller failure"
    )
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--case", nargs=2, metavar=("FAMILY", "CASE"), help="this one, in this process")
    parser.add_argument("--arch", default="sm_100a", help="of --case")
    parser.add_argument("--summary", action="store_true", help="run nothing, tell what the ledger holds")
    parser.add_argument("--write", action="store_true", help="with --summary: into docs/checks.md")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    ledger = Ledger(given.resume)
    if given.summary:
        print(ledger.summary())
        if given.write:
            ledger.write()
        return 0
    if given.case:
        name, text = given.case
        ended = perform(Task(name, text, given.arch, given.schedules or FAMILIES[name].schedules))
        print(f"{ended.outcome}, {ended.runs} schedules, {ended.seconds:.1f} s {ended.error} {ended.schedule}")
        return int(ended.outcome != "passed")
    run = Run(ledger, given)
    with ThreadPoolExecutor(given.jobs) as pool:
        for task in [pool.submit(run.loop) for _ in range(given.jobs)]:
            task.result()
    print(f"{run.ran} cases, {run.skipped} skipped, {run.failed} failed: {given.resume}")
    return int(run.failed > 0)


if __name__ == "__main__":
    sys.exit(main())

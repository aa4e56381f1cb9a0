"""The command ``python -m tests.long``."""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # with a driver but no device, the DSL would ask for the architecture in an endless loop
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
    # no disk cache: each structure is compiled once, and nobody needs it again
    os.environ.setdefault("CUTE_NVFP4_CACHE", "0")

import argparse
import datetime
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import long
from tests.long.families import FAMILIES
from tests.long.ledger import ROOT, Ledger, Record, commit, keep
from tests.long.order import Stream, Work, cheapest, mixed, streams
from tests.long.shrink import shrunk
from tests.long.summary import summary, table, write
from tests.long.worker import Ended, Task, Worker, perform

LEDGER = ROOT / ".long" / "ledger.jsonl"
KEPT = ROOT / "tests" / "data" / "long_run.jsonl.xz"
LIMIT, LIMIT_OF_SCHEDULE = 120.0, 15.0
"""CPU seconds that a case may take, and that each schedule adds, before it counts as hung."""
EVERY = 30.0
"""Seconds between two progress lines."""


class Run:
    """Runs cases one by one in several workers, until the time is over."""

    def __init__(self, ledger: Ledger, given: argparse.Namespace) -> None:
        self.ledger, self.given = ledger, given
        families = [FAMILIES[name] for name in given.only or FAMILIES]
        self.streams = streams(families, ledger, given.seed, given.archs, given.again, given.new, given.known)
        order = cheapest if given.cheapest else mixed
        self.works, self.lock = order(self.streams, given.seed), threading.Lock()
        self.end = time.monotonic() + 60 * given.minutes
        self.failed = self.ran = self.known = 0
        self.done: Counter[str] = Counter()
        self.records: list[Record] = []

    def take(self) -> Work | None:
        """The next work."""
        while time.monotonic() < self.end:
            with self.lock:
                if self.given.count and self.ran >= self.given.count:
                    return None
                try:
                    work = next(self.works)
                except StopIteration:
                    return None
                if work is not None:
                    self.ran += bool(work.text)
                    return work
            time.sleep(0.5)
        return None

    def loop(self) -> None:
        """The work of one worker."""
        worker = Worker()
        try:
            while (work := self.take()) is not None:
                if work.text:
                    self.one(worker, work)
                else:
                    self.list(worker, work.stream)
        finally:
            worker.close()

    def list(self, worker: Worker, stream: Stream) -> None:
        """Asks a worker for the cases of a stream."""
        ended = worker.run(Task(stream.family.name, "", stream.arch, 1, part=stream.part), 10 * LIMIT, self.end)
        if ended.outcome != "listed" and ended.outcome != "unfinished":
            self.say(f"{ended.outcome.upper()} {ended.error}\n  listing {stream.name}")
        with self.lock:
            gone = stream.take_list(ended.cases)
            for text in gone if ended.outcome == "listed" else ():
                found = self.ledger.records[stream.family.name, text, stream.arch]
                self.ledger.add(replace(found, outcome="gone"))

    def one(self, worker: Worker, work: Work) -> None:
        family, arch = work.stream.family, work.stream.arch
        schedules = min(family.schedules, self.given.schedules or family.schedules)
        ended = worker.run(Task(family.name, work.text, arch, schedules, work.seen), _limit(schedules), self.end)
        if ended.outcome in ("known", "unfinished"):
            self.known += ended.outcome == "known"
            self.ran -= ended.outcome == "unfinished"
            if ended.outcome == "unfinished":
                return
        smallest = "" if ended.outcome in ("passed", "known", "gone") else self.smallest(worker, work, ended)
        simulator, sources = family.state(arch)
        record = Record(
            family.name, work.text, arch, ended.outcome, round(ended.seconds, 3), datetime.date.today().isoformat(),
            commit(), simulator, ended.runs, ended.kernels, ended.error, smallest, ended.note, sources,
        )  # fmt: skip
        with self.lock:
            if ended.outcome == "known":
                record = replace(self.ledger.records[record.key], sources=sources)
            self.ledger.add(record)
            self.records.append(record)
        self.done[f"{family.name} {arch}"] += 1
        if record.outcome not in ("passed", "gone"):
            self.failed += 1
            self.say(f"{ended.outcome.upper()} {ended.error}\n  under {ended.schedule}\n  {record.command}")

    def tell(self, over: threading.Event) -> None:
        """Prints progress until ``over``."""
        begin = time.monotonic()
        while not over.wait(EVERY):
            done = ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))
            self.say(f"after {time.monotonic() - begin:.0f} s: {self.failed} failed; {done or 'none is done'}")

    def say(self, text: str) -> None:
        with self.lock:
            print(text, flush=True)

    def smallest(self, worker: Worker, work: Work, ended: Ended) -> str:
        """The smallest case that ends in the same kind of error."""
        family, kind = work.stream.family, ended.error.partition(":")[0]
        schedules = min(family.schedules, 3)

        def fails(candidate: Any) -> bool:
            task = Task(family.name, family.text(candidate), work.stream.arch, schedules)
            again = worker.run(task, _limit(schedules), self.end)
            return again.outcome == ended.outcome and again.error.partition(":")[0] == kind

        return family.text(shrunk(family.parse(work.text), fails, self.given.shrink))


def _limit(schedules: int) -> float:
    return LIMIT + LIMIT_OF_SCHEDULE * schedules


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.long", description=long.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="stop after this long (default: 60)")
    parser.add_argument("--resume", type=Path, default=LEDGER, metavar="LEDGER", help=f"default: {LEDGER}")
    parser.add_argument("--only", nargs="*", default=[], choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--archs", nargs="*", default=[], metavar="ARCH", help="of these alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--seed", type=int, default=0, help="selects the order and the random cases")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="at most N cases")
    parser.add_argument("--schedules", type=int, default=0, metavar="N", help="at most N schedules for each structure")
    parser.add_argument(
        "--shrink", type=float, default=120.0, metavar="S", help="seconds to look for a smaller failure"
    )
    how = "give each kind of cases equal time, cheapest first; a new ledger begins with the committed one"
    parser.add_argument("--cheapest", action="store_true", help=how)
    parser.add_argument("--done", type=Path, metavar="FILE.xz", help="write the records of this run there at the end")
    parser.add_argument("--again", action="store_true", help="also run cases that have passed before")
    parser.add_argument("--new", action="store_true", help="skip cases that passed with other sources of the package")
    parser.add_argument(
        "--known", action="store_true", help="compile cases that passed with this simulator, run those with other PTX"
    )
    parser.add_argument("--case", nargs=2, metavar=("FAMILY", "CASE"), help="run this case, in this process")
    parser.add_argument("--arch", default="sm_100a", help="of --case")
    parser.add_argument("--merge", nargs="*", type=Path, metavar="LEDGER", help="run nothing, add records of these")
    parser.add_argument("--keep", type=Path, metavar="FILE.xz", help="run nothing, write the ledger there, compressed")
    parser.add_argument("--summary", action="store_true", help="run nothing, summarize the ledger")
    parser.add_argument("--write", action="store_true", help="with --summary: write it into the record instead")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.resume.suffix == ".xz" and not given.summary:
        raise SystemExit(f"--resume: got {given.resume}, which is compressed; --merge it into a ledger first")
    for option, path in (("--keep", given.keep), ("--done", given.done)):
        if path and path.suffix != ".xz":
            raise SystemExit(f"{option}: got {path}, expected a name that ends in .xz: the file is compressed")
    if missing := [path for path in given.merge or () if not path.exists()]:
        raise SystemExit(f"--merge: no such file: {', '.join(map(str, missing))}")
    ledger = Ledger(given.resume)
    if given.cheapest and not ledger.records and KEPT.exists():
        ledger.merge(Ledger(KEPT))
    if given.merge:
        print(f"{sum(ledger.merge(Ledger(path)) for path in given.merge)} records")
    if given.keep:
        keep(ledger.records.values(), given.keep)
        print(f"{len(ledger.records)} cases: {given.keep}")
    if given.summary and given.write:
        write(ledger)
    elif given.summary:
        print(summary(ledger))
    if given.merge or given.keep or given.summary:
        return 0
    if given.case:
        name, text = given.case
        ended = perform(Task(name, text, given.arch, given.schedules or FAMILIES[name].schedules))
        print(f"{ended.outcome}, {ended.runs} schedules, {ended.seconds:.1f} s {ended.error} {ended.schedule}")
        return int(ended.outcome != "passed")
    run, over = Run(ledger, given), threading.Event()
    threading.Thread(target=run.tell, args=(over,), daemon=True).start()
    with ThreadPoolExecutor(given.jobs) as pool:
        for task in [pool.submit(run.loop) for _ in range(given.jobs)]:
            task.result()
    over.set()
    if given.done:
        keep(run.records, given.done)
    print(table(run.records))
    print(f"{run.ran} cases, {run.known} of them as before, {run.failed} failed: {given.resume}")
    return int(run.failed > 0)


if __name__ == "__main__":
    sys.exit(main())

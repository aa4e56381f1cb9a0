"""The command ``python -m tests.fuzz.extreme``, which the package's docstring explains."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
    sys.path.insert(0, str(Path(__file__).parents[2]))

import argparse
import datetime
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.long.ledger import commit

from .axes import REFERENCE, Call, random_call
from .verdict import Verdict, judge

SHARE = 50
"""Calls that a process takes at a time."""


def judged(share: tuple[int, int, int]) -> list[tuple[str, str, Verdict]]:
    """The random calls ``first`` to ``last`` of a seed: as text, where they ran, and what came of them."""
    import torch

    torch.set_num_threads(1)
    seed, first, last = share
    calls = [random_call(random.Random(f"{seed} {i}")) for i in range(first, last)]
    return [(str(call), REFERENCE if call.arch == REFERENCE else "simulated", judge(call)) for call in calls]


def shares(seed: int, start: int, calls: int) -> Iterator[tuple[int, int, int]]:
    for first in range(start, start + calls, SHARE):
        yield seed, first, min(first + SHARE, start + calls)


def summary(
    seed: int, counts: Counter[str], launched: int, failures: list[dict[str, str]], seconds: float
) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(), "commit": commit(), "seed": seed,
        "calls": sum(counts.values()), "kinds": dict(sorted(counts.items())), "calls_with_launches": launched,
        "failures": failures, "seconds": round(seconds),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.extreme", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000, help="how many random calls (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first call's number, to go on from")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and failures there, after every share")
    parser.add_argument("--call", metavar="TEXT", help="run the call that a failure printed, and nothing else")
    args = parser.parse_args(arguments)
    if args.call is not None:
        verdict = judge(Call.parse(args.call))
        print(f"{verdict.kind}: {verdict.text} ({verdict.launches} launches)")
        return int(verdict.failed)
    counts: Counter[str] = Counter()
    launched, failures, began = 0, [], time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        for found in pool.map(judged, shares(args.seed, args.start, args.calls)):
            for text, where, verdict in found:
                counts[f"{where} {verdict.kind}"] += 1
                launched += verdict.launches > 0
                if verdict.failed:
                    failures.append({"call": text, "kind": verdict.kind, "text": verdict.text})
                    print(f"{verdict.kind}: {verdict.text}\n  python -m tests.fuzz.extreme --call '{text}'", flush=True)
            result = summary(args.seed, counts, launched, failures, time.monotonic() - began)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
            if sum(counts.values()) % (SHARE * 4) == 0:
                print(f"{sum(counts.values())} calls, {launched} with launches, {len(failures)} failures", flush=True)
    print(json.dumps({**result, "failures": len(failures)}))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

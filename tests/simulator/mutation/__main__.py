"""Runs the mutants of our kernels and prints what noticed each: ``python -m tests.simulator.mutation [KERNEL …]``."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import collections
import datetime
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from . import gemm, public
from .judge import judge, reached
from .programs import NAMES, subject
from .sites import mutants
from .survivors import explained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "kernels", nargs="*", help=f"of {', '.join((*NAMES, *gemm.CASES, *public.PROGRAMS))} (default: all there are)"
    )
    parser.add_argument("--cutlass", type=Path, help="a checkout of NVIDIA/cutlass, for its programs")
    parser.add_argument("--match", default="", help="only mutants whose name contains this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th mutant")
    parser.add_argument("--json", type=Path, help="add all verdicts to this file")
    given = parser.parse_args()
    unexplained = 0
    for name in given.kernels or (*NAMES, *gemm.CASES, *(public.PROGRAMS if given.cutlass else ())):
        if name in gemm.CASES:
            one = gemm.subject(name)
        else:
            one = public.subject(given.cutlass, name) if name in public.PROGRAMS else subject(name)
        control = judge(one, None)
        said = control.by or "nothing reported"
        print(f"{name}: the kernel itself: {said} ({control.seconds:.1f} s) {control.message}", flush=True)
        unexplained += bool(control.by)
        lines = reached(one)
        every = [m for m in mutants(one.ptx) if given.match in m.name]
        chosen = [m for m in every if m.line in lines][:: given.every]
        print(
            f"{name}: {len(every)} mutants, {sum(m.line not in lines for m in every)} of them at lines never executed"
        )
        records: list[dict] = []
        tally: collections.Counter[str] = collections.Counter()
        for count, mutant in enumerate(chosen, 1):
            verdict = judge(one, mutant)
            what, reason = ("", "") if verdict.by else explained(name, mutant)
            tally[verdict.by or what or "NOT NOTICED"] += 1
            unexplained += not verdict.by and not what
            records.append({"old": mutant.old, **vars(verdict), "survives": what, "reason": reason})
            said = verdict.by or (f"{what}: {reason}" if what else "NOT NOTICED")
            print(f"{name} {count}/{len(chosen)} {mutant.name}: {said} ({verdict.seconds:.1f} s)", flush=True)
        print(f"{name}: {len(chosen)} mutants: " + ", ".join(f"{v} {k}" for k, v in tally.most_common()), flush=True)
        if given.json and not given.match:
            known = json.loads(given.json.read_text()) if given.json.exists() else {}
            there = sum(m.line in lines for m in every)
            day = datetime.date.today().isoformat()
            known[name] = {"mutants": there, "every": given.every, "day": day, "verdicts": records}
            given.json.write_text(json.dumps(known, indent=1))
    return min(unexplained, 1)


if __name__ == "__main__":
    sys.exit(main())

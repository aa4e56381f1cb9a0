"""How long each of the forty shapes takes: ``python -m tests.simulator.blackwell.forty [--checks both] …``."""

from __future__ import annotations

import os

# numpy's and torch's threads must not fight for two cores; both read this when they are imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sys
import time

from .cases import forty

PROBLEMS = ("gemv", "gemm", "dual", "group")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", choices=("off", "on", "both"), default="off")
    parser.add_argument("--data", choices=("public", "full"), default="public")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--no-reference", action="store_true", help="time only: do not compute the exact answers")
    parser.add_argument("--pair", action="store_true", help="run the GEMM shapes on pairs of CTAs")
    given = parser.parse_args()
    modes = {"off": (False,), "on": (True,), "both": (False, True)}[given.checks]
    heads = "".join(f"{'checks on' if mode else 'checks off':>12}" for mode in modes)
    print(f"{'shape':<64}{heads}{'error':>9}   (seconds; error / allowed)")
    totals, processor, wrong = [0.0] * len(modes), [0.0] * len(modes), 0
    for case in forty(given.data, tuple(given.problems)):
        if given.pair and case.problem == "gemm":
            case = type(case)(case.problem, case.shape, case.data, "pair")
        run, check = case.prepare()
        line = f"{case!s:<64}"
        try:
            for i, mode in enumerate(modes):
                start, busy = time.perf_counter(), time.process_time()
                run(checks=mode)
                seconds = time.perf_counter() - start
                totals[i] += seconds
                processor[i] += time.process_time() - busy
                line += f"{seconds:12.2f}"
            line += "" if given.no_reference else f"{check():9.2f}"
        except Exception as error:  # the table goes on; the exit status says that something is wrong
            wrong += 1
            line += f"  {type(error).__name__}: {error}"
        print(line, flush=True)
    print(f"{'total':<64}" + "".join(f"{seconds:12.2f}" for seconds in totals))
    # more than the wall's where several cores work, less where other programs have them
    print(f"{'processor time':<64}" + "".join(f"{seconds:12.2f}" for seconds in processor))
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())

"""Measures how long the simulator takes: ``python benchmarks/simulator.py [--quick] [--json FILE]``. Needs no GPU.

It measures CPU seconds for the forty correctness shapes of four NVFP4 problems, with checks off and on, and wall
seconds for the translation of each kernel's PTX. They say nothing about a GPU. CPU seconds (``cpu``) are those of all
threads, user and system; beside other work they change less than wall seconds do.
"""

from __future__ import annotations

import os

# one thread: numpy's threads must not compete with each other; numpy reads these on import
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import host

from cute_nvfp4.sim.frontend.parse import parse_module
from cute_nvfp4.sim.program import Program
from tests.simulator.blackwell import programs
from tests.simulator.blackwell.cases import forty

QUICK = 4


def translations() -> dict[str, float]:
    """Wall seconds from PTX text to executable blocks, the best of three, for each kernel."""
    kernels = {
        "gemm": programs.compile_gemm(programs.GEMM_TILE),
        "dual": programs.compile_gemm(programs.DUAL_TILE),
        "group": programs.compile_group(programs.GEMM_TILE),
        "pair": programs.compile_pair(programs.PAIR_TILE),
    }
    out = {}
    for name, kernel in kernels.items():
        times = []
        for _ in range(3):
            start = time.perf_counter()
            program = Program(parse_module(kernel.ptx))
            for entry in program.kernels:
                program.kernel(entry)
            times.append(time.perf_counter() - start)
        out[name] = min(times)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only every {QUICK}th shape")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    record = {
        **host(),
        "translation_s": translations(),
        "shapes": [],
    }
    for name, seconds in record["translation_s"].items():
        print(f"translating {name}: {seconds:.3f} s")
    print(f"{'shape':<64}{'checks off':>12}{'checks on':>12}   seconds of the processor")
    keys = ("checks_off_s", "checks_on_s", "checks_off_cpu_s", "checks_on_cpu_s")
    totals = dict.fromkeys(keys, 0.0)
    for case in forty("full")[:: QUICK if given.quick else 1]:
        run, check = case.prepare()
        wall, cpu = [], []
        for checks in (False, True):
            start, busy = time.perf_counter(), time.process_time()
            run(checks=checks)
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - busy)
        check()
        times = dict(zip(keys, (*wall, *cpu)))
        totals = {key: totals[key] + times[key] for key in keys}
        record["shapes"].append({"shape": str(case), **times})
        print(f"{case!s:<64}{cpu[0]:12.2f}{cpu[1]:12.2f}", flush=True)
    print(f"{'total':<64}{totals['checks_off_cpu_s']:12.2f}{totals['checks_on_cpu_s']:12.2f}")
    record["total"] = totals
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

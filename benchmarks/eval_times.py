"""Measures time and memory of ``cute-nvfp4 eval``: ``python benchmarks/eval_times.py``. Needs no GPU.

For each problem it evaluates the package's own submission on a simulated B200, each command in its own process: case 0
of the correctness shapes, all ten, and with ``--benchmark`` the contest's benchmark shapes with their modelled times.
Seconds are wall time and the CPU time of all processes; memory is the largest resident size of one process. A first
call has already compiled the kernels to disk. The figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PROBLEMS = ("nvfp4_gemv", "nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm")
COMMANDS = {
    "smallest shape": ["--case", "0"],
    "ten shapes": [],
    "ten shapes, data full": ["--data", "full"],
    "benchmark": ["--mode", "benchmark"],
}


def worker(problem: str, options: list[str]) -> dict[str, Any]:
    """The seconds and the memory of one command, which runs as the only child of this process."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "cute_nvfp4", "eval", problem, "--arch", "sm_100a", "--backend", "sim"]
        begin = time.perf_counter()
        done = subprocess.run([*command, *options, "--json", file.name], cwd=ROOT, capture_output=True, check=False)
        wall = time.perf_counter() - begin
        result = json.loads(Path(file.name).read_text())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    counted = [case["counters"]["instructions"] for case in result["cases"] if case["counters"]]
    return {
        "code": done.returncode,
        "wall_s": wall,
        "cpu_s": used.ru_utime + used.ru_stime,
        "memory_bytes": used.ru_maxrss * 1024,
        "cases": len(result["cases"]),
        "instructions": sum(counted),
        "slowest_case_s": max(case["wall_s"] for case in result["cases"]),
    }


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--commands", nargs="*", choices=[*COMMANDS], default=[x for x in COMMANDS if x != "benchmark"])
    parser.add_argument("--benchmark", action="store_true", help="also the contest's benchmark shapes: many minutes")
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/eval_times_cpu.json)")
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker[0], options.worker[1:])))
        return 0
    from common import RESULTS, host, write

    path = options.output or RESULTS / "eval_times_cpu.json"
    record = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    record |= host()
    for problem in options.problems:
        for name in [*options.commands, *["benchmark"] * options.benchmark]:
            command = [sys.executable, __file__, "--worker", problem, *COMMANDS[name]]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
            if done.returncode:
                raise SystemExit(f"{problem}, {name}: {done.stderr}")
            row = json.loads(done.stdout.splitlines()[-1])
            record["rows"].setdefault(problem, {})[name] = row
            write(record, path)
            print(f"{problem:>18} {name:>22} {row['wall_s']:7.1f} s  processor {row['cpu_s']:7.1f} s  "
                  f"{row['memory_bytes'] / 1e9:5.2f} GB  {row['instructions']:,} instructions", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tries ``eval`` on this machine's GPU: each problem in mode leaderboard, a benchmark, and cheats; prints a line for
each.

``python tests/gpu/judge_tried.py`` takes some minutes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHEATS = Path(__file__).parents[1] / "cheats"
PROBLEMS = ("nvfp4_gemv", "nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm")
NAMES = ("rewritten_tolerances", "answers_on_disk", "thread_after_the_clock", "lazy_outputs", "host_torch")
LIMIT_S = 120


def tried(*words: str) -> None:
    """Runs ``eval`` and prints its seconds, exit code, score, layers, and each case's verdict, error and time."""
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-m", "cute_nvfp4", "eval", *words, "--backend", "cuda", "--json", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"over {LIMIT_S} s", *words, flush=True)
            return
        said = json.loads(out.read_text()) if out.exists() else {}
    cases = [(case["verdict"], case["error"][:100], case["gpu"]) for case in said.get("cases", [])]
    print(f"{time.time() - begin:6.1f} s, exit {done.returncode}", *words, said.get("score_us"), said.get("isolation"))
    for case in cases:
        print("   ", *case)
    if not cases:
        print(done.stdout[-1500:], done.stderr[-1500:], flush=True)


def main() -> None:
    for problem in PROBLEMS:
        tried(problem, "--mode", "leaderboard")
    tried("nvfp4_gemv", "--mode", "test", "--case", "0")
    tried("nvfp4_gemv", "--mode", "benchmark", "--case", "2")
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(CHEATS / "submissions" / "honest.py", folder)
            submission = shutil.copy(CHEATS / "isolation" / f"{name}.py", Path(folder) / "submission.py")
            tried("nvfp4_gemv", str(submission), "--mode", "benchmark", "--task", str(CHEATS / "tiny.yml"))


if __name__ == "__main__":
    main()

"""Records a Hopper GPU's results for random products, as a reference for the simulator.

    python tests/gpu/record_products.py tests/data/h200_products.npz             on the GPU: runs and records them
    python tests/gpu/record_products.py tests/data/h200_products.npz --check     anywhere: runs all in the simulator

With ``--part I/N`` it records every Nth problem: N processes compile in parallel; ``--check`` takes all their files.

Seeds determine the problems (``hopper_products``). The file has digests of their data and of the PTX that ran, digests
of all bits of exact results, and some elements of other results, which must agree within 2⁻²⁰ of their sums of absolute
products.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.record_gemv import about
from support.hopper_products import PLACES, Case, Problem, bits, digest, kernels_of, random_case


class Outcome(NamedTuple):
    """The comparison of one problem. error: the difference, or "". same_ptx: whether the simulator ran the GPU's
    PTX."""

    case: Case
    error: str
    same_ptx: bool


def record(path: Path, count: int, device: str, only: Container[int] | None = None) -> None:
    """Runs problems 0 … count − 1, or only some of them, and writes ``path``."""
    problems, kept = [], np.zeros((count, PLACES), np.float32)
    for seed in range(count):
        if only is not None and seed not in only:
            problems.append({})
            continue
        problem = Problem(random_case(seed), device)
        with kernels_of(device) as kernels:
            out = problem.run()
        found: dict[str, Any] = {"inputs": problem.inputs, "kernels": [digest(ptx) for ptx in kernels]}
        if problem.case.exact:
            found["bits"] = bits(out)
        else:
            kept[seed] = problem.kept(out)
        problems.append(found)
    header = {"about": about("sim" if device == "cpu" else "cuda"), "problems": problems}
    np.savez_compressed(path, header=np.frombuffer(json.dumps(header).encode(), np.uint8), kept=kept)


class Recorded:
    """The content of a recording: a file with all problems, or files with parts of them."""

    def __init__(self, *paths: Path) -> None:
        self.problems: list[dict[str, Any]] = []
        for path in paths:
            with np.load(path, allow_pickle=False) as archive:
                header, kept = json.loads(archive["header"].tobytes()), archive["kept"]
            if not self.problems:
                self.about, self.kept, self.problems = header["about"], kept, header["problems"]
            for seed, found in enumerate(header["problems"]):
                if found:
                    self.problems[seed], self.kept[seed] = found, kept[seed]

    def check(self, seed: int) -> Outcome:
        """Problem ``seed`` in the simulator, compared with what was recorded."""
        case, found = random_case(seed), self.problems[seed]
        problem = Problem(case, "cpu")
        if problem.inputs != found["inputs"]:
            return Outcome(case, "other data than what was recorded", False)
        with kernels_of("cpu") as kernels:
            out = problem.run()
        same = [digest(ptx) for ptx in kernels] == found["kernels"]
        if case.exact:
            return Outcome(case, "" if bits(out) == found["bits"] else "other bits", same)
        off = np.abs(problem.kept(out).astype(np.float64) - self.kept[seed]) / problem.magnitudes()
        worst = float(off.max())
        return Outcome(case, "" if worst <= 2.0**-20 else f"off by 2**{np.log2(worst):.1f} of the products", same)


def check(*paths: Path) -> int:
    """Runs problem ``seed`` in the simulator, and compares it with the recording."""
    recorded = Recorded(*paths)
    outcomes = [recorded.check(seed) for seed, found in enumerate(recorded.problems) if found]
    for outcome in outcomes:
        if outcome.error:
            print(f"{outcome.case}: {outcome.error}")
    wrong = sum(bool(x.error) for x in outcomes)
    same = sum(x.same_ptx for x in outcomes)
    exact = sum(x.case.exact for x in outcomes)
    print(
        f"{len(outcomes)} problems of {recorded.about['device']}, {exact} of them exact; "
        f"{same} on the PTX that ran there; {wrong} differ"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--part", default="0/1", metavar="I/N", help="record problems I, I + N, …")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run in the simulator")
    arguments = parser.parse_args()
    if arguments.check:
        return bool(check(*arguments.path))
    (path,) = arguments.path
    index, step = map(int, arguments.part.split("/"))
    only = range(index, arguments.count, step)
    record(path, arguments.count, arguments.device, only)
    print(f"{len(only)} problems: {path}, {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

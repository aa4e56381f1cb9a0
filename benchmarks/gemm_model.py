"""Models the times of the GEMM kernels for the benchmark shapes: ``python benchmarks/gemm_model.py``. Measures nothing.

For each shape it has the plan that the model picks for a B200 and the plan's modelled time
(``planning/gemm_model.py``), beside the published speed of light, the time at the best published rates, and the best
public result. Analytic formulas count bytes and MMA work, or the simulator does (``from_counters``). Writes
``results/gemm_model.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cute_nvfp4.planning.gemm import GemmProblem, Plan, candidates, predict_plan
from cute_nvfp4.planning.gemm_model import LABEL, Prediction
from cute_nvfp4.target import ARCHITECTURES, Architecture

if TYPE_CHECKING:
    from cute_nvfp4.sim.observe.result import Result

RESULTS = Path(__file__).resolve().parent / "results" / "gemm_model.json"


@dataclasses.dataclass(frozen=True)
class Case:
    """A benchmark shape, and the figures that others published for it, in microseconds."""

    benchmark: str
    problem: GemmProblem
    best_public_us: float


CASES = (
    Case("nvfp4_gemm", GemmProblem(128, 7168, 16384), 18.3),
    Case("nvfp4_gemm", GemmProblem(128, 4096, 7168), 8.29),
    Case("nvfp4_gemm", GemmProblem(128, 7168, 2048), 6.54),
    Case("nvfp4_dual_gemm", GemmProblem(256, 4096, 7168, products=2, gate="silu"), 12.4),
    Case("nvfp4_dual_gemm", GemmProblem(512, 4096, 7168, products=2, gate="silu"), 16.4),
    Case("nvfp4_dual_gemm", GemmProblem(256, 3072, 4096, products=2, gate="silu"), 9.43),
    Case("nvfp4_dual_gemm", GemmProblem(512, 3072, 7168, products=2, gate="silu"), 16.3),
)


def from_counters(result: Result, plan: Plan, problem: GemmProblem, sm_count: int) -> Prediction:
    """The model's time of a launch that the simulator ran with counters on: its L2 counted bytes of DRAM, including
    dirty lines at the end; its tensor cores counted floating-point operations."""
    if result.l2 is None or not result.mma:
        raise ValueError("the result has no traffic or no matrix work: run the launch with counters on")
    moved = result.l2.read_bytes + result.l2.written_bytes + result.l2.dirty_bytes
    work = 2.0 * sum(counter.multiply_adds for counter in result.mma)
    return predict_plan(plan, problem, sm_count, dram_bytes=moved, mma_flops=work)


def simulated(plan: Plan, problem: GemmProblem, sm_count: int) -> Prediction:
    """Runs the plan once in the simulator, checks off and counters on, and models the time from the counts."""
    from cute_nvfp4.harness.tuning import operands, output
    from cute_nvfp4.ops.gemm import gemm
    from cute_nvfp4.runtime.simulating import simulating

    a, b = operands(problem, "cpu")
    with simulating(counters=True, checks=False) as runs:
        gemm(a, b, out=output(problem, "cpu"), config=plan, backend="sim")
    (result,) = [run.result for run in runs]
    return from_counters(result, plan, problem, sm_count)


def row(case: Case, prediction: Prediction, plan: Plan, source: str) -> dict:
    """One line of the record. source: "analytic" or "simulator", which counted bytes and matrix work."""
    p, least = case.problem, case.problem.minimum
    told = {"us": prediction.us, **dataclasses.asdict(prediction), "bound": prediction.bound}
    terms = {k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}
    return {
        "benchmark": case.benchmark,
        "shape": {"m": p.m, "n": p.n, "k": p.k, "l": p.batch},
        "model_us": round(prediction.us, 2),
        "counted_by": source,
        "speed_of_light_us": round(least.speed_of_light_us, 3),
        "best_rates_us": round(least.ceiling_us, 3),
        "best_public_us": case.best_public_us,
        "plan": str(plan),
        "dram_bytes_over_least": round(prediction.dram_bytes / least.bytes, 4),
        "terms": terms,
    }


def record(arch: Architecture, simulate: bool = False) -> dict:
    """The record of all cases. simulate: the simulator counts where the operation is ``gemm``."""
    rows = []
    for case in CASES:
        plan = candidates(case.problem, arch, arch.sm_count)[0]
        if simulate and case.problem.products == 1:
            print(f"simulating {case.problem}", file=sys.stderr)
            rows.append(row(case, simulated(plan, case.problem, arch.sm_count), plan, "simulator"))
        else:
            rows.append(row(case, predict_plan(plan, case.problem, arch.sm_count), plan, "analytic"))
    return {
        "label": LABEL,
        "note": "modelled times of a B200, one launch, L2 cold: nothing was measured. Public results are by others.",
        "multiprocessors": arch.sm_count,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="results file")
    parser.add_argument("--json", action="store_true", help="print the record instead of a table")
    parser.add_argument("--simulate", action="store_true", help="count by running gemm in the simulator (minutes)")
    options = parser.parse_args()
    found = record(ARCHITECTURES["sm_100a"], options.simulate)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(
        f"{found['note']}\n{'':17} {'m, n, k':>18} {'model':>6} {'light':>6} {'rates':>6} {'public':>6}  bound    plan"
    )
    for r in found["rows"]:
        shape = ", ".join(str(r["shape"][x]) for x in "mnk")
        times = " ".join(f"{r[x]:6.2f}" for x in ("model_us", "speed_of_light_us", "best_rates_us", "best_public_us"))
        print(f"{r['benchmark']:17} {shape:>18} {times}  {r['terms']['bound']:8} {r['counted_by']:9} {r['plan']}")


if __name__ == "__main__":
    main()

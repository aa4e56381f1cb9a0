"""Models what our kernels, and programs that others build on, would take on a B200: ``python benchmarks/ours_b200.py``.

Nothing is measured: the simulator's clock executes and times each launch, as in ``timing_b200.py``, with an empty
kernel's duration as the cost of a launch. Beside it stand the published times of other programs at the same sizes, and
the speed of light of the contest's statement; neither says how accurate the clock is.

- contest: our submissions at the contest's benchmark shapes, and what public submissions build on: for GEMM NVIDIA's
  example (``CUTLASS_EXAMPLES``: a copy), for groups FlashInfer's masked GEMM, with tiles of one CTA and of a pair, and
  NVIDIA's example, whose kernel writes its tensor maps;
- decode: NVFP4 weights times one row, by ``gemv`` and by ``gemm``; large: ``gemm`` of MXFP4; w4a16: bfloat16 times a
  prepared NVFP4 weight (docs/explanation/packed_blackwell.md has the table).

The record ``results/ours_modelled_b200.json`` is written after every launch, and a second call continues it;
``--write`` writes the tables into benchmarks/records/timing_checked.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published import FLASHINFER, records
from timing_b200 import PAGE, beside, timings, version, versions

from cute_nvfp4.harness.evaluation import Options, task_of
from cute_nvfp4.harness.schema import Case

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "ours_modelled_b200.json"
PROGRAM = HERE / "b200_launches.py"
EXAMPLES = Path("cute", "blackwell", "kernel")
DENSE = EXAMPLES / "blockscaled_gemm" / "dense_blockscaled_gemm_persistent.py"
GROUPED = EXAMPLES / "blockscaled_grouped_gemm" / "grouped_blockscaled_gemm.py"
PROBLEMS = ("nvfp4_gemv", "nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm")
NVFP4 = ("--sf_dtype", "Float8E4M3FN", "--sf_vec_size", "16", "--c_dtype", "Float16", "--skip_ref_check")


class Launch(NamedTuple):
    """A launch: its table, its name there, its program, the program's file and arguments."""

    table: str
    name: str
    program: str
    file: Path
    arguments: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.table} {self.name} {self.program}"


def launches() -> list[Launch]:
    out = []
    for problem in PROBLEMS:
        for number, case in enumerate(task_of(Options(problem=problem)).benchmarks):
            name = shape(problem, case)
            out.append(Launch("contest", name, "ours", PROGRAM, ("contest", f"problem={problem}", f"case={number}")))
            if problem in ("nvfp4_gemm", "nvfp4_group_gemm"):
                out += [Launch("contest", name, of, *_public(case, of == "pair")) for of in ("one CTA", "pair")]
            if problem == "nvfp4_group_gemm":
                out.append(Launch("contest", name, "maps", PROGRAM, _maps(case)))
    for r in records("nvfp4_decode_b200.csv"):
        name, sizes = f"{r['n']} x {r['k']}", (f"n={r['n']}", f"k={r['k']}")
        out += [
            Launch("decode", name, "gemv", PROGRAM, ("gemv", *sizes)),
            Launch("decode", name, "gemm", PROGRAM, ("gemm", "m=1", *sizes)),
        ]
    for r in records("mxfp4_dense_b200.csv"):
        sizes = tuple(f"{key}={r[key]}" for key in "mnk")
        name = " x ".join(r[key] for key in "mnk")
        out.append(Launch("large", name, "gemm", PROGRAM, ("gemm", *sizes, "kind=mxfp4", "out=float32")))
    for r in records("w4a16_b200.csv"):
        name = " x ".join(r[key] for key in "mnk")
        out.append(Launch("w4a16", name, "gemm", PROGRAM, ("packed", *(f"{key}={r[key]}" for key in "mnk"))))
    return out


def shape(problem: str, case: Case) -> str:
    """The sizes of a case; sizes that all groups share stand once."""
    words = [problem.removeprefix("nvfp4_")]
    for key, value in case.items():
        if key not in ("seed", "g"):
            each = list(dict.fromkeys(value)) if isinstance(value, list) else [value]
            words.append(f"{key}={'/'.join(map(str, each if len(each) == 1 else value))}")
    return " ".join(words)


def _public(case: Case, pair: bool) -> tuple[Path, tuple[str, ...]]:
    """NVIDIA's dense example (for a pair with its operands swapped), or FlashInfer's masked GEMM for groups."""
    if isinstance(case["m"], list):
        point = f"{case['n'][0]}x{case['k'][0]}:" + "/".join(map(str, case["m"]))
        return FLASHINFER, ("grouped_gemm_published", f"points={point}", f"pair={pair}")
    sizes = (case["n"], case["m"]) if pair else (case["m"], case["n"])
    words = [*_example(DENSE), "--a_dtype", "Float4E2M1FN", "--b_dtype", "Float4E2M1FN"]
    words += ["--mma_tiler_mn", "256,128" if pair else "128,128", "--cluster_shape_mn", "2,1" if pair else "1,1"]
    words += ["--c_major", "m" if pair else "n", "--mnkl", ",".join(map(str, (*sizes, case["k"], 1)))]
    return PROGRAM, tuple(words)


def _maps(case: Case) -> tuple[str, ...]:
    """Arguments of NVIDIA's grouped example, with tiles of 128 x 128 by one CTA."""
    sizes = ",".join(f"({m},{n},{k},1)" for m, n, k in zip(case["m"], case["n"], case["k"]))
    words = ("--num_groups", str(len(case["m"])), "--problem_sizes_mnkl", sizes)
    return (*_example(GROUPED), *words, "--mma_tiler_mn", "128,128", "--cluster_shape_mn", "1,1")


def _example(file: Path) -> list[str]:
    return ["example", str(Path(os.environ.get("CUTLASS_EXAMPLES", ""), file)), *NVFP4]


def modelled(launch: Launch) -> dict[str, Any]:
    """The clock's result, from a separate process; or the reason why the clock refuses."""
    found = timings(launch.file, list(launch.arguments))
    if len(found) == 1:
        return found[0]
    return {"refused": f"{len(found)} launches have a time", "clock": version()}


def bound(found: dict[str, Any]) -> str:
    """What bounds each quarter of the launch."""
    return " · ".join(phase["bound_by"] for phase in found["phases"])


def gain(found: dict[str, Any]) -> str:
    """The change that would save most of the launch's time, and how much."""
    saved = found.get("gains") or {"": 0.0}
    most = max(sorted(saved), key=saved.__getitem__)
    return f"{most}: {saved[most]:.2f}" if most else ""


def us(found: dict[str, Any] | None) -> str:
    return "" if found is None else "refused" if "refused" in found else f"{found['modelled_us']:.2f}"


def tables(record: dict[str, Any]) -> dict[str, list[str]]:
    """The three tables in Markdown."""
    found = {launch: record[launch.key] for launch in launches() if launch.key in record}
    by = {(launch.table, launch.name, launch.program): value for launch, value in found.items()}
    heads = ("problem, shape", "ours, modelled", "bound by, quarter by quarter", "would save most, µs")
    heads += ("public, one CTA", "public, pair", "public, maps", "speed of light", "best public")
    contest = ["| " + " | ".join(heads) + " |"]
    contest += ["|---|---|---|---|---|---|---|---|---|"]
    for problem in PROBLEMS:
        task, mine = task_of(Options(problem=problem)), []
        light, best = task.speed_of_light.microseconds, task.public_results.microseconds
        for number, case in enumerate(task.benchmarks):
            name = shape(problem, case)
            ours = by.get(("contest", name, "ours"))
            if ours is None or "refused" in ours:
                continue
            mine.append(ours["modelled_us"])
            others = " | ".join(us(by.get(("contest", name, of))) for of in ("one CTA", "pair", "maps"))
            contest.append(
                f"| {name} | {us(ours)} | {bound(ours)} | {gain(ours)} | {others} | {light[number]:.2f} "
                f"| {best[number]:.2f} |"
            )
        if len(mine) == len(task.benchmarks):
            means = f"{statistics.geometric_mean(light):.2f} | {statistics.geometric_mean(best):.2f}"
            contest.append(
                f"| **{problem.removeprefix('nvfp4_')}, geometric mean** | **{statistics.geometric_mean(mine):.2f}** "
                f"| | | | | | {means} |"
            )
    decode = ["| N x K | gemv, modelled | gemm of a row, modelled | Helion, published | vLLM's CUTLASS, published |"]
    decode += ["|---|---|---|---|---|"]
    for r in records("nvfp4_decode_b200.csv"):
        name = f"{r['n']} x {r['k']}"
        mine = " | ".join(us(by.get(("decode", name, program))) for program in ("gemv", "gemm"))
        decode.append(f"| {name} | {mine} | {r['helion']} | {r['cutlass']} |")
    large = ["| M x N x K | gemm, modelled | DeepGEMM, published | cuBLASLt, published |", "|---|---|---|---|"]
    for r in records("mxfp4_dense_b200.csv"):
        name = " x ".join(r[key] for key in "mnk")
        work = 2 * int(r["m"]) * int(r["n"]) * int(r["k"]) / 1e6
        published = " | ".join(f"{work / float(r[key]):.2f}" for key in ("deepgemm", "cublas"))
        large.append(f"| {name} | {us(by.get(('large', name, 'gemm')))} | {published} |")
    out = {"contest": contest, "decode": decode, "large": large}  # docs/modelled.py writes the table of w4a16
    for table, lines in out.items():
        if said := versions(value for launch, value in found.items() if launch.table == table):
            lines += ["", said.strip()]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only launches whose names contain TEXT")
    parser.add_argument("--report", action="store_true", help="execute nothing")
    parser.add_argument("--stale", action="store_true", help="also launches that another version of the clock timed")
    parser.add_argument("--again", action="store_true", help="also launches that this version of the clock timed")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--write", action="store_true", help="the tables into benchmarks/records/timing_checked.md")
    given = parser.parse_args()
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    left = []
    for launch in launches():
        done = launch.key in record and (not given.stale or record[launch.key]["clock"] == version())
        if not given.report and given.only in launch.key and (given.again or not done):
            left.append(launch)
    places = {launch.key: number for number, launch in enumerate(launches())}
    for launch, found in beside(given.jobs, modelled, left):
        record[launch.key] = found
        print(launch.key, us(found), flush=True)
        ordered = sorted(record.items(), key=lambda item: places.get(item[0], len(places)))
        RESULTS.write_text(json.dumps(dict(ordered), indent=1) + "\n")
    found = tables(record)
    print("\n\n".join("\n".join(lines) for lines in found.values()))
    if given.write:
        for name, lines in found.items():
            mark = f"<!-- ours_b200.py --write {name} -->"
            before, _, after = PAGE.read_text().split(mark)
            PAGE.write_text(mark.join((before, "\n" + "\n".join(lines) + "\n", after)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

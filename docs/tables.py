"""Writes the tables and counts of the pages from records: ``python docs/tables.py --write``.

A page has ``<!-- table: NAME -->`` … ``<!-- table: end -->`` around a table, and ``<!-- count: NAME -->`` … ``<!-- end
-->`` around a number. Without ``--write`` the script lists the pages that differ from their records and exits with 1; a
test does the same. Records are ``benchmarks/results/*.json``, ``tests/data``, and for ``support`` the package's own
answers.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "docs")]
import json_tables  # noqa: E402
import judging  # noqa: E402
import measured_tables  # noqa: E402
import memory_tables  # noqa: E402
import messages  # noqa: E402
import modelled  # noqa: E402
import parallel_tables  # noqa: E402
import problem_tables  # noqa: E402
import row_ranges  # noqa: E402
import summaries  # noqa: E402
from measured_tables import record  # noqa: E402
from side_by_side import of_products, side_by_side  # noqa: E402

TABLE = re.compile(r"<!-- table: (\w[\w-]*) -->\n(.*?)<!-- table: end -->", re.DOTALL)
COUNT = re.compile(r"<!-- count: (\w[\w-]*) -->(.*?)<!-- end -->")


def results(calls: tuple[str, ...] = ("",)) -> str:
    """Every operation on two GPUs, an H200's first: records of ``benchmarks/overview.py``, or the products that
    ``gemm.py`` measures in the same way. calls: the table has the calls whose names begin so; all by default."""
    found = sorted((ROOT / "benchmarks" / "results").glob("overview_*.json"), reverse=True)
    records = [record(path.stem) for path in found]
    if not any("H200" in of["gpu"] for of in records):
        records.insert(0, of_products(record("gemm_nvidia_h200")))
    return side_by_side(records, calls)


IN_SHORT = (
    "`gemv` 7168 × 16384",
    *(f"`gemm` {m} × 8192 × 8192, bf16" for m in (1, 16, 128, 256)),
    *(f"`gemm` {m} × 8192 × 8192, rows" for m in (128, 256)),
    "`gemm` 2048 × 8192 × 8192",
    "`gated_gemm`",
    "`grouped_gemm",
    "`quantize` 8192 × 8192 bf16, rule `four_six_mse`",
    *(f"`moe` Qwen3-30B-A3B, {tokens} token" for tokens in (1, 64)),
    "Llama-3.1-8B's shape",
)
"""Beginnings of the calls' names in the README's table: one of each kind, and calls where a peer is as fast."""


def results_in_short() -> str:
    """The README's rows of ``results``."""
    return results(IN_SHORT)


def support() -> str:
    """The support matrix, from the package's answers."""
    from support_matrix import markdown

    return markdown()


def shapes() -> str:
    """Which M, N and K each call takes, from the package's answers."""
    from limits import markdown

    return markdown()


def first_call() -> str:
    """What the first call of an operation costs, a table for each machine."""
    found = sorted((ROOT / "benchmarks" / "results").glob("first_call_*.json"))
    return "\n".join(judging.first_call(record(path.stem)) for path in found)


def eval_times() -> str:
    """What ``cute-nvfp4 eval`` takes."""
    return judging.eval_times(record("eval_times_cpu"), record("eval_benchmark_cpu"))


def leaderboard() -> str:
    """What a leaderboard run takes on a GPU."""
    return judging.leaderboard(record("leaderboard_nvidia_h200"))


def simulator() -> str:
    """How fast the simulator is."""
    return judging.simulator(record("simulator_cpu"))


def notebooks() -> str:
    """How long notebooks take."""
    return judging.notebooks(record("notebooks_cpu"))


def w4a8_layers() -> str:
    """Errors of a real model's layers by width of activations."""
    import accuracy_w4a8_layers

    return accuracy_w4a8_layers.table(record("accuracy_w4a8_layers")) + "\n"


def w4a8_parts() -> str:
    """How a scale for each 128 of K changes errors of W4A8."""
    import accuracy_w4a8_layers

    return accuracy_w4a8_layers.table_of_parts(record("accuracy_w4a8_parts")) + "\n"


def fingerprints() -> str:
    """How many kernels have a fingerprint of their PTX."""
    return str(len(json.loads((ROOT / "tests" / "data" / "ptx_fingerprints.json").read_text())["kernels"]))


def programs() -> str:
    """How many programs of other libraries are in the record of ``tests/public/run_libraries.py``."""
    return str(len(json.loads((ROOT / "tests" / "public" / "libraries.json").read_text())["programs"]))


_OF_THE_PACKAGE = (support, shapes, summaries.api, summaries.sim_api, summaries.harness_api, summaries.all_arguments)
_OF_RECORDS = (
    results,
    results_in_short,
    first_call,
    eval_times,
    leaderboard,
    simulator,
    notebooks,
    w4a8_layers,
    w4a8_parts,
)
TABLES: dict[str, Callable[[], str]] = {f.__name__: f for f in (*_OF_THE_PACKAGE, *_OF_RECORDS)}
TABLES |= measured_tables.TABLES | {
    "json_outputs": json_tables.outputs,
    "json_records": json_tables.records,
    "plans": lambda: modelled.plans(record("gemm_model")),
    "clock": modelled.clock,
    "clocked": modelled.clocked,
    "b200_w4a16": lambda: modelled.w4a16(record("ours_modelled_b200")),
    "extreme_fuzz": lambda: judging.extreme_fuzz(record("extreme_fuzz")),
    "row_ranges": row_ranges.markdown,
    "commands": summaries.commands,
    "gates": summaries.gates,
    "sim_arguments": summaries.sim_arguments,
    "tolerances": judging.tolerances,
    "errors_products": messages.of_products,
    "errors_quantize": messages.of_quantize,
    "errors_machines": messages.of_machines,
    "memory_weights": memory_tables.weights,
    "memory_scratch": memory_tables.scratch,
    "memory_model": lambda: memory_tables.model(record("generate_nvidia_h200")),
}
TABLES |= {f"problem_{f.__name__}": f for f in (problem_tables.data, problem_tables.benchmarks, problem_tables.tests)}
TABLES |= {f"parallel-{name}": functools.partial(parallel_tables.of_records, name) for name in parallel_tables.TABLES}
COUNTS: dict[str, Callable[[], str]] = {f.__name__: f for f in (fingerprints, programs)}
COUNTS |= {"clock_error": modelled.error, "launch_us": modelled.launch_us}
COUNTS |= {f.__name__: f for f in (modelled.choice_loss, modelled.choice_worst)}


def pages() -> list[Path]:
    """The pages that may have a table."""
    found = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        ROOT / "notebooks/README.md",
    ]
    return sorted(path for path in found if "_site" not in path.parts)


def written(text: str) -> str:
    """A page's text with every table and count as its record has it now. Raises KeyError for an unknown name."""
    text = TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n{TABLES[m[1]]()}<!-- table: end -->", text)
    return COUNT.sub(lambda m: f"<!-- count: {m[1]} -->{COUNTS[m[1]]()}<!-- end -->", text)


def differences() -> list[str]:
    """A line for each page whose tables or counts differ from the records."""
    found = [page for page in pages() if written(text := page.read_text(encoding="utf-8")) != text]
    return [
        f"{page.relative_to(ROOT)}: a table differs from its record: python docs/tables.py --write" for page in found
    ]


def main() -> int:
    """Writes or compares the pages. Returns the exit code: 1 if a page differs and is not written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    if not parser.parse_args().write:
        print("\n".join(found := differences()) or "every table agrees with its record")
        return bool(found)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

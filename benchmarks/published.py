"""Times of a B200 or B300 that others have published (``data/*.csv``), and the programs that they timed.

A ``Published`` is one such table. Its program is public: ``command`` runs it in the simulator at given points, one
timed launch for each, in their order. FlashInfer's programs need flashinfer-python; NVIDIA's need a copy of CUTLASS's
examples in ``CUTLASS_EXAMPLES`` (``examples/python/CuTeDSL``; the two files are byte for byte those that were timed).
"""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
FLASHINFER = HERE.parent / "tests" / "public" / "libraries" / "flashinfer_programs.py"
DENSE_GEMM = Path("cute", "blackwell", "kernel", "dense_gemm")


class Point(NamedTuple):
    """One launch: its sizes as text, unique in its table; the row of the report that it counts in; its published time
    in microseconds; the program's arguments for it."""

    name: str
    row: str
    us: float
    argument: str


ZEROS = {"l2.dirty_bytes": 1.5 * 132_644_864}
"""FlashInfer clears L2 (126.5 MiB) by writing zeros, which leaves its content dirty (``bench_gpu_time_with_cupti``, in
both tables)."""
GB200 = {"sms": 152, **ZEROS}
"""A GB200 has more SMs than a B200."""


class Published(NamedTuple):
    """A table of published times: its title, its points, the program's file and arguments for some of them, how many
    points one process runs, what the rows of the report are, the program's version, and how the GPU differs from a
    B200."""

    title: str
    points: Callable[[], list[Point]]
    command: Callable[[list[Point]], tuple[Path, list[str]]]
    together: int
    rows: str
    program: Callable[[], str]
    figures: dict[str, float]


def records(name: str) -> list[dict[str, str]]:
    """The lines of a file of ``data``."""
    lines = (HERE / "data" / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def dense() -> list[Point]:
    out = []
    for r in records("nvfp4_dense_gb200.csv"):
        name = f"{r['m']}x{r['n']}x{r['k']}"
        out.append(Point(name, f"M = {r['m']}", float(r["us"]), name))
    return out


def grouped() -> list[Point]:
    """The points of the grouped table. The rows of each group are drawn as the published benchmark draws them (the file
    says how); its TFLOPS agree."""
    generator, out = random.Random(42), []
    for r in records("nvfp4_grouped_b200.csv"):
        groups, expected = int(r["groups"]), int(r["rows"])
        rows = "/".join(str(int(expected * generator.uniform(0.7, 1.3))) for _ in range(groups))
        shape = f"{r['n']}x{r['k']}"
        out.append(Point(f"{groups}x{expected}x{shape}", f"{groups} groups", float(r["us"]), f"{shape}:{rows}"))
    return _named(out)


def bf16() -> list[Point]:
    out = []
    for r in records("bf16_dense_b300.csv"):
        shape, kind = f"{r['m']},{r['n']},{r['k']},1", r["variant"]
        out.append(Point(f"{kind} {shape[:-2].replace(',', 'x')}", kind, float(r["us"]), shape))
    return out


def _named(points: list[Point]) -> list[Point]:
    """Makes the names unique of points with equal sizes, which the published benchmark measured twice."""
    seen: dict[str, int] = {}
    out = []
    for p in points:
        seen[p.name] = seen.get(p.name, 0) + 1
        out.append(p if seen[p.name] == 1 else p._replace(name=f"{p.name} again"))
    return out


def _installed() -> str:
    return f"flashinfer-python {metadata.version('flashinfer-python')}"


def _flashinfer(*program: str) -> Callable[[list[Point]], tuple[Path, list[str]]]:
    return lambda points: (FLASHINFER, [*program, "points=" + ",".join(p.argument for p in points)])


def _example(points: list[Point]) -> tuple[Path, list[str]]:
    (point,) = points
    root = Path(os.environ.get("CUTLASS_EXAMPLES", ""), DENSE_GEMM)
    pair, persistent = point.row.endswith("2cta"), point.row.startswith("persistent")
    words = ["--mnkl", point.argument, "--ab_dtype", "BFloat16", "--c_dtype", "Float32", "--acc_dtype", "Float32"]
    words += ["--mma_tiler_mn", "256,128" if pair else "128,128", "--cluster_shape_mn", "2,1" if pair else "1,1"]
    words += ["--use_2cta_instrs"] if pair else []
    words += ["--use_tma_store", "--skip_ref_check"]
    return root / ("dense_gemm_persistent.py" if persistent else "dense_gemm.py"), words


TABLES = {
    "dense": Published(
        "NVFP4 GEMM of FlashInfer on a GB200",
        dense,
        _flashinfer("mm_fp4_published", f"sms={GB200['sms']}"),
        4,
        "M",
        _installed,
        GB200,
    ),
    "grouped": Published(
        "grouped NVFP4 GEMM of FlashInfer on a B200",
        grouped,
        _flashinfer("grouped_gemm_published"),
        1,
        "groups",
        _installed,
        ZEROS,
    ),
    "bf16": Published(
        "bf16 GEMMs of NVIDIA's examples on a B300", bf16, _example, 1, "program", lambda: "CUTLASS 4.6.1, examples", {}
    ),
}

"""Plans for a B200 that the simulator's clock decided: a table of the package, made by ``benchmarks/clocked_plans.py``.

No time in it is a measurement: each entry is marked as modelled, and names the version of the clock. The table holds
for NVFP4 operands and a row-major output of 16-bit elements in whole vectors, on a B200's 148 multiprocessors; the
analytic model alone decides any other problem. The user's own table (``gemm_table``) comes first.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from ..kernels.gemm.config import OUT_BYTES, GemmSignature
from ..target import Architecture
from .rates import SM_COUNT

FILE = Path(__file__).parent / "clocked_plans.json"
ARCH = "sm_100a"
Sizes = tuple[tuple[int, int, int], ...]


class Clocked(NamedTuple):
    """The clock's decision for a problem.

    products: those of the GEMM, 2 for a gated one. grouped: whether ``sizes`` are groups. swap, tiling: those of the
    plan. us: the kernel's time by the clock, without the launch. replaced_us: that of the analytic model's choice.
    modelled: always true. clock: the version of the clock.
    """

    products: int
    grouped: bool
    sizes: Sizes
    swap: bool
    tiling: dict[str, Any]
    us: float
    replaced_us: float
    modelled: bool
    clock: str


@functools.cache
def entries() -> dict[tuple[int, bool, Sizes], Clocked]:
    """The table, by products, grouped and sizes."""
    out = {}
    for raw in json.loads(FILE.read_text()):
        tiling = raw["tiling"] | {"cluster": tuple(raw["tiling"]["cluster"])}
        entry = Clocked(**raw | {"sizes": tuple(map(tuple, raw["sizes"])), "tiling": tiling})
        out[entry.products, entry.grouped, entry.sizes] = entry
    return out


def lookup(problem: GemmSignature, sizes: Sizes, arch: Architecture, sm_count: int, *, grouped: bool) -> Clocked | None:
    """The entry for a problem of these sizes (m, n, k), or None."""
    p = problem
    alike = p.a_format == p.b_format == "nvfp4" and OUT_BYTES[p.out] == 2 and p.out_major == "n" and p.vector
    if not alike or p.interleaved or (arch.name, sm_count) != (ARCH, SM_COUNT):
        return None
    return entries().get((p.products, grouped, sizes))

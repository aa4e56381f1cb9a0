"""The copies of a GEMM without its products, by number of CTAs: ``python benchmarks/microbench/rings.py``.

Every CTA brings the boxes of a 128 x 128 tile through a ring of six stages: B (128 rows of 128 bytes, a row of K / 2
bytes apart, or one behind the other), A (the same for all CTAs; of ``m`` rows, the others lie outside), and 2 KB of
scale factors of each. L2 is cold: clean (512 MB were read) or dirty (so many were written, as published measurements
do). Writes ``results/rings_nvidia_h200.json``: microseconds from the first CTA's start to the last one's end.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import machine, results_path, write
from device import Module, tensor_map

HERE = Path(__file__).resolve().parent
STAGES, SHARED, CALLS = 6, 6 * (36 << 10) + 1024, 9
COUNTS = (4, 16, 32, 40, 56, 72, 80, 112, 132)
STEPS = (28, 64)


class Ring(NamedTuple):
    """What is copied: ``parts`` (1: A, 2: its scale factors, 4: those of B), of A a tensor of ``m`` rows and boxes of
    ``rows`` from row ``first`` on, each CTA's ``own`` or one for all; cycles that a stage is held; ``packed`` boxes of
    B; bytes that L2 fetches at least."""

    parts: int
    m: int = 128
    hold: int = 256
    rows: int = 128
    first: int = 0
    own: bool = False
    packed: bool = False
    promotion: int = 128


RINGS = {
    "B": Ring(0, hold=0, promotion=0),
    "B, 256 bytes by L2": Ring(0, hold=0, promotion=256),
    "B, boxes one behind the other": Ring(0, hold=0, packed=True, promotion=0),
    **{f"all, m = {m}": Ring(7, m) for m in (1, 8, 64, 128)},
    "no A": Ring(6),
    "all, m = 1, A for each CTA": Ring(7, 1, own=True),
    "all, m = 1, A outside": Ring(7, 1, first=128),
    "all, m = 8 in boxes of 8": Ring(7, 8, rows=8),
    "A of 1 row and B": Ring(1, 1),
}


def measure(module: Module, out: torch.Tensor, flush: Any, grid: int, args: list[Any]) -> tuple[float, float]:
    """(median microseconds, median of how long the first CTA to end is done before the last)."""
    took, spread = [], []
    for _ in range(CALLS):
        flush()
        torch.cuda.synchronize()
        module.launch("ring", grid, 64, [out, *args], shared=SHARED)
        times = out[: 3 * grid].view(-1, 3).cpu()
        took.append((times[:, 1].max() - times[:, 0].min()).item() / 1e3)
        spread.append((times[:, 1].max() - times[:, 1].min()).item() / 1e3)
    return round(statistics.median(took), 3), round(statistics.median(spread), 3)


def rows() -> dict[str, Any]:
    module = Module((HERE / "rings.cu").read_text())
    out = torch.zeros(1024, dtype=torch.int64, device="cuda")
    data = torch.zeros(1 << 28, dtype=torch.bfloat16, device="cuda").random_()
    scales = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    other = torch.zeros(512 << 18, dtype=torch.int32, device="cuda")
    states = {"clean": other.sum, "dirty": other.zero_}
    found: dict[str, Any] = {}
    for steps, (kind, r) in itertools.product(STEPS, RINGS.items()):
        most = min(132, data.numel() // (steps * 64 * 128))
        b = data[: most * 128 * steps * 64].view(-1, 64 if r.packed else steps * 64)
        a = data[-most * steps * 64 :].view(1, -1) if r.own else data[-128 * steps * 64 :].view(128, -1)[: r.m]
        maps = [tensor_map(a, (r.rows, 64), r.promotion), tensor_map(b, (128, 64), r.promotion)]
        for state, flush in states.items():
            entry = found[f"{steps} steps, {kind}, {state}"] = {}
            for grid in (n for n in COUNTS if n <= most):
                args = [*maps, scales, steps, 1, STAGES, r.hold, r.parts, int(r.packed), int(r.own), r.first, r.rows]
                entry[str(grid)] = measure(module, out, flush, grid, args)
            cells = "  ".join(f"{n}:{us:.2f}({s:.1f})" for n, (us, s) in entry.items())
            print(f"{steps:4} steps, {kind:30} {state}: {cells}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    write(machine() | {"rings": rows()}, given.output or results_path("rings"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

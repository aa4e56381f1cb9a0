"""What L2 delivers where SMs ask for the same boxes, how late cold loads of all SMs are, and copies in a row:
``python benchmarks/microbench/shared_boxes.py``. Writes ``results/shared_boxes_nvidia_h200.json``.

Boxes: every CTA brings the same number of boxes of 16 KB by TMA, one after the other of ``boxes`` that lie in L2, so
that CTAs / boxes of them ask for one at a time. Loads: CTAs of four warps, chains of 16 cold loads 4 MB apart.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import machine, results_path, write
from copies import microseconds
from device import Module, tensor_map

HERE = Path(__file__).resolve().parent
MB, EACH, ROUNDS = 1 << 20, 256, 20
BOXES = (1, 2, 4, 8, 16, 33, 66, 132)
PERCENTILES = (1, 10, 50, 90, 99, 99.9, 100)


def boxes(sms: int) -> dict[str, float]:
    """TB/s that all SMs get, by how many boxes there are."""
    module, data = Module((HERE / "whole.cu").read_text()), torch.zeros(8 * MB, dtype=torch.bfloat16, device="cuda")
    source, found = tensor_map(data.view(-1, 64), (128, 64)), {}
    for count in BOXES:
        call = partial(module.launch, "same_boxes", sms, 32, [source, count, EACH], shared=129 << 10)
        time = microseconds(call)
        found[str(count)] = round(EACH * sms * 16384 / time / 1e6, 2)
    return found


def rows() -> dict[str, list[int]]:
    """Cycles of copies in a row by one thread, from L2: until it goes on, and until all are there."""
    module, found = Module((HERE / "tma.cu").read_text()), {}
    data, out = torch.zeros(MB, dtype=torch.bfloat16, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    for size in (128, 1024, 4096):
        of = {"bulk": data, "tile": tensor_map(data.view(-1, 64), (size // 128, 64))}
        for (kind, source), count in itertools.product(of.items(), (1, 2, 4, 8, 16)):
            for _ in range(2):
                module.launch(f"{kind}_row_{count}", 1, 32, [out, source, size], shared=65 << 10)
            found[f"{count} {kind} of {size} B"] = out.tolist()
    return found


def loads(sms: int) -> dict[str, dict[str, float]]:
    """Cycles of the first load of a warp, of all later ones, and of a warp's mean of the later ones."""
    module = Module((HERE / "whole.cu").read_text())
    data, out = (
        torch.zeros(80 * MB, dtype=torch.uint8, device="cuda"),
        torch.zeros(MB, dtype=torch.int32, device="cuda"),
    )
    other, first, later, means = torch.zeros(512 << 18, dtype=torch.int32, device="cuda"), [], [], []
    for _ in range(ROUNDS):
        other.sum()
        module.launch("chain_times", sms, 128, [out, data, 16, 4 * MB])
        rows = out[: sms * 4 * 16].view(-1, 16).float()
        first += rows[:, 0].tolist()
        later += rows[:, 1:].flatten().tolist()
        means += rows[:, 1:].mean(dim=1).tolist()
    return {"first": _spread(first), "later": _spread(later), "means of a warp": _spread(means)}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    found = {f"p{q}": round(ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))], 1) for q in PERCENTILES}
    return found | {"mean": round(statistics.mean(values), 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None)
    given, sms = parser.parse_args(), torch.cuda.get_device_properties(0).multi_processor_count
    found: dict[str, Any] = {"boxes_tb_s": boxes(sms), "loads_cycles": loads(sms), "rows_cycles": rows()}
    for name, entry in found.items():
        print(name, entry, flush=True)
    write(machine() | found, given.output or results_path("shared_boxes"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

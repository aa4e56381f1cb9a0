"""What a profiler says that an empty kernel takes, from its start to its end on the GPU: published times of kernels are
often such durations, without the launch. ``python benchmarks/microbench/durations.py`` writes
``results/durations_nvidia_h200.json``."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import machine, results_path, write
from device import Module

HERE = Path(__file__).resolve().parent
CALLS = 60


def durations(memory: Module, out: torch.Tensor, grid: int, block: int, shared: int, cluster: int) -> list[float]:
    """Microseconds of each of ``CALLS`` calls, as CUPTI has them, with L2 read over before each."""
    clear = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    memory.launch("empty_argument", grid, block, [out, 0], shared=shared, cluster=cluster)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(CALLS):
            clear.sum(dtype=torch.int64)
            torch.cuda.synchronize()
            memory.launch("empty_argument", grid, block, [out, 0], shared=shared, cluster=cluster)
            torch.cuda.synchronize()
    return [e.device_time for e in profile.events() if e.name.startswith("empty_argument")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    memory = Module((HERE / "memory.cu").read_text())
    out = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rows = {}
    for grid, block, shared, cluster in (
        (1, 32, 0, 1),
        (sms, 128, 0, 1),
        (sms, 384, 200 << 10, 1),
        (sms, 384, 200 << 10, 2),
    ):
        times = durations(memory, out, grid, block, shared, cluster)
        name = f"empty, grid {grid}, {block} threads, {shared >> 10} KB, cluster {cluster}"
        rows[name] = {
            "calls": len(times),
            "median_us": round(statistics.median(times), 3),
            "least_us": round(min(times), 3),
        }
        print(f"{name:50} {rows[name]}")
    write(machine() | {"durations": rows}, args.output or results_path("durations"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

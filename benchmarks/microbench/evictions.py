"""What leaves L2 when more is read than it holds: ``python benchmarks/microbench/evictions.py`` (an H200, and ncu).

A kernel reads so many MB in order, again and again. Nsight Compute counts the bytes that come from DRAM, L2 cold and
clean: those of the first time, and of each further time the share that L2 no longer had. Writes
``results/evictions_nvidia_h200.json``: that share, and microseconds of a further time, by size.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import machine, results_path, write
from device import Module

HERE = Path(__file__).resolve().parent
THREADS, UNROLL, AGAIN, CALLS = 512, 4, 3, 7
PARTS = (2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 32)
"""Sizes, in reads of all threads: 4.3 MB."""
COUNTER = "dram__bytes_read.sum"


def launches() -> Iterator[tuple[float, float]]:
    """(MB, microseconds of a further time) of each size; launches once, and then ``AGAIN`` times more, by size."""
    module = Module((HERE / "memory.cu").read_text())
    data, out = torch.zeros(1 << 28, dtype=torch.int32, device="cuda"), torch.zeros(1024, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for part in PARTS:
        vectors = part * sms * THREADS * UNROLL
        took: dict[int, list[float]] = {1: [], 1 + AGAIN: []}
        for _ in range(CALLS):
            for repeats, times in took.items():
                data[1 << 27 :].sum()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                module.launch(f"read_{UNROLL}", sms, THREADS, [out, data, vectors, repeats])
                end.record()
                end.synchronize()
                times.append(1e3 * begin.elapsed_time(end))
        once, often = map(statistics.median, took.values())
        yield vectors * 16 / 1e6, (often - once) / AGAIN


def counted() -> list[float]:
    """Bytes from DRAM of each launch of ``read``, in order."""
    command = ["ncu", "--csv", "--metrics", COUNTER, "--print-units", "base", "-k", f"read_{UNROLL}"]
    command += [sys.executable, __file__, "--launch"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    first = next(n for n, line in enumerate(said) if line.startswith('"ID"'))
    return [float(row["Metric Value"].replace(",", "")) for row in csv.DictReader(said[first:])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", action="store_true", help="only launch, once a size (for ncu)")
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    if given.launch:
        global CALLS
        CALLS = 1
        list(launches())
        return 0
    found, bytes_ = list(launches()), counted()
    rows = []
    for (mb, us), once, often in zip(found, bytes_[::2], bytes_[1::2], strict=True):
        rows.append({"mb": round(mb, 2), "us": round(us, 2), "share": round((often - once) / AGAIN / mb / 1e6, 4)})
        print(rows[-1], round(once / mb / 1e6, 3), flush=True)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    write(machine() | {"l2_bytes": l2, "evictions": rows}, given.output or results_path("evictions"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures what the simulator's clock needs to know of a GPU: ``python benchmarks/microbench`` (an H200, seconds).

Everything is measured alone, by kernels that do nothing else: no kernel that the clock predicts is among them. Prints
one table and writes ``benchmarks/results/microbench_<gpu>.json``. Exit codes: 0 done, 1 a part failed, 2 no such GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import copies  # noqa: E402
import fetch  # noqa: E402
import instructions  # noqa: E402
import launches  # noqa: E402
import pairs  # noqa: E402
import tensor  # noqa: E402
import torch  # noqa: E402
from common import machine, results_path, write  # noqa: E402
from device import Module  # noqa: E402

MADE = {"instructions": instructions, "pairs": pairs, "fetch": fetch, "tensor": tensor}


def sources() -> dict[str, str]:
    """Every CUDA source, by name."""
    texts = {name: (HERE / f"{name}.cu").read_text() for name in ("memory", "tma", "sync")}
    made = {name: part.source() for name, part in MADE.items()}
    return {**texts, **made}


def parts(data: torch.Tensor, sms: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is measured, in order."""
    text, made = sources(), {}
    out = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    other = torch.zeros(512 * copies.MB // 4, dtype=torch.int32, device="cuda")

    def module(name: str) -> Module:
        if name not in made:
            made[name] = Module(text[name])
        return made[name]

    def cold() -> None:
        other.sum()

    return {
        "launches": lambda: launches.measure(module("memory"), module("sync"), out, sms, cold),
        "latency": lambda: copies.latency(module("memory"), out, data, cold),
        "instructions": lambda: instructions.measure(module("instructions"), out),
        "pairs": lambda: pairs.measure(module("pairs"), out),
        "fetch": lambda: fetch.measure(module("fetch"), out, sms, cold),
        "shared": lambda: copies.shared(module("memory"), out),
        "barriers": lambda: launches.barriers(module("sync"), out),
        "tensor": lambda: tensor.measure(module("tensor"), out),
        "bandwidth": lambda: copies.bandwidth(module("memory"), out, data, sms),
        "whole launches": lambda: copies.whole_launches(module("memory"), module("tma"), out, data, sms, cold),
        "tma": lambda: copies.tma(module("tma"), out, data, sms, cold),
    }


def table(results: dict[str, dict[str, Any]]) -> None:
    for name, entry in results.items():
        cells = entry.items() if isinstance(entry, dict) else [("", entry)]
        print(f"  {name}: " + "  ".join(f"{key}={value}" for key, value in cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where the record goes")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("no GPU of compute capability 9.0: this measures one", file=sys.stderr)
        return 2
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    data = torch.zeros(4 << 27, dtype=torch.int64, device="cuda")  # 4 GB
    record: dict[str, Any] = {"machine": machine(), "results": {}, "seconds": {}}
    failed = 0
    for name, measure in parts(data, sms).items():
        begin = time.perf_counter()
        try:
            record["results"][name] = measure()
            torch.cuda.synchronize()
        except Exception:
            traceback.print_exc()
            failed = 1
            continue
        record["seconds"][name] = round(time.perf_counter() - begin, 1)
        print(f"{name} ({record['seconds'][name]} s)", flush=True)
        table(record["results"][name])
        write(record, options.output or results_path("microbench"))
    print(json.dumps(record["seconds"]))
    return failed


if __name__ == "__main__":
    sys.exit(main())

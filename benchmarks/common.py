"""What every benchmark needs: the GPU's target, facts of the machine for the record, the results path, timing in
turns."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import torch

from cute_nvfp4.errors import TargetError
from cute_nvfp4.harness.timing import Captured, capture
from cute_nvfp4.runtime.backend import resolve
from cute_nvfp4.target import Target

__all__ = [
    "Captured",
    "capture",
    "driver_version",
    "gpu_target",
    "host",
    "machine",
    "processor",
    "results_path",
    "take_turns",
    "write",
]

RESULTS = Path(__file__).resolve().parent / "results"


def gpu_target(otherwise: str = "") -> Target:
    """The target that kernels are compiled for on this machine's GPU.

    Without such a GPU it prints so and exits with code 2. otherwise: the advice for a machine without a GPU.
    """
    if not torch.cuda.is_available():
        print(f"no CUDA device: this benchmark measures a GPU. {otherwise}".rstrip(), file=sys.stderr)
        raise SystemExit(2)
    try:
        return resolve("cuda", "cuda")
    except TargetError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def driver_version() -> str:
    """The NVIDIA driver's version, from ``nvidia-smi``; "unknown" if that fails."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return lines[0] if lines else "unknown"


def machine() -> dict[str, object]:
    """The GPU, its driver, the date and the versions of the software that decides times."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    for package in ("nvidia-cutlass-dsl", "numpy"):
        versions[package] = metadata.version(package)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": driver_version(),
        "host": platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": versions,
    }


def processor() -> str:
    """The processor's name, from Linux."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def host() -> dict[str, object]:
    """The processor, the date and the versions of the software, for records that need no GPU."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": {name: metadata.version(name) for name in ("numpy", "torch", "nvidia-cutlass-dsl")},
    }


def results_path(benchmark: str) -> Path:
    """The path ``results/<benchmark>_<gpu>.json`` for the current GPU."""
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    return RESULTS / f"{benchmark}_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json"


def write(record: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def take_turns(calls: Mapping[str, Captured], rounds: int, clear: Callable[[], None]) -> dict[str, list[float]]:
    """Microseconds of the replays of each call. The calls take turns in alternating order, and L2 is cleared before
    each.

    clear: also keeps the GPU busy while the host queues the next replay, so that no figure contains host time.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, rounds):  # the first turn warms up
        events = {}
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            clear()
            events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[name][0].record()
            calls[name].graph.replay()
            events[name][1].record()
        torch.cuda.synchronize()
        if turn >= 0:
            for name, (start, end) in events.items():
                times[name].append(start.elapsed_time(end) * 1e3)
    return times

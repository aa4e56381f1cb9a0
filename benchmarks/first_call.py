"""Measures how long the first call of each operation takes: ``python benchmarks/first_call.py``. Needs no GPU.

A first call plans, compiles its kernel with NVIDIA's compiler, and loads it. The script calls every operation in a
process with an empty cache folder, and again in a second process, which finds the compiled kernels on disk. With a GPU
the calls run there. Without one they are prepared for an H200 and a B200: everything but the launch.

Seconds are wall time and CPU time, without the package's import. They depend on the host's processor, not on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

M, N, K = 128, 256, 512
ARCHS = ("sm_90a", "sm_100a")


@contextmanager
def counted(name: str, found: dict[str, dict[str, float]]) -> Iterator[None]:
    """Adds the seconds that its block takes to ``found[name]``."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    found[name] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - processor}


def calls(arch: str, device: str) -> Iterator[tuple[str, Callable[..., Any], tuple, dict[str, Any]]]:
    """Yields the calls: a name, the operation, its operands and its options."""
    import torch

    import cute_nvfp4 as nv

    def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype, device=device)

    def block(*shape: int) -> nv.BlockScaledTensor:
        made = nv.quantize(torch.ones(*shape), backend="reference")
        return nv.BlockScaledTensor(made.data.to(device), made.scale.to(device), None, made.format)

    out, scale = ones(M, N), torch.tensor(1.0, device=device)
    yield "gemv", nv.gemv, (block(N, K), block(1, K)), {"out": ones(N)}
    if arch == "sm_90a":
        one, both = nv.prepare_weight(block(N, K)), nv.prepare_weight(block(N, K), block(N, K))
        yield "gemm, prepared weight", nv.gemm, (ones(M, K), one), {"out": out}
        yield "gated_gemm, prepared weight", nv.gated_gemm, (ones(M, K), both), {"out": out}
    else:
        yield "gemm", nv.gemm, (block(M, K), block(N, K)), {"out": out}
    yield "quantize, rule max", nv.quantize, (ones(M, K),), {"global_scale": scale}
    yield "quantize, rule four_six_mse", nv.quantize, (ones(M, K),), {"rule": "four_six_mse", "global_scale": scale}


def worker(arch: str) -> dict[str, dict[str, float]]:
    """The seconds of each call in this process. arch: "" for this machine's GPU."""
    found: dict[str, dict[str, float]] = {}
    with counted("import cute_nvfp4", found):
        import torch

        import cute_nvfp4 as nv
        from cute_nvfp4 import gemm, quantize  # noqa: F401 (what a user's program imports)
    with nullcontext() if not arch else nv.simulating(arch):
        for name, operation, operands, options in calls(arch or _arch(), "cpu" if arch else "cuda"):
            with counted(name, found):
                if arch:
                    nv.prepare(operation, *operands, **options)
                else:
                    operation(*operands, **options)
                    torch.cuda.synchronize()
    return found


def _arch() -> str:
    from cute_nvfp4.runtime.backend import resolve

    return resolve("cuda", "cuda").arch.name


def measure(arch: str) -> dict[str, Any]:
    """The rows of an architecture: seconds with an empty cache folder, and in the next process."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            environment = os.environ | {"CUTE_NVFP4_CACHE_DIR": folder, "CUTE_NVFP4_CACHE": "1"}
            command = [sys.executable, __file__, "--worker", arch]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"a worker ended with {done.returncode}: {done.stderr}")
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: {"first": runs[0][name], "next process": runs[1][name]} for name in runs[0]}


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/first_call_….json)")
    parser.add_argument("--worker", metavar="ARCH", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(worker(options.worker)))
        return 0
    import torch
    from common import RESULTS, host, machine, results_path, write

    has_gpu = torch.cuda.is_available()
    record = machine() if has_gpu else host()
    record |= {"calls": {arch or record["gpu"]: measure(arch) for arch in (("",) if has_gpu else ARCHS)}}
    write(record, options.output or (results_path("first_call") if has_gpu else RESULTS / "first_call_cpu.json"))
    for arch, rows in record["calls"].items():
        for name, row in rows.items():
            times = "  ".join(f"{when} {x['wall']:6.2f} s ({x['cpu']:.2f} of the processor)" for when, x in row.items())
            print(f"{arch:>12} {name:>30}  {times}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

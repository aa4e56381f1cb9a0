"""Records what a GPU computes, bit for bit, as a reference for the simulator: see ``recordings``.

    python tests/gpu/record_gemv.py --out tests/data/h200_gemv.npz

It records GEMV problems over full-range data, and single instructions over random bits. ``--backend sim`` is a dry run
without a GPU. A recording counts once ``RECORDINGS`` of tests/simulator/test_recorded.py has its name.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import ptx_cases, ptx_kernels
from support.gemv_problems import Case, Problem, check, make
from support.recordings import Recorder

from cute_nvfp4.runtime.compile import CompiledKernel
from cute_nvfp4.runtime.kernel import Kernel
from cute_nvfp4.runtime.template import capture
from cute_nvfp4.target import Target

_F16, _BF16 = torch.float16, torch.bfloat16
PROBLEMS = (
    Case(128, 256, out="contiguous"),
    Case(30, 512, dtype=_F16, alpha=2.0**-15, out="contiguous"),
    Case(33, 272, 2, "rowmajor strided", "blocked", alignment=8, dtype=_F16, alpha=1e-4, out="strided"),
    Case(2, 16400, 1, "flat", "rowmajor", alignment=8, out="contiguous"),
    Case(1, 16640, 1, "rowmajor", "flat", dtype=_F16, alpha=2.0**-16, out="contiguous"),
    Case(13, 528, 1, "blocked", "blocked", 0.037, -1.5, dtype=_F16, alpha=1e-3, alignment=8, out="contiguous"),
    Case(1, 4096, 0, "rowmajor", "rowmajor", out="contiguous"),
    Case(150, 64, 1, "rowmajor", "flat", None, 2.5e-3, alpha=-0.5, out="contiguous", b_rows=128),
    Case(2, 7168, out="contiguous"),
    Case(9, 1040, 2, "rowmajor", "rowmajor", alignment=8, pitch=8, out="transposed"),
    Case(140, 128, 1, dtype=_BF16, alpha=2.0**-10, out="contiguous"),
    Case(40, 16, 3, "blocked", "rowmajor", alignment=8, repeat_b=True, out="contiguous"),
)
# rows of words for each body: the edge cases, which come first, and some of the random ones
INSTRUCTIONS = {
    "fma_f16x2": 1024, "f16x2_f32": 512, "e4m3_f16x2": 512, "e2m1_s8": 256, "e2m1_s8_apart": 256,
    "e2m1_f16x2": 256, "fma_e2m1x16": 128, "mma_s8": 128, "sum_lanes": 128, "prmt": 256, "shuffle": 256,
    "shared": 128, "copy4": 128, "copy8": 128, "copy16": 128, "load8_if": 128, "byte_if": 128,
}  # fmt: skip


NAMES = {
    "a.data": "a", "a.scale": "sfa", "a.global_scale": "a_global", "out": "c",
    "b.data": "b", "b.scale": "sfb", "b.global_scale": "b_global",
}  # fmt: skip
"""The names of a launch's tensors in a recording."""


def record_gemv(recorder: Recorder, case: Case, backend: str) -> None:
    """Records the launch of gemv(), and checks its result."""
    problem: Problem = make(case, "cuda" if backend == "cuda" else "cpu")

    actual = Kernel.launcher

    def recording_launcher(self: Kernel, config: Any, target: Target, device: Any, arguments: Any, touched: Any):
        kernel, signature = self.compile(config), self.signature(config)
        runs = actual(self, config, target, device, arguments, touched)
        template = capture(kernel, signature.types, signature.values(arguments, 0), signature.varying)

        def launches(values: tuple, owners: tuple) -> None:
            notes = {"case": str(case), "alpha": case.alpha, "kind": "gemv"}
            (found,) = template.filled(values)
            tensors = {NAMES[name]: tensor for name, tensor in touched(*owners).items()}
            recorder.record(f"gemv {case}", kernel, found, tensors, lambda: runs(values, owners), **notes)

        return launches

    with mock.patch.object(Kernel, "launcher", recording_launcher):
        check(problem, problem.run(backend))


def record_instructions(recorder: Recorder, body: str, rows: int, backend: str, arch: str) -> None:
    """Records the kernel of one device helper or instruction on its cases."""
    case = ptx_cases.BY_BODY[body]
    words, data = case.inputs()
    # take the first rows and random later ones, in whole warps
    if len(words) > rows:
        warps = len(words) // 32
        later = np.random.default_rng(0).permutation(np.arange(rows // 64, warps))[: rows // 32 - rows // 64]
        keep = np.concatenate([np.arange(rows // 64), np.sort(later)])
        words = words.reshape(warps, 32, -1)[keep].reshape(rows, -1)
    kernel = ptx_kernels.compiled(body, arch)

    def recording_launcher(kernel_: CompiledKernel, backend_: str, blocks: int):
        runs, template = actual(kernel_, backend_, blocks), ptx_kernels.template(kernel_, blocks)

        def launches(values: tuple, owners: tuple) -> None:
            (launch,) = template.filled(values)
            tensors = ptx_kernels.touched(*owners)
            recorder.record(f"ptx {body}", kernel_, launch, tensors, lambda: runs(values, owners), kind="ptx")

        return launches

    actual = ptx_kernels.launcher
    with mock.patch.object(ptx_kernels, "launcher", recording_launcher):
        found = ptx_kernels.run_kernel(kernel, words, ptx_kernels.BODIES[body].outs, data, backend)
    np.testing.assert_array_equal(found, case.expected(words, data), err_msg=body)


def about(backend: str) -> dict[str, Any]:
    """The machine and the versions of the recording."""
    versions = {}
    for package in (
        "torch",
        "numpy",
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-cu13",
        "nvidia-cutlass-dsl-libs-cu12",
    ):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    facts: dict[str, Any] = {
        "device": "simulator",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions,
    }
    if backend == "cuda":
        from cuda.bindings import driver

        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": properties.name, "capability": [properties.major, properties.minor]}
        facts |= {"sm_count": properties.multi_processor_count, "driver": int(driver.cuDriverGetVersion()[1])}
    return facts


def record(path: Path, backend: str, arch: str) -> Recorder:
    """Records everything into ``path``. Raises AssertionError if a result contradicts its oracle."""
    recorder = Recorder()
    with mock.patch.dict(os.environ, {"CUTE_NVFP4_ARCH": arch}):
        for case in PROBLEMS:
            record_gemv(recorder, case, backend)
        for body, rows in INSTRUCTIONS.items():
            if arch in ptx_cases.BY_BODY[body].archs:
                record_instructions(recorder, body, rows, backend, arch)
    recorder.save(path, **about(backend))
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--arch", default="sm_90a", help="the GPU's architecture")
    arguments = parser.parse_args()
    recorder = record(arguments.out, arguments.backend, arguments.arch)
    print(f"{len(recorder.entries)} launches, {arguments.out.stat().st_size} bytes: {arguments.out}")


if __name__ == "__main__":
    main()

"""Programs of NVIDIA/cutlass as subjects: their launch is captured once, and repeated with mutated PTX.

Needs a checkout of CUTLASS, of which nothing is kept here.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.sim import Launch, Program, Result, run
from cute_nvfp4.sim.frontend.parse import parse_module
from cute_nvfp4.sim.machine.global_memory import GlobalMemory, Region
from cute_nvfp4.sim.session import session as sessions

from .judge import Subject

SM_COUNT = 4

PROGRAMS = {
    "cutlass-fp16_gemm_5": ("cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_5.py", "--mnk 1024,512,704", "f2"),
    "cutlass-nvfp4_gemm_1": ("cute/blackwell/tutorial/tutorial_gemm/nvfp4_gemm_1.py", "--mnkl 256,256,2560,1", "f2"),
    "cutlass-blockscaled-2cta": (
        "cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
        "--mnkl 512,512,2304,1 --a_dtype Float4E2M1FN --b_dtype Float4E2M1FN --sf_dtype Float8E4M3FN --sf_vec_size 16 "
        "--c_dtype Float16 --mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --warmup_iterations 0 --iterations 1",
        "f2",
    ),
}
"""Name to (path below examples/python/CuTeDSL, arguments, dtype of the output)."""

RESIDENT_WARPS = {"cutlass-fp16_gemm_5": 28}
"""One cluster at a time, so that it asks for the work of the next (cluster launch control)."""


@dataclass
class Captured:
    """One launch with the memory it found and the memory it left."""

    program: Program
    launch: Launch
    memory: GlobalMemory
    before: list[bytes]
    after: list[bytes]
    owners: list[Any]


def _bytes(region: Region) -> np.ndarray:
    return region.rows(1, 1)[1]


def capture(cutlass: Path, name: str) -> Captured:
    """Runs the program in a simulated session and keeps its first launch of tensor cores."""
    path, arguments, _ = PROGRAMS[name]
    script = cutlass / "examples" / "python" / "CuTeDSL" / path
    found: list[Captured] = []

    def keep(program: Program, launch: Launch, memory: GlobalMemory, **options: Any) -> Any:
        # The program's tensors must outlive it.
        entries = sessions.current_session().memory._tensors.values()
        owners = [torch.UntypedStorage._new_with_weak_ptr(e.storage.cdata) for e in entries]
        before = [_bytes(r).tobytes() for r in memory.regions]
        result = run(program, launch, memory, **options)
        after = [_bytes(r).tobytes() for r in memory.regions]
        found.append(Captured(program, launch, memory, before, after, owners))
        return result

    of = sessions.Device.of

    def small(arch: str) -> Any:
        # A persistent kernel shall give each CTA several tiles without a large problem.
        return replace(of(arch), sm_count=SM_COUNT)

    with (
        mock.patch.object(sessions, "run", keep),
        mock.patch.object(sessions.Device, "of", small),
        mock.patch.object(sys, "argv", [str(script), *arguments.split()]),
    ):
        sys.path.insert(0, str(script.parent))
        try:
            with simulated_gpu():
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"{name} ended with {stop.code}") from None
        finally:
            sys.path.remove(str(script.parent))
    return next(c for c in found if c.program.kernel(c.launch.kernel).uses_tensor_memory)


def subject(cutlass: Path, name: str) -> Subject:
    """The captured launch as a subject; outputs may differ by what the order of fp32 sums can change."""
    one, dtype = capture(cutlass, name), PROGRAMS[name][2]

    def again(ptx: str, **options: Any) -> tuple[bool, Result]:
        for region, data in zip(one.memory.regions, one.before):
            _bytes(region)[:] = np.frombuffer(data, np.uint8)
        warps = RESIDENT_WARPS.get(name)
        result = run(Program(parse_module(ptx)), one.launch, one.memory, warps_per_wave=warps, **options)
        right = all(
            _same(_bytes(r).tobytes(), b, a, dtype) for r, b, a in zip(one.memory.regions, one.before, one.after)
        )
        return right, result

    return Subject(name, one.program.text, again)


def _same(now: bytes, before: bytes, after: bytes, dtype: str) -> bool:
    if now == after:
        return True
    if before == after:
        return False
    got, want = (np.frombuffer(x, dtype).astype("f4") for x in (now, after))
    near = np.abs(got - want) <= 2.0**-9 * np.abs(want) + 2.0**-12 * np.abs(want).max()
    return bool((near | (np.isnan(got) & np.isnan(want))).all())

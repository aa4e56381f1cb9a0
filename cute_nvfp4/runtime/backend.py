"""Chooses the backend and the architecture of a call: ``backend`` means the same in every public function.

* ``auto``: the kernels for CUDA tensors. For CPU tensors exact torch, or the simulator within ``simulating``.
* ``cuda``, ``sim``: the kernels, on a GPU or in the simulator.
* ``reference``: exact torch, on any device; nothing is launched.
"""

from __future__ import annotations

import functools
import os
from typing import Literal

import torch

from ..errors import TargetError
from ..target import ARCHITECTURES, DEFAULT_ARCH, Architecture, Target, architecture
from .simulating import ARCH_VARIABLE, session_number, simulation

Backend = Literal["auto", "cuda", "sim", "reference"]
BACKENDS = ("auto", "cuda", "sim", "reference")

# Facts about a device are cached for the session that simulates it; session 0 is the real GPU.


@functools.lru_cache(maxsize=64)
def _device_architecture(index: int, session: int) -> Architecture:
    capability = torch.cuda.get_device_capability(index)
    for arch in ARCHITECTURES.values():
        if arch.capability == capability:
            return arch
    known = ", ".join(f"{a.name} {a.capability}" for a in ARCHITECTURES.values())
    raise TargetError.of(
        f"compute capability of cuda:{index} ({torch.cuda.get_device_name(index)})",
        got=capability,
        expected=f"one of {known}",
        hint="Use backend='sim' with CPU tensors to run the kernels on this machine.",
    )


@functools.lru_cache(maxsize=256)
def _resolve(backend: str, device: torch.device, arch: str | None, session: int) -> Target:
    if backend == "reference":
        return Target(architecture(arch or DEFAULT_ARCH), "reference")
    if device.type == "cuda":
        if backend == "sim":
            raise TargetError.of(
                "device of the operands for backend='sim'",
                got=device,
                expected="cpu (the simulator works on host memory)",
                hint="Move the operands with .cpu(), or use backend='cuda'.",
            )
        index = device_index(device)
        found = _device_architecture(index, session)
        if arch is not None and arch != found.name:
            raise TargetError.of(f"architecture for {device}", got=arch, expected=found.name)
        return Target(found, "cuda")
    if device.type == "cpu":
        if backend == "cuda":
            raise TargetError.of(
                "device of the operands for backend='cuda'",
                got=device,
                expected="a CUDA device",
                hint="Move the operands with .cuda(), or use backend='sim' to run the kernel on this machine.",
            )
        return Target(architecture(arch or DEFAULT_ARCH), "reference" if backend == "auto" else "sim")
    raise TargetError.of("device of the operands", got=device, expected="cuda or cpu")


def resolve(backend: Backend = "auto", device: torch.device | str = "cpu", arch: str | None = None) -> Target:
    """Chooses the architecture and the backend for operands on ``device``.

    ``auto`` is ``cuda`` for CUDA tensors; for CPU tensors it is ``sim`` within ``simulating``, else ``reference``.
    ``arch``, else that of ``simulating``, else the environment variable ``CUTE_NVFP4_ARCH`` is the architecture that
    the simulator runs. On a GPU, ``arch`` must be the architecture of that GPU.

    Raises:
        TargetError: a name is unknown, or the backend cannot run tensors of that device.
    """
    if backend not in BACKENDS:
        raise TargetError.of("backend", got=repr(backend), expected=f"one of {', '.join(BACKENDS)}")
    device = torch.device(device)
    if device.type == "cpu":
        active = simulation()
        if active is not None:
            arch = arch or active.arch
            backend = "sim" if backend == "auto" else backend
        arch = arch or os.environ.get(ARCH_VARIABLE) or None
    return _resolve(backend, device, arch, session_number())


def sm_count(target: Target, device: torch.device) -> int:
    """The number of multiprocessors of the device that runs ``target``; in the simulator that of a typical GPU."""
    if target.backend == "cuda":
        return _device_sm_count(device_index(device), session_number())
    return target.arch.sm_count


@functools.lru_cache(maxsize=64)
def _device_sm_count(index: int, session: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def device_index(device: torch.device) -> int:
    """The index of ``device``, or of the current device if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index

"""Which architecture to compile for and which backend runs the result; the one home of GPU figures."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Literal

import torch

from .errors import TargetError, explain

Backend = Literal["auto", "cuda", "sim", "reference"]
BACKENDS = ("auto", "cuda", "sim", "reference")

ARCH_VARIABLE = "CUTE_NVFP4_ARCH"
DEFAULT_ARCH = "sm_100a"


@dataclass(frozen=True)
class Architecture:
    """What kernels and schedules need to know of one GPU architecture.

    ``sm_count`` is that of the part named in ``example``; on a real device the driver is asked instead.
    ``shared_bytes`` is the opt-in limit for one block, ``vector_bytes`` the widest global load of a thread.
    """

    name: str
    capability: tuple[int, int]
    example: str
    sm_count: int
    shared_bytes: int
    vector_bytes: int
    has_fp4_convert: bool


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_90a", (9, 0), "H100/H200", 132, 232448, 16, False),
        Architecture("sm_100a", (10, 0), "B200", 148, 232448, 32, True),
        Architecture("sm_103a", (10, 3), "B300", 148, 232448, 32, True),
    )
}


@dataclass(frozen=True)
class Target:
    """An architecture to compile for and the backend that runs what was compiled."""

    arch: Architecture
    backend: Literal["cuda", "sim", "reference"]


def architecture(name: str) -> Architecture:
    """The architecture called ``name`` (``sm_90a``, ``sm_100a``, ``sm_103a``)."""
    if name not in ARCHITECTURES:
        raise TargetError(explain("architecture", got=repr(name), expected=f"one of {', '.join(ARCHITECTURES)}"))
    return ARCHITECTURES[name]


@functools.lru_cache(maxsize=64)
def _device_architecture(index: int) -> Architecture:
    capability = torch.cuda.get_device_capability(index)
    for arch in ARCHITECTURES.values():
        if arch.capability == capability:
            return arch
    known = ", ".join(f"{a.name} {a.capability}" for a in ARCHITECTURES.values())
    raise TargetError(
        explain(
            f"compute capability of cuda:{index} ({torch.cuda.get_device_name(index)})",
            got=capability,
            expected=f"one of {known}",
            hint="Use backend='sim' with CPU tensors to run the kernels on this machine.",
        )
    )


@functools.lru_cache(maxsize=256)
def _resolve(backend: str, device: torch.device, arch: str | None) -> Target:
    if backend not in BACKENDS:
        raise TargetError(explain("backend", got=repr(backend), expected=f"one of {', '.join(BACKENDS)}"))
    if backend == "reference":
        return Target(architecture(arch or DEFAULT_ARCH), "reference")
    if device.type == "cuda":
        if backend == "sim":
            raise TargetError(
                explain(
                    "device of the operands for backend='sim'",
                    got=device,
                    expected="cpu (the simulator works on host memory)",
                    hint="Move the operands with .cpu(), or use backend='cuda'.",
                )
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        found = _device_architecture(index)
        if arch is not None and arch != found.name:
            raise TargetError(explain(f"architecture for {device}", got=arch, expected=found.name))
        return Target(found, "cuda")
    if device.type == "cpu":
        if backend == "cuda":
            raise TargetError(
                explain(
                    "device of the operands for backend='cuda'",
                    got=device,
                    expected="a CUDA device",
                    hint="Move the operands with .cuda(), or use backend='sim' to run the kernel on this machine.",
                )
            )
        return Target(architecture(arch or DEFAULT_ARCH), "sim")
    raise TargetError(explain("device of the operands", got=device, expected="cuda or cpu"))


def resolve(backend: Backend = "auto", device: torch.device | str = "cpu", arch: str | None = None) -> Target:
    """Chooses the architecture and the backend for operands on ``device``.

    ``auto`` runs CUDA tensors on their GPU and CPU tensors in the simulator. ``arch`` (or the environment
    variable ``CUTE_NVFP4_ARCH``) chooses what the simulator runs; on a GPU it can only confirm what is there.

    Raises:
        TargetError: an unknown name, or a backend that cannot run tensors of that device.
    """
    device = torch.device(device)
    if arch is None and device.type == "cpu":
        arch = os.environ.get(ARCH_VARIABLE) or None
    return _resolve(backend, device, arch)


def sm_count(target: Target, device: torch.device) -> int:
    """Multiprocessors of the device that runs ``target`` (the example part's in the simulator)."""
    if target.backend == "cuda":
        return _device_sm_count(torch.cuda.current_device() if device.index is None else device.index)
    return target.arch.sm_count


@functools.lru_cache(maxsize=64)
def _device_sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count

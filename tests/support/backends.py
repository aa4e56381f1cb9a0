"""The backend of kernel tests: CPU tensors in the simulator, or CUDA tensors on a GPU (``pytest --backend sim|cuda``).

Makers of problems put their tensors on ``device()``. A test that makes its own tensors takes the fixture ``device``, or
moves them with ``place``.
"""

from __future__ import annotations

import torch

from cute_nvfp4.target import ARCHITECTURES, Architecture

BACKENDS = ("sim", "cuda")
KERNEL_ARCHS = ("sm_100a", "sm_90a")
"""Architectures that the simulator tests all kernels for; sm_103a has the code of sm_100a."""

_selected = "sim"


def select(backend: str) -> None:
    """Selects the backend of this process, before pytest collects anything."""
    global _selected
    _selected = backend


def backend() -> str:
    """``sim`` or ``cuda``: also the value of the public functions' argument ``backend``."""
    return _selected


def device() -> torch.device:
    return torch.device("cuda" if _selected == "cuda" else "cpu")


def gpu_architecture() -> Architecture | None:
    """The architecture of the current CUDA device; None if the package does not know it."""
    capability = torch.cuda.get_device_capability()
    return next((arch for arch in ARCHITECTURES.values() if arch.capability == capability), None)


def architectures() -> tuple[str, ...]:
    """The architectures to test kernels for; with a GPU only its own."""
    if _selected == "sim":
        return KERNEL_ARCHS
    found = gpu_architecture()
    return (found.name,) if found else ()


def why_skipped(archs: tuple[str, ...]) -> str:
    """Why the device does not run kernels for ``archs`` (any architecture, if empty), or ""."""
    if _selected == "sim":
        return ""
    found = gpu_architecture()
    if found is None:
        return f"no kernel is for a device of capability {torch.cuda.get_device_capability()}"
    if archs and found.name not in archs:
        return f"kernels for {', '.join(archs)}; the device is {found.name}"
    return ""


def place(x: torch.Tensor) -> torch.Tensor:
    """``x`` on the device, with the same strides and the same offset in memory."""
    if x.device.type == device().type:
        return x
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).to(device())
    return memory.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

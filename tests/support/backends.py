"""Where tests of kernels run: CPU tensors in the simulator, or CUDA tensors on a GPU (``pytest --backend sim|cuda``).

Makers of problems put their tensors on ``device()``. A test that makes tensors of its own takes the fixture ``device``,
or puts them there with ``place``.
"""

from __future__ import annotations

import torch

from cute_nvfp4.target import ARCHITECTURES, Architecture

BACKENDS = ("sim", "cuda")
KERNEL_ARCHS = ("sm_100a", "sm_90a")
"""What the simulator compiles the kernels of every architecture for; sm_103a has the code of sm_100a."""

_selected = "sim"


def select(backend: str) -> None:
    """Chooses the backend of this process, before anything is collected."""
    global _selected
    _selected = backend


def backend() -> str:
    """``sim`` or ``cuda``: also the argument of that name of the public functions."""
    return _selected


def device() -> torch.device:
    return torch.device("cuda" if _selected == "cuda" else "cpu")


def gpu_architecture() -> Architecture | None:
    """That of the current CUDA device; None if the package does not know it."""
    capability = torch.cuda.get_device_capability()
    return next((arch for arch in ARCHITECTURES.values() if arch.capability == capability), None)


def architectures() -> tuple[str, ...]:
    """What kernels of every architecture are tested for: on a GPU what it is."""
    if _selected == "sim":
        return KERNEL_ARCHS
    found = gpu_architecture()
    return (found.name,) if found else ()


def why_skipped(archs: tuple[str, ...]) -> str:
    """Why the device does not run kernels that are for ``archs`` (any, if there are none), or ""."""
    if _selected == "sim":
        return ""
    found = gpu_architecture()
    if found is None:
        return f"no kernel is for a device of capability {torch.cuda.get_device_capability()}"
    if archs and found.name not in archs:
        return f"kernels for {', '.join(archs)}; the device is {found.name}"
    return ""


def place(x: torch.Tensor) -> torch.Tensor:
    """``x`` on the device, with its strides and its offset in memory as they are."""
    if x.device.type == device().type:
        return x
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).to(device())
    return memory.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

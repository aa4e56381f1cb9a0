"""A simulated GPU that this package takes part in: its own operations on CUDA tensors run in the session too."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import target
from ..formats import as_bytes, decode_e2m1, unpack_e2m1
from ..scale_layout import from_blocked
from ..sim import HostModule, Program
from ..sim.session import Patches, Session
from ..sim.session import simulated_gpu as bare_gpu
from ..sim.session.torch_ops import CPU_VERSIONS
from . import launch as launching
from .cache import CompiledKernel


def simulated_gpu(arch: str = target.DEFAULT_ARCH, **options: Any) -> AbstractContextManager[Session]:
    """``sim.session.simulated_gpu`` with this package as a guest; the same options."""
    return bare_gpu(arch, guests=(library,), **options)


def library(patches: Patches, session: Session) -> None:
    """A guest of a session: launches of this package go to it, and ``torch._scaled_mm`` is computed on the host."""

    class SessionLauncher:
        """Takes the place of the launcher for real GPUs."""

        def __init__(self, kernel: CompiledKernel, types: Sequence[type]) -> None:
            self._types = tuple(types)
            self._host = HostModule(kernel.host_ir, kernel.entry, session.device)
            self._program = Program.parse(kernel.ptx)

        def __call__(self, values: Sequence[Any], tensors: Mapping[str, Any]) -> None:
            arguments = [kind(value) for kind, value in zip(self._types, values)]
            self._host.call_at(
                [ctypes.addressof(a) for a in arguments], lambda launch: session.submit(self._program, launch)
            )

    patches.item(CPU_VERSIONS, torch._scaled_mm, scaled_mm)
    patches.set(launching, "CudaLauncher", SessionLauncher)
    patches.set(launching, "_launchers", {})
    for name in ("_device_architecture", "_resolve", "_device_sm_count"):
        # fresh caches: what they remember of the session must not outlive it
        patches.set(target, name, functools.lru_cache(maxsize=64)(getattr(target, name).__wrapped__))


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """``torch._scaled_mm``: (M, K) × (K, N); block scales are one dimension in the 128×4 layout, a block of 16 elements
    for E4M3 scales and of 32 for UE8M0. Other scales are left to torch."""
    if scale_a.dtype not in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return torch._scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    block = 16 if scale_a.dtype == torch.float8_e4m3fn else 32
    left, right = _decoded(a), _decoded(b.t())
    product = _scaled(left, scale_a, block) @ _scaled(right, scale_b, block).t()
    if bias is not None:
        product = product + bias.float()
    return product.to(out_dtype or torch.bfloat16)


def _decoded(x: torch.Tensor) -> torch.Tensor:
    """(rows, K) values in binary64 of (rows, K) FP8 elements or (rows, K/2) bytes of E2M1 pairs."""
    if x.dtype == torch.float4_e2m1fn_x2:
        return decode_e2m1(unpack_e2m1(as_bytes(x))).double()
    return x.to(torch.float64)


def _scaled(values: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    rows, k = values.shape
    scales = from_blocked(scale.flatten(), rows, -(-k // block))[0].double()
    return values * scales.repeat_interleave(block, dim=1)[:, :k]

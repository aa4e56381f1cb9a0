"""Which backend ``quantize`` runs, and how it hands a request to the fused kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from cute_nvfp4 import target as targets
from cute_nvfp4.errors import OperandError, TargetError, explain
from cute_nvfp4.formats import Format
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.quantization.rules import Rule

__all__ = ["BACKENDS", "BackendChoice", "choose_backend", "quantize_fused_like"]

BACKENDS = ("auto", "torch", "cuda", "sim")
_HINT = "backend='auto' or 'torch' does it by torch, with the bits that the kernels would give."


class BackendChoice(NamedTuple):
    """backend: "torch", "cuda" or "sim"; reason: why it is not the fused kernels', or empty."""

    backend: str
    reason: str = ""


def choose_backend(
    wanted: str, x: torch.Tensor, format: Format, rule: Rule, options: Mapping[str, object]
) -> BackendChoice:
    """The backend for matrices ``x`` (L, MN, K), before padding.

    ``options``: those given that the fused kernels have no argument for, by name.

    Raises:
        OperandError: the fused kernels are wanted by name, and cannot do this.
        TargetError: an unknown backend; "cuda" or "sim" within ``torch.compile``, whose tracing cannot follow them.
    """
    if wanted not in BACKENDS:
        raise TargetError(explain("backend", got=repr(wanted), expected=f"one of {', '.join(BACKENDS)}"))
    if wanted == "torch":
        return BackendChoice("torch", "asked for")
    tracing = torch.compiler.is_compiling()
    if wanted != "auto":
        if tracing:
            hint = "Quantize outside of what is compiled, or let torch compile its own backend."
            raise TargetError(
                explain("backend within torch.compile", got=repr(wanted), expected="'auto' or 'torch'", hint=hint)
            )
        reason = _unfused(wanted, x, format, rule, options)
        if reason:
            raise OperandError(f"{reason} {_HINT}")
        return BackendChoice(wanted)
    if x.device.type != "cuda":
        return BackendChoice("torch", f"x is on {x.device}; the kernels run on CUDA devices")
    if tracing:
        return BackendChoice("torch", "torch.compile is tracing, which cannot follow the kernels")
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        return BackendChoice("torch", f"x is a {type(x).__name__}, whose memory a kernel cannot read")
    try:
        targets.resolve("cuda", x.device)
    except TargetError as error:
        return BackendChoice("torch", str(error))
    reason = _unfused("cuda", x, format, rule, options)
    return BackendChoice("torch" if reason else "cuda", reason)


def _unfused(backend: str, x: torch.Tensor, format: Format, rule: Rule, options: Mapping[str, object]) -> str:
    """Why the fused kernels cannot do this, or an empty string."""
    from ..ops._quantize import why_not_fused

    for name, value in options.items():
        return explain(f"{name} with backend={backend!r}", got=value, expected=f"no {name}")
    return why_not_fused(tuple(x.shape), format, rule)


def quantize_fused_like(
    x: torch.Tensor,
    ndim: int,
    format: Format,
    rule: Rule,
    global_scale: torch.Tensor | str | None,
    seed: int | None,
    scale_layout: str,
    backend: str,
) -> BlockScaledTensor:
    """``quantize_fused`` of matrices ``x`` (L, MN, K), without L where the caller's tensor had ``ndim`` below three."""
    from ..ops._quantize import quantize_fused

    found = quantize_fused(
        x, format, rule, global_scale=global_scale, seed=seed, scale_layout=scale_layout, backend=backend
    )
    if ndim >= 3:
        return found
    scale = found.scale if scale_layout == "blocked" else found.scale[0]
    return BlockScaledTensor(found.data[0], scale, found.global_scale, format)

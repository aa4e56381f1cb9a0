"""Which backend ``quantize`` runs, and how it hands a request to the fused kernels.

Under ``torch.compile`` the kernels are one operator of the graph, ``cute_nvfp4::quantize``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from cute_nvfp4.errors import OperandError, TargetError, explain
from cute_nvfp4.formats import FORMATS, Format
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.quantization.hadamard import Hadamard
from cute_nvfp4.quantization.rules import Rule, resolve_format
from cute_nvfp4.quantization.slabs import Source
from cute_nvfp4.scale_layout import blocked_bytes, blocked_view

from ..runtime.backend import resolve

__all__ = ["BACKENDS", "BackendChoice", "choose_backend", "run_fused"]

BACKENDS = ("auto", "torch", "cuda", "sim")
_SCHEMA = (
    "(Tensor x, Tensor? global_scale, bool computed, SymInt? seed, int[]? signs, bool block_2d, str format, str rule, "
    "str scale_layout, str backend) -> (Tensor, Tensor, Tensor)"
)
_HINT = "backend='auto' or 'torch' does it by torch, with the bits that the kernels would give."


class BackendChoice(NamedTuple):
    """backend: "torch", "cuda" or "sim"; reason: why it is not the fused kernels', or empty."""

    backend: str
    reason: str = ""


def choose_backend(
    wanted: str, source: Source, format: Format, rule: Rule, options: Mapping[str, object]
) -> BackendChoice:
    """The backend for ``source``, before padding.

    ``options``: those given that the fused kernels have no argument for, by name.

    Raises:
        OperandError: the fused kernels are wanted by name, and cannot do this.
        TargetError: an unknown backend, or one wanted by name that cannot run tensors of this device.
    """
    if wanted not in BACKENDS:
        raise TargetError(explain("backend", got=repr(wanted), expected=f"one of {', '.join(BACKENDS)}"))
    if wanted == "torch":
        return BackendChoice("torch", "asked for")
    x = source.matrices
    # torch cannot trace questions to the driver; the operator asks again when it runs
    tracing = torch.compiler.is_compiling()
    if wanted != "auto":
        if not tracing:
            resolve(wanted, x.device)
        reason = _unfused(wanted, source, format, rule, options)
        if reason:
            raise OperandError(f"{reason} {_HINT}")
        return BackendChoice(wanted)
    if x.device.type != "cuda":
        return BackendChoice("torch", f"x is on {x.device}; the kernels run on CUDA devices")
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        return BackendChoice("torch", f"x is a {type(x).__name__}, whose memory a kernel cannot read")
    if not tracing:
        try:
            resolve("cuda", x.device)
        except TargetError as error:
            return BackendChoice("torch", str(error))
    reason = _unfused("cuda", source, format, rule, options)
    return BackendChoice("torch" if reason else "cuda", reason)


def _unfused(backend: str, source: Source, format: Format, rule: Rule, options: Mapping[str, object]) -> str:
    """Why the fused kernels cannot do this, or an empty string."""
    from .fused_quantize import why_not_fused

    for name, value in options.items():
        return explain(f"{name} with backend={backend!r}", got=value, expected=f"no {name}")
    if torch.compiler.is_compiling() and FORMATS.get(format.name) is not format:
        return explain("format within torch.compile", got=format.name, expected=f"one of {', '.join(FORMATS)}")
    rotation = 0 if source.rotation is None else source.rotation.size
    return why_not_fused(tuple(source.matrices.shape), format, rule, rotation=rotation, tile=source.tile > 1)


def run_fused(
    source: Source,
    ndim: int,
    format: Format,
    rule: Rule,
    global_scale: torch.Tensor | str | None,
    seed: int | None,
    scale_layout: str,
    backend: str,
) -> BlockScaledTensor:
    """``quantize_fused`` of ``source``, without L where the caller's tensor had ``ndim`` below three."""
    x, rotation = source.matrices, source.rotation
    if torch.compiler.is_compiling():
        computed = isinstance(global_scale, str)
        signs = None if rotation is None else list(rotation.signs)
        factor = None if computed else global_scale
        request = seed, signs, source.tile > 1, format.name, rule.name, scale_layout, backend
        data, scale, factor = _operator(x, factor, computed, *request)
        if scale_layout == "blocked":
            scale = blocked_view(scale, x.shape[1], format.scale_columns(x.shape[2]), x.shape[0])
        found = BlockScaledTensor(data, scale, factor if computed else global_scale, format)
    else:
        from .fused_quantize import quantize_fused

        found = quantize_fused(
            x,
            format,
            rule,
            global_scale=global_scale,
            seed=seed,
            hadamard=rotation,
            block_2d=source.tile > 1,
            scale_layout=scale_layout,
            backend=backend,
        )
    if ndim >= 3:
        return found
    scale = found.scale if scale_layout == "blocked" else found.scale[0]
    return BlockScaledTensor(found.data[0], scale, found.global_scale, format)


@torch.library.custom_op("cute_nvfp4::quantize", mutates_args=(), schema=_SCHEMA)
def _operator(x, global_scale, computed, seed, signs, block_2d, format, rule, scale_layout, backend):
    """Data, scales (blocked ones in one dimension) and the global scale, if it is computed, of matrices (L, MN, K)."""
    from cute_nvfp4.ops.quantize import quantize

    rounding = "nearest" if seed is None else "stochastic"
    # "auto" on a GPU that has no kernels shows only here: then torch gives the same bits
    found = quantize(
        x,
        format,
        rule,
        global_scale="auto" if computed else global_scale,
        rounding=rounding,
        generator=seed,
        hadamard=None if signs is None else Hadamard(tuple(signs)),
        block_2d=block_2d,
        scale_layout=scale_layout,
        backend=backend,
    )
    scale = found.scale.permute(5, 2, 4, 0, 1, 3).reshape(-1) if scale_layout == "blocked" else found.scale
    return found.data, scale, found.global_scale if computed else x.new_empty(0, dtype=torch.float32)


@_operator.register_fake
def _(x, global_scale, computed, seed, signs, block_2d, format, rule, scale_layout, backend):
    format = resolve_format(format)
    batch, rows, k = x.shape
    columns = format.scale_columns(k)
    blocked = scale_layout == "blocked"
    return (
        x.new_empty((batch, rows, format.data_columns(k)), dtype=torch.uint8),
        x.new_empty(blocked_bytes(rows, columns, batch) if blocked else (batch, rows, columns), dtype=torch.uint8),
        x.new_empty(() if computed else 0, dtype=torch.float32),
    )

"""The checked arguments of ``quantize``, and the backend that runs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import OperandError, OperandTypeError, TargetError, explain
from ..formats import FORMATS, LARGEST_GLOBAL_SCALE, SMALLEST_GLOBAL_SCALE, Format
from ..operand import PLAIN, BlockScaledTensor
from ..planning.quantize import QuantizeProblem, can_implement
from ..quantization.blocks import global_scale_from_amax
from ..quantization.hadamard import Hadamard, resolve_hadamard
from ..quantization.rules import Rule, resolve_format, resolve_rule
from ..quantization.slabs import Source, amax
from ..runtime.backend import BACKENDS, resolve
from ..runtime.torch_private import is_exporting
from ..tensors import check_dense
from .arguments import Argument
from .checks import DTYPE_NAMES, check_memory
from .dispatch import is_recorded

MATRIX = Argument(
    "(type({x}), {x}.dtype, {x}.shape, {x}.stride(), {x}.device, ({x}.data_ptr() or 1) & 31, {x}.is_neg())",
    "type({x}) is Tensor",
    on_cpu="not {x}.is_cuda",
)
"""A tensor that is quantized, or read beside it: everything that plans of these kernels depend on."""
SCALE = Argument(
    "({x} if type({x}) is str else None if {x} is None else type({x}) if not isinstance({x}, Tensor) else"
    " (out is not None and {x} is out.global_scale, {x}.dtype, {x}.shape, {x}.device, {x}.requires_grad,"
    " {x}.is_neg(), {x}.data_ptr() != 0))"
)
"""A global scale: "auto", a number, or a tensor, which may be that of ``out``."""
RESULT = Argument("(None if {x} is None else ({x}.key, getattr({x}.global_scale, 'requires_grad', False)))")
"""A ``BlockScaledTensor`` that is written, or None."""
COUNT_RESULT = (
    "increment_versions((out.data, out.scale, out.global_scale)"
    " if type(global_scale) is str and out.global_scale is not None else (out.data, out.scale))"
)
"""Raises the autograd version counters of ``out``; a global scale from the caller is only read."""
_HINT = "backend='auto' or 'reference' does it by torch, with the bits that the kernels would give."


class BackendChoice(NamedTuple):
    """backend: "cuda", "sim" or "reference". reason: why the kernels do not run; empty if they do."""

    backend: str
    reason: str = ""


@dataclass(frozen=True)
class QuantizeRequest:
    """What is to be quantized, and how.

    ndim: the number of dimensions of the caller's tensor; ``source`` has three. hessian: as the caller gave it.
    recorded: whether torch records what is done with the tensor.
    """

    source: Source
    ndim: int
    format: Format
    rule: Rule
    rounding: str
    scale_layout: str
    hessian: torch.Tensor | None
    recorded: bool

    @property
    def rotation_size(self) -> int:
        """Elements that are rotated together, 0 for none."""
        return 0 if self.source.rotation is None else self.source.rotation.size

    @property
    def tile(self) -> bool:
        """Whether scales are those of square tiles."""
        return self.source.tile > 1


def checked_request(r: Any) -> QuantizeRequest:
    """What a request of ``quantize`` asks for, checked.

    Raises:
        OperandError, OperandTypeError: what ``quantize`` raises for its arguments.
    """
    format, rotation, hessian = resolve_format(r.format), resolve_hadamard(r.hadamard), r.hessian
    rule = resolve_rule(r.rule, format)
    if r.rounding not in ("nearest", "stochastic"):
        raise OperandError.of("rounding", got=repr(r.rounding), expected="'nearest' or 'stochastic'")
    if r.generator is not None and r.rounding != "stochastic":
        raise OperandError.of("generator", got="one, with rounding 'nearest'", expected="rounding='stochastic'")
    if r.scale_layout not in ("blocked", "rowmajor"):
        raise OperandError.of("scale_layout", got=repr(r.scale_layout), expected="'blocked' or 'rowmajor'")
    if (hessian is not None) != (rule.choice == "hessian"):
        got = f"rule {rule.name!r} {'with' if hessian is not None else 'without'} hessian"
        raise OperandError.of("hessian", got=got, expected="both, or neither")
    if r.block_2d and rule.choice == "hessian":
        raise OperandError.of("block_2d", got="rule 'hessian'", expected="a rule that does not weigh columns")
    views = matrices(r.x, r.transpose, r.axis)
    k = _padded(views.shape[-1], format, rotation, r.pad)
    source = Source(views, k, rotation, format.block if r.block_2d else 1)
    return QuantizeRequest(source, r.x.ndim, format, rule, r.rounding, r.scale_layout, hessian, is_recorded(r.x))


def check_out(out: Any, request: QuantizeRequest, global_scale: Any) -> None:
    """Raises unless the result of ``request`` can be written to ``out``. global_scale: the caller's global scale."""
    if not isinstance(out, BlockScaledTensor):
        raise OperandTypeError.of("out", got=type(out).__name__, expected="BlockScaledTensor")
    x, format = request.source.matrices, request.format
    batch, rows, _ = x.shape
    shape = (batch, rows, format.data_columns(request.source.k))
    scaled = format.has_global_scale and global_scale is not None
    same = {
        "format of out": (out.format.name, format.name),
        "shape of the data of out": (tuple(out.data.shape), shape if request.ndim == 3 else shape[1:]),
        "scale layout of out": (out.scale_layout, request.scale_layout),
        "device of out": (out.device, x.device),
        "global scale of out": ("none" if out.global_scale is None else "one", "one" if scaled else "none"),
    }
    for what, (got, expected) in same.items():
        if got != expected:
            raise OperandError.of(what, got=got, expected=expected)
    check_out_gradient(out)
    if not request.recorded:
        check_out_memory(out, {"x": x, "hessian": request.hessian}, global_scale)


def check_out_gradient(out: BlockScaledTensor) -> None:
    """Raises if the global scale of ``out`` requires a gradient, so that no kernel may write it."""
    if out.global_scale is not None and out.global_scale.requires_grad:
        raise OperandError.of("global scale of out", got="one that requires a gradient", expected="one that does not")


def check_out_memory(out: BlockScaledTensor, read: Mapping[str, torch.Tensor | None], global_scale: Any) -> None:
    """Raises if the parts of ``out`` overlap each other or an input, or lie where no kernel can write them.

    global_scale: the caller's global scale.
    """
    scale = out.scale
    if out.scale_layout == "rowmajor" and not (scale.is_contiguous() and scale.data_ptr() % 4 == 0):
        got = f"address {scale.data_ptr():#x}, strides {scale.stride()}"
        raise OperandError.of("scale of out", got=got, expected="contiguous, at a multiple of 4 bytes")
    # the caller may give the global scale of out itself
    scaled = out.global_scale is not None
    if isinstance(global_scale, torch.Tensor) and not (
        scaled and global_scale.data_ptr() == out.global_scale.data_ptr()
    ):
        read = {**read, "global_scale": global_scale}
    check_memory(read, out)


def choose_backend(wanted: str, request: QuantizeRequest) -> BackendChoice:
    """The backend for ``request``.

    Raises:
        OperandError: the caller names the kernels, and they cannot do this.
        TargetError: an unknown backend, or one that cannot run tensors of this device.
    """
    if wanted not in BACKENDS:
        hint = "What used to be 'torch' is 'reference'." if wanted == "torch" else ""
        raise TargetError.of("backend", got=repr(wanted), expected=f"one of {', '.join(BACKENDS)}", hint=hint)
    if wanted == "reference":
        return BackendChoice("reference", "asked for")
    x = request.source.matrices
    # a trace records neither questions to the driver nor ``simulating``; the operator asks when it runs
    tracing = request.recorded
    if wanted != "auto":
        if not tracing:
            resolve(wanted, x.device)
        reason = _beyond_kernels(wanted, request)
        if reason:
            raise OperandError(f"{reason} {_HINT}")
        return BackendChoice(wanted)
    backend = "cuda" if x.device.type == "cuda" else "reference"
    if tracing and is_exporting() and _fits_operator(request):
        # an exported program may run anywhere: the operator chooses the backend when it runs
        return BackendChoice("cuda")
    if not tracing:
        try:
            backend = resolve("auto", x.device).backend
        except TargetError as error:
            if x.device.type == "cpu":
                raise
            # the package has no kernels for this device
            return BackendChoice("reference", str(error))
    if backend == "reference":
        where = "on CUDA devices, and on others within simulating()"
        return BackendChoice("reference", f"x is on {x.device}; the kernels run {where}")
    if not tracing and type(x) not in PLAIN:
        return BackendChoice("reference", f"x is a {type(x).__name__}, whose memory a kernel cannot read")
    reason = _beyond_kernels(backend, request)
    return BackendChoice("reference" if reason else backend, reason)


def _fits_operator(request: QuantizeRequest) -> bool:
    """Whether the operator has arguments for everything that ``request`` asks for."""
    same_k = request.source.k == request.source.matrices.shape[-1]
    return same_k and request.hessian is None and FORMATS.get(request.format.name) is request.format


def _beyond_kernels(backend: str, request: QuantizeRequest) -> str:
    """Why the kernels cannot do this; empty if they can."""
    format, x, k = request.format, request.source.matrices, request.source.k
    batch, rows, given_k = x.shape
    if request.hessian is not None:
        return explain(f"hessian with backend={backend!r}", got="one", expected="no hessian")
    if k != given_k:
        got = f"K {given_k}, which pad makes {k}"
        return explain(f"padding with backend={backend!r}", got=got, expected="no padding")
    if request.recorded and FORMATS.get(format.name) is not format:
        return explain("format where torch records the call", got=format.name, expected=f"one of {', '.join(FORMATS)}")
    return can_implement(
        QuantizeProblem(format, request.rule, rows, k, batch, rotation=request.rotation_size, tile=request.tile)
    )


def matrices(x: torch.Tensor, transpose: bool = False, axis: int | None = None) -> torch.Tensor:
    """A view of ``x`` as (L, MN, K), with blocks along the last dimension."""
    check_dense("x to quantize", x)
    if x.dtype not in DTYPE_NAMES:
        raise OperandTypeError.of("x to quantize", got=x.dtype, expected=" or ".join(map(str, DTYPE_NAMES)))
    shape = f"shape {tuple(x.shape)}"
    if x.ndim not in (1, 2, 3) or x.numel() == 0:
        raise OperandError.of(
            "x to quantize", got=shape, expected="(K,), (MN, K) or (L, MN, K), and no empty dimension"
        )
    if transpose and axis is not None:
        raise OperandError.of("transpose", got=f"True with axis={axis}", expected="one of the two")
    if transpose:
        axis = -2
    x = x.detach()
    if axis is not None:
        if not -x.ndim <= axis < x.ndim:
            raise OperandError.of("axis of the blocks", got=f"{axis} for {shape}", expected="one of its dimensions")
        x = x.movedim(axis, -1)
    return x.reshape(1, 1, -1) if x.ndim == 1 else x.reshape(-1, *x.shape[-2:])


def _padded(k: int, format: Format, rotation: Hadamard | None, pad: bool) -> int:
    """K of the result: whole blocks and whole rotations."""
    multiple = format.block if rotation is None else math.lcm(format.block, rotation.size)
    padded = -(-k // multiple) * multiple
    if padded != k and not pad:
        raise OperandError.of(
            f"K of {format.name}",
            got=k,
            expected=f"a multiple of {multiple}",
            hint=f"pad=True adds zeros up to {padded}.",
        )
    return padded


def kind_of_scale(format: Format, global_scale: Any, device: torch.device) -> str:
    """Which global scale a result has: "none", the caller's ("given"), or "computed"."""
    automatic = isinstance(global_scale, str) and global_scale == "auto"
    if global_scale is None or (automatic and not format.has_global_scale):
        return "none"
    if not format.has_global_scale:
        got = type(global_scale).__name__
        raise OperandError.of(f"global scale of {format.name}", got=got, expected="None or 'auto'")
    if automatic:
        return "computed"
    checked_global_scale(global_scale, device)
    return "given"


def global_scale_of(global_scale: Any, request: QuantizeRequest) -> torch.Tensor | None:
    """The global scale as a float32 tensor of no dimensions, or None; torch computes it for "auto"."""
    device = request.source.matrices.device
    kind = kind_of_scale(request.format, global_scale, device)
    if kind == "computed":
        return global_scale_from_amax(amax(request.source), request.rule)
    return None if kind == "none" else checked_global_scale(global_scale, device)


def checked_global_scale(global_scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The caller's global scale as a float32 tensor of no dimensions on ``device``."""
    if isinstance(global_scale, torch.Tensor):
        check_dense("global scale", global_scale)
        if global_scale.dtype is not torch.float32 or global_scale.numel() != 1 or global_scale.device != device:
            raise OperandTypeError.of(
                "global scale",
                got=f"{global_scale.dtype}, shape {tuple(global_scale.shape)}, {global_scale.device}",
                expected=f"one torch.float32 element on {device}",
            )
        return global_scale.detach().reshape(())
    if isinstance(global_scale, (bool, str)) or not isinstance(global_scale, (int, float)):
        raise OperandTypeError.of(
            "global scale", got=repr(global_scale), expected="'auto', None, a number or a float32 tensor"
        )
    if not SMALLEST_GLOBAL_SCALE <= global_scale <= LARGEST_GLOBAL_SCALE:
        raise OperandError.of("global scale", got=global_scale, expected="2**-100 … 2**118")
    # fill on the device: a copy from the host would wait for it
    return torch.full((), float(global_scale), dtype=torch.float32, device=device)


def hessian_blocks(hessian: torch.Tensor, k: int, format: Format, device: torch.device) -> torch.Tensor:
    """(K/block, block, block) in float32, from activations or from blocks; columns of padding are zeros."""
    groups, block = k // format.block, format.block
    if not isinstance(hessian, torch.Tensor) or not hessian.is_floating_point():
        raise OperandTypeError.of("hessian", got=type(hessian).__name__, expected="a floating-point tensor")
    check_dense("hessian", hessian)
    hessian = hessian.detach().to(torch.float32)
    shape = f"shape {tuple(hessian.shape)}"
    if hessian.device != device:
        raise OperandError.of("device of hessian", got=hessian.device, expected=device)
    if tuple(hessian.shape) == (groups, block, block):
        return hessian
    if hessian.ndim < 1 or not k - block < hessian.shape[-1] <= k:
        raise OperandError.of(
            "hessian", got=shape, expected=f"(…, K) or ({groups}, {block}, {block}), with K {k} at most"
        )
    rows = hessian.reshape(-1, hessian.shape[-1])
    rows = torch.nn.functional.pad(rows, (0, k - rows.shape[-1])).unflatten(-1, (groups, block)).transpose(0, 1)
    return rows.transpose(1, 2) @ rows

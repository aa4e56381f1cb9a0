"""``quantize``: from a tensor to a ``BlockScaledTensor``, on any device."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ..errors import OperandError
from ..formats import Format, as_bytes
from ..operand import PLAIN, BlockScaledTensor
from ..quantization import philox
from ..quantization.hadamard import Hadamard, resolve_hadamard
from ..quantization.slabs import Source, amax, quantize_slabs
from ..row_scaled import FP8, RowScaledTensor
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.simulating import world
from ..runtime.torch_private import is_exporting
from ..scale_layout import blocked_flat, blocked_view, to_blocked
from ..tensors import is_dense
from .calls import operand_key, scalar_key
from .dispatch import recording
from .operation import PREPARED, kernels_only
from .planned import Preparation
from .quantize_launch import QuantizeCall
from .quantize_request import (
    BackendChoice,
    QuantizeRequest,
    check_out,
    checked_request,
    choose_backend,
    global_scale_of,
    hessian_blocks,
    matrices,
)
from .quantize_rows import check_no_options, quantize_rows


def quantize(
    x: torch.Tensor,
    format: str | Format = "nvfp4",
    rule: str = "max",
    *,
    global_scale: str | float | torch.Tensor | None = "auto",
    block_2d: bool = False,
    rounding: str = "nearest",
    generator: int | torch.Generator | None = None,
    hadamard: Hadamard | int | None = None,
    hessian: torch.Tensor | None = None,
    transpose: bool = False,
    axis: int | None = None,
    pad: bool = False,
    scale_layout: str = "blocked",
    out: BlockScaledTensor | None = None,
    backend: Backend = "auto",
) -> BlockScaledTensor | RowScaledTensor:
    """``x`` in a block-scaled format: data and scales as ``uint8``, ready for the products of this library.

    Args:
        x: float32, float16 or bfloat16; (MN, K) or (L, MN, K), or (K,), which is taken as (1, K) because operands are
            matrices; any strides. Its gradient is not followed (``fake_quantize`` has one).
        format: "nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", or a ``Format``. "fp8_e4m3" gives a ``RowScaledTensor``:
            rows (M, K) of bfloat16 or float16 in E4M3, each with a scale; it takes no other argument but ``backend``.
        rule: how a block's scale is chosen (docs/quantization.md). For NVFP4: "max", "max_normal", "static_4",
            "four_six_mse", "four_six_mae", "four_six_abs_max", "optimal", "hessian". For MX: "max", which is "rceil",
            "floor", "ceil", "even"; for MXFP4 also "static_4", "optimal", "hessian".
        global_scale: NVFP4 only. "auto" computes it from the largest finite magnitude; a number or a float32 tensor
            of one element is used as it is (value = element · scale · global scale; 2**-100 … 2**118); None: none.
        block_2d: scales of square tiles (16 × 16; MX 32 × 32) instead of rows' blocks, each repeated in every row of
            its tile, so that a matrix and its transpose are quantized alike (with "nearest"). Ragged edges are fine.
        rounding: "nearest", ties to even; or "stochastic", from random bits that are a function of the seed and the
            element's place in the result alone (``philox``).
        generator: for "stochastic": a seed, or a torch generator to draw one from (None: torch's default one).
        hadamard: rotates along K, in float32, before all else: a ``Hadamard``, or a seed for a random one of size 16.
        hessian: for the rule of that name: activations (…, K), of which the Hessian blocks XᵀX are computed, or the
            blocks, (K/block, block, block).
        transpose: quantizes x with its last two dimensions exchanged: blocks run along MN, the result is (K, MN).
        axis: the dimension of x along which blocks run (last by default), moved last; ``transpose`` is ``axis=-2``.
        pad: zeros up to a whole number of blocks along K, which a product does not notice; otherwise an error.
        scale_layout: "blocked" (``cute_nvfp4.scale_layout``) or "rowmajor".
        out: where to put the result, and what is returned: an operand of its shape, format and scale layout, with a
            global scale unless ``global_scale`` is None or the format has none, which is written, too (it may be the
            given one). Nothing may overlap. Padding of blocked scales is written.
        backend: ``auto`` (the kernels for CUDA tensors, and within ``simulating`` for CPU tensors, where they take the
            request; else exact torch), ``cuda``, ``sim`` (the kernels; what they cannot do is an error: "hessian",
            "optimal" of MXFP4 or of tiles, padding, rotations larger than a block), ``reference`` (exact torch: any
            device and any request). All give the same bits; ``explain_backend`` says which one it is, and why. The
            first call for a kind of request compiles its kernel (cached on disk).

    ``torch.compile`` traces all of it into one graph (give stochastic rounding a seed), with the same bits: the kernels
    and the search of "optimal" and "hessian" are operators, and what inductor compiles of the rest divides in float64
    and fuses no product into a sum. A trace does not see ``simulating``.

    A block with NaN or infinity in it gets a NaN scale and is NaN altogether; the other blocks are as if it were not
    there. Magnitudes beyond what the scales reach saturate; a block too small for the smallest scale becomes zeros.

    Raises:
        OperandError, OperandTypeError: an argument that does not fit, or an empty tensor; what the kernels
            cannot do, where they are asked for by name.
        TargetError: an unknown backend, or one that cannot run tensors of this device.
    """
    options = (block_2d, rounding, hadamard, transpose, axis, pad, scale_layout)
    if format == FP8:
        check_no_options((rule, global_scale, generator, hessian, out, *options))
        return quantize_rows(x, backend)
    call = None
    if hessian is None:
        call = planned(x, format, rule, global_scale, generator, out, backend, options)
    if call is None:
        request = checked_request(x, format, rule, generator=generator, hessian=hessian, **dict(zip(_PLANNED, options)))
        return _unplanned(request, global_scale, generator, out, backend)
    return call(x, global_scale, 0 if rounding == "nearest" else philox.resolve_seed(generator), out)


def planned(
    x: torch.Tensor,
    format: str | Format,
    rule: str,
    global_scale: str | float | torch.Tensor | None,
    generator: int | torch.Generator | None,
    out: BlockScaledTensor | None,
    backend: Backend,
    options: tuple,
) -> QuantizeCall | None:
    """The kernels' call: the one that was planned for others like it, or a new one; None where exact torch runs, or a
    graph is traced. options: those of ``_PLANNED``."""
    if recording() or type(x) not in PLAIN or not is_dense(x):
        return None
    _, _, hadamard, _, axis, _, _ = options
    # all that a plan depends on; 1, 1.0 and True are equal
    # fmt: off
    key = (
        x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 31, format, rule,
        global_scale if type(global_scale) is str else scalar_key(global_scale), generator is None,
        options, None if hadamard is axis is None else (type(hadamard), type(axis)),
        operand_key(out), backend, world(not x.is_cuda),
    )
    # fmt: on
    call = _calls.find(key)
    if call is None:
        options = dict(zip(_PLANNED, options))
        request = checked_request(x, format, rule, generator=generator, **options)
        if out is not None:
            check_out(out, request, global_scale)
        if choose_backend(backend, request).backend == "reference":
            return None
        view = functools.partial(matrices, transpose=options["transpose"], axis=options["axis"])
        call = _calls[key] = QuantizeCall(request, global_scale, out, resolve(backend, x.device), view)
    return call


def _prepared(
    x: torch.Tensor,
    format: str | Format = "nvfp4",
    rule: str = "max",
    *,
    global_scale: str | float | torch.Tensor | None = "auto",
    out: BlockScaledTensor | None = None,
    backend: Backend = "auto",
    **options: Any,
) -> Preparation:
    """``quantize`` planned, for ``prepare``."""
    defaults = inspect.signature(quantize).parameters
    unknown = [name for name in options if name not in _PLANNED]
    if unknown:
        expected = f"one of {', '.join(_PLANNED)}"
        raise OperandError.of("option of a prepared quantize", got=unknown[0], expected=expected)
    options = {name: defaults[name].default for name in _PLANNED} | options
    call = kernels_only(planned(x, format, rule, global_scale, None, out, backend, tuple(options.values())))
    if out is None:
        out = call.new(x, global_scale)
    elif isinstance(global_scale, torch.Tensor) and global_scale is not out.global_scale:
        raise OperandError.of("global scale with out", got="another tensor", expected="out.global_scale, which is read")
    if call.launches > 1 or options["rounding"] != "nearest":
        got = "random rounding" if options["rounding"] != "nearest" else f"{call.launches} launches, or a copy of x"
        raise OperandError.of("request to prepare", got=got, expected="one launch, the same in every call")
    return call.preparation(x, out)


PREPARED[quantize] = _prepared
_PLANNED = ("block_2d", "rounding", "hadamard", "transpose", "axis", "pad", "scale_layout")
_calls = Bounded()


def _unplanned(
    request: QuantizeRequest,
    global_scale: str | float | torch.Tensor | None,
    generator: int | torch.Generator | None,
    out: BlockScaledTensor | None,
    backend: Backend,
) -> BlockScaledTensor:
    """By exact torch, or while torch records the call."""
    if out is not None:
        check_out(out, request, global_scale)
    seed = philox.resolve_seed(generator) if request.rounding == "stochastic" else None
    if choose_backend(backend, request).backend != "reference":
        return _recorded(request, global_scale, seed, out, backend)
    factor = global_scale_of(global_scale, request)
    device, k, hessian = request.source.matrices.device, request.source.k, request.hessian
    blocks = None if hessian is None else hessian_blocks(hessian, k, request.format, device)
    data, scale = quantize_slabs(request.source, request.rule, request.format, factor, seed, blocks)
    if request.ndim < 3:
        data, scale = data[0], scale[0]
    scale = to_blocked(scale) if request.scale_layout == "blocked" else scale
    result = BlockScaledTensor(data, scale, factor, request.format)
    return result if out is None else _stored(result, out)


def explain_backend(
    x: torch.Tensor, format: str | Format = "nvfp4", rule: str = "max", *, backend: Backend = "auto", **options: Any
) -> BackendChoice:
    """What ``quantize`` with these arguments runs: ``(backend, reason)``, a named tuple.

    ``backend`` is "cuda", "sim" or "reference", ``reason`` says why it is not the kernels' (empty where it is).
    ``options`` are those of ``quantize``. Nothing is quantized, and nothing waits for the device.

    Raises:
        What ``quantize`` raises for these arguments, but for errors in values of ``global_scale`` and ``hessian``.
    """
    options.pop("global_scale", None)
    return choose_backend(backend, checked_request(x, format, rule, **options))


def _stored(result: BlockScaledTensor, out: BlockScaledTensor) -> BlockScaledTensor:
    """``out`` with the values of ``result``."""
    as_bytes(out.data).copy_(result.data)
    blocked = out.scale_layout == "blocked"
    as_bytes(out.blocked_scale() if blocked else out.scale).copy_(result.scale)
    if out.global_scale is not None:
        out.global_scale.copy_(result.global_scale.reshape(out.global_scale.shape))
    return out


def _recorded(
    request: QuantizeRequest,
    given: str | float | torch.Tensor | None,
    seed: int | None,
    out: BlockScaledTensor | None,
    backend: Backend,
) -> BlockScaledTensor:
    """``request`` as one operator of a graph, which chooses when it runs."""
    x, format, operator = request.source.matrices, request.format, torch.ops.cute_nvfp4.quantize
    computed = isinstance(given, str) and given == "auto" and format.has_global_scale
    factor = None if computed else global_scale_of(given, request)
    signs = None if request.source.rotation is None else list(request.source.rotation.signs)
    options = {"compute_global_scale": computed, "seed": seed, "signs": signs, "block_2d": request.tile}
    options |= {"format": format.name, "rule": request.rule.name, "scale_layout": request.scale_layout}
    options["backend"] = backend
    if out is not None:
        data, scale = (t if t.ndim != 2 else t.unsqueeze(0) for t in (out.data, out.scale))
        scale = blocked_flat(scale) if scale.ndim == 6 else scale
        written = None if out.global_scale is factor else out.global_scale
        operator.out(x, factor, **options, out=data, out_scale=scale, out_global_scale=written)
        return out
    data, scale, found = operator.default(x, factor, **options)
    if request.scale_layout != "blocked":
        scale = scale if request.ndim == 3 else scale[0]
    # a view in six dimensions would make a program of its own for up to 128 rows
    elif not is_exporting():
        scale = blocked_view(scale, x.shape[1], format.scale_columns(x.shape[2]), x.shape[0])
    return BlockScaledTensor(data if request.ndim == 3 else data[0], scale, found if computed else factor, format)


def tensor_amax(x: torch.Tensor, *, hadamard: Hadamard | int | None = None) -> torch.Tensor:
    """The largest finite magnitude of ``x``, rotated first if asked: float32, no dimensions; 0 if there is none."""
    views, rotation = matrices(x), resolve_hadamard(hadamard)
    size = 1 if rotation is None else rotation.size
    return amax(Source(views, -(-views.shape[-1] // size) * size, rotation, 1))

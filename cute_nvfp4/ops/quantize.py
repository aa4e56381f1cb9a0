"""``quantize``: makes a ``BlockScaledTensor`` of a tensor, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError
from ..formats import Format, as_bytes
from ..kernels.quantize.arguments import Seed
from ..operand import BlockScaledTensor, row_alignment
from ..planning.quantize import QuantizeProblem, choose
from ..quantization import philox
from ..quantization.hadamard import Hadamard, resolve_hadamard
from ..quantization.slabs import Source, amax, quantize_slabs
from ..row_scaled import FP8, RowScaledTensor
from ..runtime.backend import Backend, resolve, sm_count
from ..scale_layout import to_blocked
from ..target import Target
from .arguments import TENSOR, TYPED, Argument
from .checks import DTYPE_NAMES
from .operation import quantizing
from .planned import PlannedCall, Preparation
from .quantize_launch import QUANTIZE as KERNEL
from .quantize_launch import (
    Results,
    amax_launcher,
    byte_strides,
    int32,
    lies_transposed,
    made_first,
    quantize_arguments,
    quantized_output,
    readable_by,
)
from .quantize_request import (
    COUNT_RESULT,
    MATRIX,
    RESULT,
    SCALE,
    BackendChoice,
    check_out,
    check_out_gradient,
    check_out_memory,
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
    """Quantizes ``x`` to a block-scaled format: data and scales as ``uint8``, ready for the products of this library.

    Args:
        x: float32, float16 or bfloat16; (MN, K) or (L, MN, K), or (K,), which is taken as (1, K) because operands are
            matrices; any strides. Autograd does not follow it (``fake_quantize`` has a gradient).
        format: "nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", or a ``Format``. "fp8_e4m3" gives a ``RowScaledTensor``:
            x (M, K) in bfloat16 or float16 becomes E4M3 with a scale for each row; only ``backend`` may go with it.
        rule: how a block's scale is chosen (docs/explanation/quantization.md). For NVFP4: "max", "max_normal",
            "static_4", "four_six_mse", "four_six_mae", "four_six_abs_max", "optimal", "hessian". For MX: "max", which
            is "rceil", "floor", "ceil", "even"; for MXFP4 also "static_4", "optimal", "hessian".
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
        pad: adds zeros up to a whole number of blocks along K, which change no product; without it, a remainder raises.
        scale_layout: "blocked" (``cute_nvfp4.scale_layout``) or "rowmajor".
        out: the operand to write and return, with the result's shape, format and scale layout. It has a global scale
            unless ``global_scale`` is None or the format has none; the global scale is written, too (it may be the
            tensor passed as ``global_scale``). Nothing may overlap. Padding of blocked scales is written.
        backend: ``auto`` (the kernels for CUDA tensors, and within ``simulating`` for CPU tensors, if they can compute
            the request; else exact torch), ``cuda``, ``sim`` (the kernels; what they cannot do raises: "hessian",
            "optimal" of MXFP4 or of tiles, padding, rotations larger than a block), ``reference`` (exact torch: any
            device and any request). All give the same bits; ``explain_backend`` says which backend runs, and why. The
            first call for a kind of request compiles its kernel (cached on disk).

    ``torch.compile`` traces the call into one graph (give stochastic rounding a seed), with the same bits: the kernels
    and the search of "optimal" and "hessian" are operators, and the code that inductor compiles for the rest divides in
    float64 and fuses no product into a sum. A trace does not see ``simulating``.

    A block with NaN or infinity in it gets a NaN scale and is NaN altogether; other blocks do not notice. Magnitudes
    beyond the largest scale saturate; a block too small for the smallest scale becomes zeros.

    Raises:
        OperandError, OperandTypeError: an argument does not fit; the tensor is empty; ``backend`` names the kernels,
            and they cannot do this.
        TargetError: an unknown backend, or one that cannot run tensors of this device.
    """
    if format == FP8:
        options = block_2d, rounding, hadamard, transpose, axis, pad, scale_layout
        check_no_options((rule, global_scale, generator, hessian, out, *options))
        return quantize_rows(x, None, backend)
    if rounding == "stochastic":
        generator = philox.resolve_seed(generator)
    options = block_2d, rounding, generator, hadamard, hessian, transpose, axis, pad, scale_layout
    return QUANTIZE.call(x, format, rule, global_scale, *options, out, backend)


def _check(r: Any) -> BlockScaledTensor | None:
    request = r.described
    if r.out is not None:
        check_out(r.out, request, r.global_scale)
    return r.out


def _target(r: Any, out: Any) -> Target:
    choice = choose_backend(r.backend, r.described)
    return resolve("reference" if choice.backend == "reference" else r.backend, r.x.device)


def _check_memory(r: Any) -> None:
    """Raises if the result overlaps itself or an input."""
    check_out_gradient(r.out)
    check_out_memory(r.out, {"x": r.x, "hessian": r.hessian}, r.global_scale)


def plan_quantize(r: Any, target: Target, cluster: int | None = None) -> Callable[..., BlockScaledTensor]:
    """The planned call; it copies x first if the kernels cannot read it. cluster: as in ``planning.quantize``."""
    request = r.described
    x, (batch, rows, k), device = request.source.matrices, request.source.matrices.shape, r.x.device
    transposed = lies_transposed(x, request.tile, request.rule.choice)
    if not transposed and readable_by(x, 4) is not x:
        return _copied_first
    in_memory = x.transpose(1, 2) if transposed else x
    results = Results(request, r.global_scale)
    problem = QuantizeProblem(
        format=request.format,
        rule=request.rule,
        rows=rows,
        k=k,
        batch=batch,
        dtype=DTYPE_NAMES[x.dtype],
        alignment=row_alignment(in_memory, 32),
        scale_layout=request.scale_layout,
        global_scale=results.scale_kind,
        stochastic=request.rounding == "stochastic",
        rotation=request.rotation_size,
        tile=request.tile,
        transposed=transposed,
    )
    plan = choose(problem, target.arch, sm_count(target, device), cluster)
    signs = 0
    if request.source.rotation is not None:
        signs = int32(sum(1 << i for i, sign in enumerate(request.source.rotation.signs) if sign < 0))
    out = results.maker(QUANTIZE.fields)(*r) if r.out is None else r.out
    arguments = quantize_arguments(request, in_memory, "x", out, results.scale_kind, plan)
    arguments = arguments._replace(signs=signs, chunks=plan.chunks)
    options = quantized_output(QUANTIZE, r, results)
    if problem.stochastic or plan.amax is not None:
        first, seed = None, None
        if plan.amax is not None:
            first = amax_launcher(plan.amax, batch, byte_strides(in_memory), signs, target, device)
            arguments = arguments._replace(global_in="made.amax")
        if problem.stochastic:
            seed, arguments = QUANTIZE.fields.index("generator"), arguments._replace(seed=Seed("made.low", "made.high"))
        options["extra"] = made_first(seed, first)
    return QUANTIZE.planned(KERNEL, plan.config, target, arguments, r._replace(out=out), **options)


def _copied_first(*args: Any) -> BlockScaledTensor:
    """The planned call that copies x and quantizes the copy."""
    r = QUANTIZE.request(*args)
    if r.out is not None:
        _check_memory(r)
    view = matrices(r.x, r.transpose, r.axis).clone(memory_format=torch.contiguous_format)
    copy = view[(0,) * (3 - r.x.ndim)]
    return QUANTIZE.run(*r._replace(x=copy, transpose=False, axis=None))


def _reference(r: Any) -> BlockScaledTensor:
    request = r.described
    factor = global_scale_of(r.global_scale, request)
    device, k, hessian = request.source.matrices.device, request.source.k, request.hessian
    blocks = None if hessian is None else hessian_blocks(hessian, k, request.format, device)
    seed = r.generator if request.rounding == "stochastic" else None
    data, scale = quantize_slabs(request.source, request.rule, request.format, factor, seed, blocks)
    if request.ndim < 3:
        data, scale = data[0], scale[0]
    scale = to_blocked(scale) if request.scale_layout == "blocked" else scale
    result = BlockScaledTensor(data, scale, factor, request.format)
    return result if r.out is None else _stored(result, r.out)


def _overlaps(r: Any) -> None:
    """Checks memory, unless the tensors are stand-ins of a trace and have none."""
    if not r.described.recorded:
        _check_memory(r)


def _prepared(r: Any) -> Preparation:
    """The one launch of a prepared call.

    Raises:
        OperandError: the request needs more than one launch, or rounds at random; a prepared call lacks an option.
    """
    for name in ("generator", "hessian"):
        if getattr(r, name) is not None:
            raise OperandError.of("option of a prepared quantize", got=name, expected=f"one of {', '.join(_OPTIONS)}")
    call = QUANTIZE.kernel_call(r)
    if r.out is not None and isinstance(r.global_scale, torch.Tensor) and r.global_scale is not r.out.global_scale:
        raise OperandError.of("global scale with out", got="another tensor", expected="out.global_scale, which is read")
    if not isinstance(call, PlannedCall) or call.extra is not None:
        launches = 3 if isinstance(call, PlannedCall) else 2
        got = "random rounding" if r.rounding != "nearest" else f"{launches} launches, or a copy of x"
        raise OperandError.of("request to prepare", got=got, expected="one launch, the same in every call")
    return call.preparation(r, ("x", "out"))


_OPTIONS = ("block_2d", "rounding", "hadamard", "transpose", "axis", "pad", "scale_layout")
QUANTIZE = quantizing(
    quantize,
    {
        **{"x": MATRIX, "global_scale": SCALE, "hessian": TENSOR._replace(plain="", followed="")},
        **{"generator": Argument("{x} is None"), "hadamard": TYPED, "axis": TYPED, "out": RESULT},
    },
    describe=lambda r: checked_request(r),
    check=_check,
    reference=_reference,
    plan=plan_quantize,
    target=_target,
    overlaps=_overlaps,
    count=COUNT_RESULT,
    prepared=_prepared,
    preparable=True,
)


def explain_backend(
    x: torch.Tensor, format: str | Format = "nvfp4", rule: str = "max", *, backend: Backend = "auto", **options: Any
) -> BackendChoice:
    """Says what ``quantize`` with these arguments runs: ``(backend, reason)``, a named tuple.

    ``backend`` is "cuda", "sim" or "reference". ``reason`` says why the kernels do not run (empty where they do).
    ``options`` are those of ``quantize``. Nothing is quantized, and nothing waits for the device.

    Raises:
        What ``quantize`` raises for these arguments, but for errors in values of ``global_scale`` and ``hessian``.
    """
    return choose_backend(backend, checked_request(QUANTIZE.request_of(x=x, format=format, rule=rule, **options)))


def _stored(result: BlockScaledTensor, out: BlockScaledTensor) -> BlockScaledTensor:
    """``out``, with the values of ``result`` copied into it."""
    as_bytes(out.data).copy_(result.data)
    blocked = out.scale_layout == "blocked"
    as_bytes(out.blocked_scale() if blocked else out.scale).copy_(result.scale)
    if out.global_scale is not None:
        out.global_scale.copy_(result.global_scale.reshape(out.global_scale.shape))
    return out


def tensor_amax(x: torch.Tensor, *, hadamard: Hadamard | int | None = None) -> torch.Tensor:
    """The largest finite magnitude of ``x``, rotated first if asked: float32, 0 if no element is finite."""
    views, rotation = matrices(x), resolve_hadamard(hadamard)
    size = 1 if rotation is None else rotation.size
    return amax(Source(views, -(-views.shape[-1] // size) * size, rotation, 1))

"""``quantize`` and ``dequantize``: from a tensor to a ``BlockScaledTensor`` and back, on any device.

``slabs`` has what is done by torch, ``fused`` what the kernels are asked to do.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError, explain
from cute_nvfp4.formats import Format
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.quantize_backend import BackendChoice, choose_backend, run_fused
from cute_nvfp4.quantization import philox
from cute_nvfp4.quantization.blocks import LARGEST_GLOBAL_SCALE, SMALLEST_GLOBAL_SCALE, global_scale_from_amax
from cute_nvfp4.quantization.hadamard import Hadamard, resolve_hadamard
from cute_nvfp4.quantization.rules import Rule, resolve_format, resolve_rule
from cute_nvfp4.quantization.slabs import Source, amax, quantize_slabs
from cute_nvfp4.scale_layout import to_blocked

__all__ = ["dequantize", "explain_backend", "quantize", "tensor_amax"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    backend: str = "auto",
) -> BlockScaledTensor:
    """``x`` in a block-scaled format: data and scales as ``uint8``, ready for the products of this library.

    Args:
        x: float32, float16 or bfloat16; (MN, K) or (L, MN, K), or (K,), which is taken as (1, K) because operands are
            matrices; any strides. Its gradient is not followed (``fake_quantize`` has one).
        format: "nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", or a ``Format``.
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
        backend: "torch" (any device and any request); "cuda" or "sim": the fused kernels on a GPU or in the simulator
            (what they cannot do is an error: "hessian", "optimal" of MXFP4 or of tiles, padding, rotations larger than
            a block); "auto": the fused kernels for CUDA tensors and requests that they take, else torch. All give the
            same bits; ``explain_backend`` says which one it is, and why. The first call for a kind of request compiles
            its kernel (cached on disk).

    ``torch.compile`` traces all of it into one graph (give stochastic rounding a seed), with the same bits: the fused
    kernels and the search of "optimal" and "hessian" are operators, and what inductor compiles of the rest divides in
    float64 and fuses no product into a sum.

    A block with NaN or infinity in it gets a NaN scale and is NaN altogether; the other blocks are as if it were not
    there. Magnitudes beyond what the scales reach saturate; a block too small for the smallest scale becomes zeros.

    Raises:
        OperandError, OperandTypeError: an argument that does not fit, or an empty tensor; what the fused kernels
            cannot do, where they are asked for by name.
        TargetError: an unknown backend, or one that cannot run tensors of this device.
    """
    source, format, resolved, chosen = _prepare(
        x,
        format,
        rule,
        block_2d=block_2d,
        rounding=rounding,
        generator=generator,
        hadamard=hadamard,
        hessian=hessian,
        transpose=transpose,
        axis=axis,
        pad=pad,
        scale_layout=scale_layout,
        backend=backend,
    )
    seed = philox.resolve_seed(generator) if rounding == "stochastic" else None
    if chosen.backend != "torch":
        computed = isinstance(global_scale, str) and global_scale == "auto" and format.has_global_scale
        factor = "auto" if computed else _global_scale(global_scale, source, resolved, format)
        return run_fused(source, x.ndim, format, resolved, factor, seed, scale_layout, backend)
    factor = _global_scale(global_scale, source, resolved, format)
    blocks = None if hessian is None else _hessian_blocks(hessian, source.k, format, x.device)
    data, scale = quantize_slabs(source, resolved, format, factor, seed, blocks)
    if x.ndim < 3:
        data, scale = data[0], scale[0]
    return BlockScaledTensor(data, to_blocked(scale) if scale_layout == "blocked" else scale, factor, format)


def explain_backend(
    x: torch.Tensor, format: str | Format = "nvfp4", rule: str = "max", **options: Any
) -> BackendChoice:
    """What ``quantize`` with these arguments runs: ``(backend, reason)``, a named tuple.

    ``backend`` is "torch", "cuda" or "sim", ``reason`` says why it is not the fused kernels' (empty where it is).
    ``options`` are those of ``quantize``. Nothing is quantized, and nothing waits for the device.

    Raises:
        What ``quantize`` raises for these arguments, but for errors in values of ``global_scale`` and ``hessian``.
    """
    options.pop("global_scale", None)
    return _prepare(x, format, rule, **options)[3]


def _prepare(
    x: torch.Tensor,
    format: str | Format,
    rule: str,
    *,
    block_2d: bool = False,
    rounding: str = "nearest",
    generator: int | torch.Generator | None = None,
    hadamard: Hadamard | int | None = None,
    hessian: torch.Tensor | None = None,
    transpose: bool = False,
    axis: int | None = None,
    pad: bool = False,
    scale_layout: str = "blocked",
    backend: str = "auto",
) -> tuple[Source, Format, Rule, BackendChoice]:
    """The arguments of ``quantize``, checked."""
    format = resolve_format(format)
    resolved = resolve_rule(rule, format)
    rotation = resolve_hadamard(hadamard)
    _check_options(rounding, generator, scale_layout, hessian, resolved, block_2d)
    matrices = _matrices(x, transpose, axis)
    k = _padded(matrices.shape[-1], format, rotation, pad)
    wanted = {
        "hessian": (hessian is not None, "one"),
        "padding": (k != matrices.shape[-1], f"K {matrices.shape[-1]}, which pad makes {k}"),
    }
    given = {name: value for name, (is_given, value) in wanted.items() if is_given}
    source = Source(matrices, k, rotation, format.block if block_2d else 1)
    return source, format, resolved, choose_backend(backend, source, format, resolved, given)


def dequantize(
    x: BlockScaledTensor,
    dtype: torch.dtype = torch.float32,
    *,
    k: int | None = None,
    hadamard: Hadamard | int | None = None,
) -> torch.Tensor:
    """The values of ``x`` (``BlockScaledTensor.dequantize``), (MN, K) or (L, MN, K).

    ``hadamard``, if it was given to ``quantize``, rotates back; ``k`` then drops what ``pad`` added beyond it.
    """
    if not isinstance(x, BlockScaledTensor):
        raise OperandTypeError(explain("x to dequantize", got=type(x).__name__, expected="BlockScaledTensor"))
    rotation = resolve_hadamard(hadamard)
    if rotation is None:
        values = x.dequantize(dtype)
    else:
        values = rotation.unrotate(x.dequantize(torch.float32)).to(dtype)
    if k is None:
        return values
    if not 0 < k <= x.k:
        raise OperandError(explain("k to keep", got=k, expected=f"1 … {x.k}"))
    return values[..., :k]


def tensor_amax(x: torch.Tensor, *, hadamard: Hadamard | int | None = None) -> torch.Tensor:
    """The largest finite magnitude of ``x``, rotated first if asked: float32, no dimensions; 0 if there is none."""
    matrices = _matrices(x, False, None)
    rotation = resolve_hadamard(hadamard)
    k = _rounded_up(matrices.shape[-1], 1 if rotation is None else rotation.size)
    return amax(Source(matrices, k, rotation, 1))


def _global_scale(
    given: str | float | torch.Tensor | None, source: Source, rule: Rule, format: Format
) -> torch.Tensor | None:
    """The global scale as a float32 tensor of no dimensions, or None."""
    automatic = isinstance(given, str) and given == "auto"
    if given is None or (automatic and not format.has_global_scale):
        return None
    if not format.has_global_scale:
        raise OperandError(explain(f"global scale of {format.name}", got="a number", expected="None or 'auto'"))
    if automatic:
        return global_scale_from_amax(amax(source), rule)
    return checked_global_scale(given, source.matrices.device)


def checked_global_scale(given: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A given global scale as a float32 tensor of no dimensions on ``device``."""
    if isinstance(given, torch.Tensor):
        if given.dtype is not torch.float32 or given.numel() != 1 or given.device != device:
            raise OperandTypeError(
                explain(
                    "global scale",
                    got=f"{given.dtype}, shape {tuple(given.shape)}, {given.device}",
                    expected=f"one torch.float32 element on {device}",
                )
            )
        return given.detach().reshape(())
    if isinstance(given, (bool, str)) or not isinstance(given, (int, float)):
        raise OperandTypeError(
            explain("global scale", got=repr(given), expected="'auto', None, a number or a float32 tensor")
        )
    if not SMALLEST_GLOBAL_SCALE <= given <= LARGEST_GLOBAL_SCALE:
        raise OperandError(explain("global scale", got=given, expected="2**-100 … 2**118"))
    # filled on the device: a copy from the host would wait for it
    return torch.full((), float(given), dtype=torch.float32, device=device)


def _check_options(
    rounding: str,
    generator: object,
    scale_layout: str,
    hessian: torch.Tensor | None,
    rule: Rule,
    block_2d: bool,
) -> None:
    if rounding not in ("nearest", "stochastic"):
        raise OperandError(explain("rounding", got=repr(rounding), expected="'nearest' or 'stochastic'"))
    if generator is not None and rounding != "stochastic":
        raise OperandError(explain("generator", got="one, with rounding 'nearest'", expected="rounding='stochastic'"))
    if scale_layout not in ("blocked", "rowmajor"):
        raise OperandError(explain("scale_layout", got=repr(scale_layout), expected="'blocked' or 'rowmajor'"))
    if (hessian is not None) != (rule.choice == "hessian"):
        got = f"rule {rule.name!r} {'with' if hessian is not None else 'without'} hessian"
        raise OperandError(explain("hessian", got=got, expected="both, or neither"))
    if block_2d and rule.choice == "hessian":
        raise OperandError(explain("block_2d", got="rule 'hessian'", expected="a rule that does not weigh columns"))


def _matrices(x: torch.Tensor, transpose: bool, axis: int | None) -> torch.Tensor:
    """A view of ``x`` as (L, MN, K), blocks along the last dimension."""
    if not isinstance(x, torch.Tensor):
        raise OperandTypeError(explain("x to quantize", got=type(x).__name__, expected="torch.Tensor"))
    if x.dtype not in _DTYPES:
        raise OperandTypeError(explain("x to quantize", got=x.dtype, expected=" or ".join(map(str, _DTYPES))))
    shape = f"shape {tuple(x.shape)}"
    if x.ndim not in (1, 2, 3) or x.numel() == 0:
        raise OperandError(
            explain("x to quantize", got=shape, expected="(K,), (MN, K) or (L, MN, K), and no empty dimension")
        )
    if transpose and axis is not None:
        raise OperandError(explain("transpose", got=f"True with axis={axis}", expected="one of the two"))
    if transpose:
        axis = -2
    x = x.detach()
    if axis is not None:
        if not -x.ndim <= axis < x.ndim:
            raise OperandError(
                explain("axis of the blocks", got=f"{axis} for {shape}", expected="one of its dimensions")
            )
        x = x.movedim(axis, -1)
    return x.reshape(1, 1, -1) if x.ndim == 1 else x.reshape(-1, *x.shape[-2:])


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(k: int, format: Format, rotation: Hadamard | None, pad: bool) -> int:
    """K of the result: whole blocks and whole rotations."""
    multiple = format.block if rotation is None else math.lcm(format.block, rotation.size)
    padded = _rounded_up(k, multiple)
    if padded != k and not pad:
        raise OperandError(
            explain(
                f"K of {format.name}",
                got=k,
                expected=f"a multiple of {multiple}",
                hint=f"pad=True adds zeros up to {padded}.",
            )
        )
    return padded


def _hessian_blocks(hessian: torch.Tensor, k: int, format: Format, device: torch.device) -> torch.Tensor:
    """(K/block, block, block) in float32, from activations or from blocks; columns that padding adds weigh nothing."""
    groups, block = k // format.block, format.block
    if not isinstance(hessian, torch.Tensor) or not hessian.is_floating_point():
        raise OperandTypeError(explain("hessian", got=type(hessian).__name__, expected="a floating-point tensor"))
    hessian = hessian.detach().to(torch.float32)
    shape = f"shape {tuple(hessian.shape)}"
    if hessian.device != device:
        raise OperandError(explain("device of hessian", got=hessian.device, expected=device))
    if tuple(hessian.shape) == (groups, block, block):
        return hessian
    if hessian.ndim < 1 or not k - block < hessian.shape[-1] <= k:
        raise OperandError(
            explain("hessian", got=shape, expected=f"(…, K) or ({groups}, {block}, {block}), with K {k} at most")
        )
    rows = hessian.reshape(-1, hessian.shape[-1])
    rows = torch.nn.functional.pad(rows, (0, k - rows.shape[-1])).unflatten(-1, (groups, block)).transpose(0, 1)
    return rows.transpose(1, 2) @ rows

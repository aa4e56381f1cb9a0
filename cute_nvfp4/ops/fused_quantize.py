"""The fused kernels of ``cute_nvfp4.quantization.quantize``: which requests they take, and how they are run."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError, explain
from ..formats import Format
from ..kernels.quantize.arguments import AmaxArguments, Powers, QuantizeArguments, Seed, Strides, Walk
from ..kernels.quantize.config import ITEM_BYTES, ROW_STEP, WARP, WARP_ROWS, QuantizeConfig
from ..operand import BlockScaledTensor
from ..planning.quantize import PLAIN, Variant, lies_transposed, resident, threads, walk
from ..quantization.hadamard import Hadamard
from ..quantization.rules import Rule
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..scale_layout import ATOM_COLS, ATOM_ROWS, blocked_bytes, blocked_view
from ..target import Architecture, Target, architecture
from .checks import DTYPE_NAMES

__all__ = ["compile_quantize", "quantize_fused", "why_not_fused"]

_MAX_GRID, _INT32_MAX = 65535, 2**31 - 1
_FORMATS = {("e2m1", "e4m3", 16), ("e2m1", "ue8m0", 32), ("e4m3", "ue8m0", 32), ("e5m2", "ue8m0", 32)}
_CHOICES = {"e4m3": ("", "mse", "mae", "abs_max", "optimal"), "ue8m0": ("",)}
# blocks of threads of the second pass that take turns on a multiprocessor's places for them; for 4/6 by sums; and for
# searches, which take more or less time: more turns even that out
_WAVES, _WAVES_OF_SUMS, _WAVES_OF_SEARCHES = 2, 1, 8


def why_not_fused(
    shape: tuple[int, int, int], format: Format, rule: Rule, *, rotation: int = 0, tile: bool = False
) -> str:
    """Why the kernels cannot quantize matrices of ``shape`` (L, MN, K) like that, or an empty string.

    ``rotation``: how many elements are rotated together, 0 for none; ``tile``: square tiles. Hessians there is no
    kernel for.
    """
    batch, rows, k = shape
    if (format.element, format.scale, format.block) not in _FORMATS:
        return explain("format for the fused kernels", got=format.name, expected="nvfp4, mxfp4 or mxfp8")
    if rule.choice not in _CHOICES[format.scale]:
        expected = "one that does not search, or optimal for nvfp4"
        return explain("rule for the fused kernels", got=repr(rule.name), expected=expected)
    if tile and rule.choice == "optimal":
        return explain("block_2d for the fused kernels", got="rule 'optimal'", expected="a rule that does not search")
    if rotation and format.block % rotation:
        return explain("size of a rotation for the fused kernels", got=rotation, expected=f"{format.block} or smaller")
    if k % format.block:
        return explain(f"K of {format.name}", got=k, expected=f"a multiple of {format.block}")
    if batch > _MAX_GRID:
        return explain("matrices for the fused kernels", got=batch, expected=f"at most {_MAX_GRID}")
    if max(-(-rows // ATOM_ROWS) * ATOM_ROWS * -(-k // 64) * 4, k * 4) > _INT32_MAX:
        return explain("x for the fused kernels", got=f"{rows} x {k}", expected=f"at most {_INT32_MAX} scales")
    return ""


def quantize_fused(
    x: torch.Tensor,
    format: Format,
    rule: Rule,
    *,
    global_scale: torch.Tensor | str | None = None,
    seed: int | None = None,
    hadamard: Hadamard | None = None,
    block_2d: bool = False,
    scale_layout: str = "blocked",
    backend: Backend = "auto",
) -> BlockScaledTensor:
    """Quantizes ``x`` (L, MN, K) by the fused kernels: the same bits as the torch backend.

    Args:
        x: float32, float16 or bfloat16, K or MN contiguous (others are copied); K a multiple of the format's block.
        format, rule: what ``quantization.rules`` resolves names to.
        global_scale: None; one float32 element on the device of ``x``: one pass; or "auto", for NVFP4: a pass over
            ``x`` finds its largest finite magnitude, and the next one computes the global scale from it.
        seed: rounds stochastically, with the bits of ``quantization.philox``; None rounds to nearest.
        hadamard: rotates x along K first; not larger than the format's block.
        block_2d: scales of square tiles, repeated in every row of a tile.
        scale_layout: "blocked" or "rowmajor".
        backend: "cuda", "sim", or "auto", which is where ``x`` is.

    Runs on the current stream, without synchronising the device.

    Raises:
        OperandError: the kernels cannot do this (:func:`why_not_fused`).
        TargetError: the backend cannot run tensors of this device, or is unknown.
    """
    rotation = 0 if hadamard is None else hadamard.size
    reason = why_not_fused(tuple(x.shape), format, rule, rotation=rotation, tile=block_2d)
    if reason:
        raise OperandError(reason)
    resolved = resolve(backend, x.device)
    x = x.detach()
    variant = Variant(rotation, block_2d, lies_transposed(x, block_2d, rule.choice))
    x = x if variant.transposed else _readable(x)
    batch, rows, k = x.shape
    columns = format.scale_columns(k)
    data = torch.empty((batch, rows, format.data_columns(k)), dtype=torch.uint8, device=x.device)
    if scale_layout == "blocked":
        flat = torch.empty(blocked_bytes(rows, columns, batch), dtype=torch.uint8, device=x.device)
        scale, scale_strides = blocked_view(flat, rows, columns, batch), Strides(0, flat.numel() // batch)
    else:
        scale = torch.empty((batch, rows, columns), dtype=torch.uint8, device=x.device)
        scale_strides = Strides(columns, rows * columns)
    # the scale that the kernel reads, and the one that it writes
    given, computed, source = global_scale, None, "none" if global_scale is None else "given"
    if isinstance(global_scale, str):
        given = torch.zeros((), dtype=torch.float32, device=x.device)
        global_scale = computed = torch.empty((), dtype=torch.float32, device=x.device)
        source = "amax"
    config = _choose(
        rule,
        format,
        resolved.arch,
        DTYPE_NAMES[x.dtype],
        rows,
        k,
        _alignment(x),
        scale_layout,
        source,
        seed is not None,
        variant,
    )
    signs = 0 if hadamard is None else sum(1 << i for i, sign in enumerate(hadamard.signs) if sign < 0)
    if source == "amax":
        _find_amax(x, given, config, signs, resolved)
    seed = seed or 0
    grid = _grid(config, rows, columns, sm_count(resolved, x.device) // batch)
    arguments = QuantizeArguments(
        x=x.data_ptr(),
        data=data.data_ptr(),
        scale=scale.data_ptr(),
        global_in=0 if given is None else given.data_ptr(),
        global_out=0 if computed is None else computed.data_ptr(),
        rows=rows,
        columns=columns,
        batch=batch,
        x_strides=_byte_strides(x.transpose(1, 2) if variant.transposed else x),
        data_strides=_byte_strides(data),
        scale_strides=scale_strides,
        seed=Seed(_int32(seed), _int32(seed >> 32)),
        signs=_int32(signs),
        powers=Powers(1, 1 << 16),
        ctas=grid[0],
        walk=Walk(*grid[1:]),
    )
    tensors = {"x": (x, False), "data": (data, True), "scale": (scale, True)}
    for name, tensor in (("global_in", given), ("global_out", computed)):
        if tensor is not None:
            tensors[name] = (tensor, name == "global_out")
    QUANTIZE.run(config, resolved, x.device, arguments, lambda: tensors)
    return BlockScaledTensor(data, scale, global_scale, format)


def _int32(bits: int) -> int:
    """The low 32 bits as ctypes takes them."""
    return ctypes.c_int32(bits & 0xFFFFFFFF).value


def _find_amax(x: torch.Tensor, amax: torch.Tensor, config: QuantizeConfig, signs: int, target: Target) -> None:
    """Raises ``amax`` to the largest finite magnitude of ``x``, rotated as ``config`` and ``signs`` say."""
    alignment = _alignment(x.transpose(1, 2) if config.transposed else x)
    view, config, rows, row_bytes, pieces = walk(x, config, alignment)
    places = 8 * sm_count(target, x.device) // x.shape[0]
    blocks = max(1, min(-(-rows * pieces // config.warps), places))
    arguments = AmaxArguments(
        x=x.data_ptr(),
        amax=amax.data_ptr(),
        rows=rows,
        row_bytes=row_bytes,
        batch=x.shape[0],
        x_strides=_byte_strides(view),
        chunks=pieces,
        ctas=blocks,
        signs=_int32(signs),
    )
    AMAX.run(config, target, x.device, arguments, lambda: {"x": (x, False), "amax": (amax, True)})


def _byte_strides(tensor: torch.Tensor) -> Strides:
    """Strides of (L, MN, …) in bytes."""
    return Strides(tensor.stride(1) * tensor.element_size(), tensor.stride(0) * tensor.element_size())


def _grid(config: QuantizeConfig, rows: int, columns: int, sm_count: int) -> tuple[int, int, int, int, int]:
    """Blocks of threads for a matrix, if there is work for them; and ``steps`` of the kernel."""
    if config.tile or config.transposed:
        *steps, wanted = threads(config, rows, columns)
        return max(1, min(wanted, _WAVES * config.min_blocks * sm_count)), *steps, 0, 0
    chunks = -(-columns // WARP)
    units = chunks * -(-rows // ATOM_ROWS) * (ROW_STEP // config.warps)
    waves = _WAVES
    if config.searches:
        waves = _WAVES_OF_SEARCHES
    elif config.defers and config.choice != "abs_max":
        waves = _WAVES_OF_SUMS
    blocks = max(1, min(units, waves * config.min_blocks * sm_count))
    return blocks, chunks, units, blocks // chunks, blocks % chunks


def _readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` if the kernel can read it, else a copy: K contiguous, and rows that start at multiples of four bytes."""
    size = x.element_size()
    strides = [stride * size for length, stride in zip(x.shape[:-1], x.stride()) if length > 1]
    plain = x.stride(-1) == 1 or x.shape[-1] == 1
    if plain and not any(place % 4 for place in (x.data_ptr(), *strides)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _alignment(x: torch.Tensor) -> int:
    """Largest power of two, up to 32 bytes, that divides the address of every row."""
    bits = x.data_ptr() | 32
    for length, stride in zip(x.shape[:-1], x.stride()):
        bits |= stride * x.element_size() if length > 1 else 0
    return bits & -bits


def _resident(config: QuantizeConfig) -> int:
    """Blocks of threads that are to fit on a multiprocessor: as many as shared memory allows, and registers."""
    shared = config.warps * (WARP_ROWS * WARP * config.block_bytes + 8 * WARP_ROWS) + 2048
    # the system takes a kilobyte of each block's
    most = (config.arch.shared_bytes + 1024) // (shared + 1024) if config.bulk else 16
    if config.searches:
        # where four would spill registers
        wanted = 3 if config.ragged or config.stochastic or config.item_bytes == 4 else 4
    elif config.stochastic:
        wanted = 3
    elif config.has_usual_way:
        # for 4/6 more registers are worth more than more warps
        wanted = 4 if config.choice else 10
    else:
        wanted = 6
    return min(wanted, most)


@functools.lru_cache(maxsize=1024)
def _choose(
    rule: Rule,
    format: Format,
    arch: Architecture,
    dtype: str,
    rows: int,
    k: int,
    alignment: int,
    layout: str,
    global_scale: str,
    stochastic: bool,
    variant: Variant = PLAIN,
) -> QuantizeConfig:
    """The variant of the kernel for matrices of ``rows`` rows, which start at multiples of ``alignment`` bytes."""
    columns = format.scale_columns(k)
    config = QuantizeConfig(
        arch=arch,
        element=format.element,
        scale=format.scale,
        block=format.block,
        top=format.max_value if rule.max_code is None else rule.max_code,
        min_scale=rule.min_scale,
        exponent=rule.exponent,
        choice=rule.choice,
        full_scale=rule.full_scale,
        dtype=dtype,
        hadamard=variant.rotation,
        tile=variant.tile,
        transposed=variant.transposed,
        global_scale=global_scale,
        stochastic=stochastic,
        layout=layout,
        scale_word=columns % ATOM_COLS == 0,
        ragged=variant.reads_rows and (rows % ATOM_ROWS != 0 or columns % WARP != 0),
        bulk=alignment >= 16 and variant.reads_rows,
        vector_bytes=4 if variant.transposed else min(arch.vector_bytes, alignment),
    )
    return dataclasses.replace(config, min_blocks=_resident(config) if variant.reads_rows else resident(config))


def compile_quantize(
    arch: str,
    format: Format,
    rule: Rule,
    *,
    rows: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    global_scale: str = "given",
    stochastic: bool = False,
    variant: Variant = PLAIN,
) -> tuple[CompiledKernel, QuantizeConfig]:
    """The kernel that quantizes contiguous matrices of these sizes on ``arch``, and its configuration.

    Needs no GPU and no tensors. ``global_scale``: "none", "given" or "amax". ``variant``: rotations, tiles,
    transposed reads.
    """
    reason = why_not_fused((1, rows, k), format, rule, rotation=variant.rotation, tile=variant.tile)
    if reason:
        raise OperandError(reason)
    name = DTYPE_NAMES[dtype]
    row_bytes = k * ITEM_BYTES[name]
    alignment = min(row_bytes & -row_bytes, 32)
    arch_ = architecture(arch)
    config = _choose(rule, format, arch_, name, rows, k, alignment, scale_layout, global_scale, stochastic, variant)
    return QUANTIZE.compile(config), config


def _host(config: QuantizeConfig) -> Callable[..., Any]:
    from ..kernels.quantize.row import Quantize
    from ..kernels.quantize.tile import QuantizeTile
    from ..kernels.quantize.transposed import QuantizeTransposed

    kernel = QuantizeTransposed if config.transposed else QuantizeTile if config.tile else Quantize
    return kernel(config)


def _amax_host(config: QuantizeConfig) -> Callable[..., Any]:
    from ..kernels.quantize.amax import Amax
    from ..kernels.quantize.transposed import AmaxTransposed

    return AmaxTransposed(config) if config.transposed else Amax(config)


QUANTIZE = Kernel("quantize", QuantizeArguments, _host)
AMAX = Kernel("amax", AmaxArguments, _amax_host)

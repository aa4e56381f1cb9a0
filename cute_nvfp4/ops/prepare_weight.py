"""prepare_weight: repack a block-scaled weight once, for GEMMs that decode it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..errors import OperandError, OperandTypeError, not_quantized
from ..formats import FORMATS, MXFP4, NVFP4, as_bytes, unpack_e2m1
from ..kernels.pack.config import PackArguments, PackConfig
from ..kernels.quantize.arguments import Strides
from ..lazy import Lazily
from ..operand import BlockScaledTensor
from ..prepared_weight import PreparedWeight
from ..runtime.backend import Backend, resolve
from ..runtime.kernel import Kernel
from ..target import Target
from ..weight_layout import PACKINGS, SLAB_ROWS, Packing, interleaved, pack, pack_powers, tiles
from ..weight_layout_fp8 import LEAST, by_row, pack_rows
from .arguments import OPERAND
from .checks import DTYPE_NAMES, check_format
from .operation import Operation
from .planned import PlannedCall


def prepare_weight(
    weight: BlockScaledTensor,
    up: BlockScaledTensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    promoted: bool = False,
    backend: Backend = "auto",
) -> PreparedWeight:
    """Repacks a weight (N, K) for ``gemm(x, weight)`` of an x in 16 bits, or in FP8 on a Hopper GPU, once, when a model
    is loaded; or a stack (L, N, K) for ``grouped_gemm_contiguous``.

    The result takes as many bytes (rows padded to 128, K to 128; MXFP4 as many as NVFP4) and has the same values, bit
    for bit, but for float8_e4m3fn.

    Args:
        weight: a block-scaled operand; scales in any layout and of either sign. K is a multiple of a block.
            Scales of MXFP4, blocks of zeros apart, must lie within a factor of 2**30 (for float16 2**24). They are read
            here, once, and a power of two may become the result's global scale. For float16 those of MXFP8 must lie
            within 2**22 (E5M2: 2**8); for bfloat16 they may have any value. A block of MXFP8 with a NaN or an infinity
            becomes NaN altogether.
        up: a second weight like it. The result is then both, for ``gated_gemm(x, result)``, and the gate takes the
            product of ``weight``. Either both have a global scale, or none has.
        dtype: bfloat16 or float16: that of the x it will be multiplied with. An NVFP4 x takes float16. float8_e4m3fn is
            for x in FP8 (``RowScaledTensor``), on sm_90a: elements of NVFP4 times their scales are rounded to E4M3 when
            they are multiplied, as the result's ``dequantize`` says; MXFP4 stays exact, and is refused where scales of
            a row are more than 2**11 apart. A NaN scale makes all of its row NaN.
        promoted: for float8_e4m3fn, whether sums are added in fp32 after every 128 of K. Tensor cores keep about 14
            bits of them otherwise.
        backend: where no scales are read a kernel packs on a GPU, in one launch, to the bits of torch.

    Raises:
        OperandError, OperandTypeError: another format, another dtype, two weights that do not fit together.
    """
    weights = {"weight": weight} if up is None else {"weight": weight, "up": up}
    for name, x in weights.items():
        _check(name, x)
    name = "nvfp4" if weight.format == MXFP4 else weight.format.name
    if dtype not in PACKINGS[name]:
        raise OperandTypeError.of("dtype", got=dtype, expected=" or ".join(map(str, PACKINGS[name])))
    if up is not None:
        _check_pair(weight, up)
    if PACKINGS[name][dtype].by_table:
        return _rounded(weight, up, promoted)
    if promoted:
        raise OperandError.of("promoted sums", got=f"a weight for {dtype}", expected="dtype=torch.float8_e4m3fn")
    if weight.format != NVFP4 and PACKINGS[name][dtype].exponents is not None:
        packed, factors = _packed_powers(list(weights.values()), PACKINGS[name][dtype])
    else:
        packed = packed_tiles(weight if up is None else in_turn(weight, up), dtype, backend=backend)
        packed = packed if weight.is_batched else packed[0]
        factors = [x.global_scale for x in weights.values()]
    gate, of_up = (*factors, None)[:2]
    return PreparedWeight(packed, weight.rows, weight.k, dtype, gate, up is not None, of_up, name)


def _rounded(weight: BlockScaledTensor, up: BlockScaledTensor | None, promoted: bool) -> PreparedWeight:
    """A weight whose values are E4M3 times a power of two for each row.

    Raises:
        OperandError: blocks of MXFP4 that E4M3 cannot hold exactly beside the largest of their rows.
    """
    given, batched = [x for x in (weight, up) if x is not None], weight.is_batched
    codes = [unpack_e2m1(x.data) if batched else unpack_e2m1(x.data).unsqueeze(0) for x in given]
    scales = [weight.format.decode_scale(x.rowmajor_scale(), torch.float64) for x in given]
    scales = [x.repeat_interleave(weight.format.block // NVFP4.block, dim=-1) for x in scales]
    one, other = (x[0] if up is None else interleaved(*x) for x in (codes, scales))
    rows, packing = by_row(one, other), PACKINGS["nvfp4"][torch.float8_e4m3fn]
    if weight.format is MXFP4 and (least := float(rows.least)) < LEAST:
        raise OperandError.of(
            "scales in a row of an MXFP4 weight for torch.float8_e4m3fn",
            got=f"2**{6 - int(math.log2(least))} apart",
            expected=f"at most 2**{6 - int(math.log2(LEAST))}, where a block is not zero",
            hint="dtype=torch.bfloat16 takes 2**30.",
        )
    packed = pack_rows(rows, packing)
    factor = torch.nn.functional.pad(rows.factor, (0, -rows.factor.shape[-1] % SLAB_ROWS), value=1.0)
    packed, factor = (packed, factor) if batched else (packed[0], factor[0])
    gate, of_up = (*(x.global_scale for x in given), None)[:2]
    options = {"global_scale": gate, "gated": up is not None, "up_global_scale": of_up, "promoted": promoted}
    return PreparedWeight(packed, weight.rows, weight.k, packing.dtype, row_factor=factor.contiguous(), **options)


def _check(name: str, weight: BlockScaledTensor) -> None:
    """Raises unless ``weight`` can be repacked."""
    if not isinstance(weight, BlockScaledTensor):
        raise not_quantized(name, weight)
    check_format(name, weight, tuple(FORMATS.values()))


def _check_pair(gate: BlockScaledTensor, up: BlockScaledTensor) -> None:
    """Raises unless they fit together."""
    both = [
        f"{x.format.name} {tuple(x.data.shape)}, {'no' if x.global_scale is None else 'a'} global scale, {x.device}"
        for x in (gate, up)
    ]
    if both[0] != both[1]:
        expected = "the same format, sizes and device, global scales or none"
        raise OperandError.of("weights of a gated GEMM", got=" and ".join(both), expected=expected)


def in_turn(gate: BlockScaledTensor, up: BlockScaledTensor) -> BlockScaledTensor:
    """Both in one, rows in turn as tiles have them, without global scales."""
    data = interleaved(as_bytes(gate.data), as_bytes(up.data))
    scale = interleaved(*(as_bytes(x.rowmajor_scale()) for x in (gate, up)))
    return BlockScaledTensor(data, scale if gate.is_batched else scale[0], None, gate.format)


def packed_tiles(
    weight: BlockScaledTensor, dtype: torch.dtype, out: torch.Tensor | None = None, backend: Backend = "auto"
) -> torch.Tensor:
    """Tiles (L, row tiles, K tiles, bytes) of a weight (L, N, K), or of (N, K), whose L is 1."""
    return PACK.call(weight, dtype, out, backend)


def _check_tiles(r: Any) -> torch.Tensor:
    key = r.weight.key
    shape = (key.batch, *tiles(key.rows, key.k), PACKINGS[key.format.name][r.dtype].tile_bytes)
    return torch.empty(shape, dtype=torch.uint8, device=key.device) if r.out is None else r.out


def _target(r: Any, out: torch.Tensor) -> Target:
    target = resolve(r.backend, r.weight.device)
    return target if r.weight.key.plain else resolve("reference", r.weight.device)


def _plan(r: Any, target: Target) -> PlannedCall:
    key, (_, *tile) = r.weight.key, r.out.shape
    arguments = PackArguments(
        data="weight.data",
        scale="weight.scale",
        packed="out",
        rows=key.rows,
        k=key.k,
        k_tiles=tile[1],
        batch=key.batch,
        data_strides=Strides(*key.strides),
        scale_strides=Strides(*key.scale_strides),
        packed_batch_stride=math.prod(tile),
    )
    config = PackConfig(key.format, DTYPE_NAMES[r.dtype], key.scale_layout, target.arch)
    return PACK.planned(KERNEL, config, target, arguments, r)


def packed_by_torch(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Tiles (L, row tiles, K tiles, bytes) of every matrix, as the kernel packs them."""
    packing = PACKINGS[weight.format.name][dtype]
    if weight.format != NVFP4:
        return _tiles([_powers(weight, packing)], weight.is_batched, packing)
    codes = unpack_e2m1(weight.data)
    return pack(codes if weight.is_batched else codes.unsqueeze(0), as_bytes(weight.rowmajor_scale()), packing)


class Powers(NamedTuple):
    """What ``pack_powers`` takes of a weight of MX: codes (…, N, K), (…, N, K / 32) scales, times 2**shift, and blocks
    that are NaN."""

    codes: torch.Tensor
    scales: torch.Tensor
    nan: torch.Tensor
    shift: int = 0


def _powers(weight: BlockScaledTensor, packing: Packing) -> Powers:
    """Where the packing has exponents of its own, reads the range of the scales: waits for the device, once.

    Raises:
        OperandError: no power of two brings all that matter into range.
    """
    codes = unpack_e2m1(weight.data) if packing.element_bits == 4 else as_bytes(weight.data)
    scales = as_bytes(weight.rowmajor_scale())
    scales = scales if weight.is_batched else scales[0]
    magnitudes = (codes & ((1 << packing.element_bits - 1) - 1)).unflatten(-1, (-1, weight.format.block))
    nan = scales == 0xFF
    if packing.special:
        nan = nan | (magnitudes >= packing.special).any(-1)
    if packing.exponents is None:
        return Powers(codes, scales, nan)
    bias = packing.exponent_bias
    exponents = scales.to(torch.int16) + (bias - 127)
    used = exponents[magnitudes.bool().any(-1) & ~nan]
    least, most = packing.exponents
    low, high = torch.stack([used.min(), used.max()]).tolist() if used.numel() else (least, least)
    # the global scale is a number of float32
    if high - low > most - least or high - most > 127:
        wider = "2**30" if weight.format is MXFP4 else "any"
        top = min(most - bias + 127, 127)
        raise OperandError.of(
            f"scales of a weight of {weight.format.name} for {packing.dtype}",
            got=f"2**{low - bias} to 2**{high - bias}",
            expected=f"within a factor of 2**{most - least}, at most 2**{top}, where a block is not zero",
            hint="" if packing.dtype is torch.bfloat16 else f"torch.bfloat16 takes {wider}.",
        )
    shift = min(low - least, 0) + max(high - most, 0)
    return Powers(codes, (exponents - shift).clamp(0, 30).to(torch.uint8), nan, shift)


def _packed_powers(
    weights: Sequence[BlockScaledTensor], packing: Packing
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Tiles of one weight, or of two that are interleaved, and their global scales."""
    found, batched = [_powers(x, packing) for x in weights], weights[0].is_batched
    packed = _tiles(found, batched, packing)
    factors = [torch.tensor(2.0**x.shift, dtype=torch.float32, device=packed.device) for x in found]
    return packed if batched else packed[0], factors if any(x.shift for x in found) else [None] * len(found)


def _tiles(weights: Sequence[Powers], batched: bool, packing: Packing) -> torch.Tensor:
    """Tiles (L, row tiles, K tiles, bytes) of one weight, or of two that are interleaved."""
    parts = weights[0][:3]
    if len(weights) > 1:
        parts = [interleaved(*x) for x in zip(*(weight[:3] for weight in weights))]
    return pack_powers(*(x if batched else x.unsqueeze(0) for x in parts), packing)


KERNEL = Kernel("pack_weight", PackArguments, Lazily("kernels.pack.kernel", "Pack"))
compile_pack = KERNEL.compile
PACK = Operation(
    packed_tiles,
    {"weight": OPERAND},
    check=_check_tiles,
    reference=lambda r: packed_by_torch(r.weight, r.dtype),
    plan=_plan,
    target=_target,
    store=None,
)

"""Packs block-scaled weights in the layout of ``weight_layout`` by torch, as ``prepare_weight``'s kernel does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP4, NVFP4, Format, as_bytes, unpack_e2m1
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.weight_layout import PACKINGS, SLAB_ROWS, Packing, interleaved, pack, pack_powers
from cute_nvfp4.weight_layout_fp8 import LEAST, by_row, pack_rows


def packing_of(format: Format) -> str:
    """The key of ``PACKINGS`` for a weight of ``format``."""
    return "mxfp4_near" if format is MXFP4 else format.name


def in_turn(gate: BlockScaledTensor, up: BlockScaledTensor) -> BlockScaledTensor:
    """Both weights in one, with their rows in turn as tiles need them, without global scales."""
    data = interleaved(as_bytes(gate.data), as_bytes(up.data))
    scale = interleaved(*(as_bytes(x.rowmajor_scale()) for x in (gate, up)))
    return BlockScaledTensor(data, scale if gate.is_batched else scale[0], None, gate.format)


def packed_by_torch(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """The tiles (L, row tiles, K tiles, bytes) of every matrix, as the kernel packs them."""
    packing = PACKINGS[weight.format.name][dtype]
    if weight.format != NVFP4:
        return _tiles([_powers(weight, packing)], weight.is_batched, packing)
    codes = unpack_e2m1(weight.data)
    return pack(codes if weight.is_batched else codes.unsqueeze(0), as_bytes(weight.rowmajor_scale()), packing)


class Powers(NamedTuple):
    """The arguments of ``pack_powers`` for an MX weight.

    codes: (…, N, K). scales: (…, N, K / 32); times 2**shift they are those of the weight. nan: the blocks that are NaN.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    nan: torch.Tensor
    shift: int = 0


def _powers(weight: BlockScaledTensor, packing: Packing) -> Powers:
    """The codes and scales of a weight. If the packing has five-bit exponents, this waits for the device, once, to read
    the range of the scales.

    Raises:
        OperandError: no power of two brings the scales of all blocks that are not zero into range.
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
    # the global scale must be a finite float32
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


def packed_powers(
    weights: Sequence[BlockScaledTensor], packing: Packing
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The tiles of one weight, or of two that are interleaved, and their global scales."""
    found, batched = [_powers(x, packing) for x in weights], weights[0].is_batched
    packed = _tiles(found, batched, packing)
    factors = [torch.tensor(2.0**x.shift, dtype=torch.float32, device=packed.device) for x in found]
    return packed if batched else packed[0], factors if any(x.shift for x in found) else [None] * len(found)


def _tiles(weights: Sequence[Powers], batched: bool, packing: Packing) -> torch.Tensor:
    """The tiles (L, row tiles, K tiles, bytes) of one weight, or of two that are interleaved."""
    parts = weights[0][:3]
    if len(weights) > 1:
        parts = [interleaved(*x) for x in zip(*(weight[:3] for weight in weights))]
    return pack_powers(*(x if batched else x.unsqueeze(0) for x in parts), packing)


def rounded(weight: BlockScaledTensor, up: BlockScaledTensor | None, promoted: bool) -> PreparedWeight:
    """A weight for FP8: its values are E4M3 times a power of two for each row.

    Raises:
        OperandError: E4M3 cannot hold blocks of MXFP4 exactly beside the largest of their rows.
    """
    weights, batched = [x for x in (weight, up) if x is not None], weight.is_batched
    name = packing_of(weight.format)
    packing = PACKINGS[name][torch.float8_e4m3fn]
    stacks = [(x.data, x.rowmajor_scale()) if batched else (x.data[None], x.rowmajor_scale()) for x in weights]
    # one matrix after the other, because an element takes dozens of bytes on the way
    each = [
        _rounded([(data[i : i + 1], scale[i : i + 1]) for data, scale in stacks], weight.format, packing)
        for i in range(len(stacks[0][0]))
    ]
    packed, factor = (torch.cat(x) for x in zip(*each))
    packed, factor = (packed, factor) if batched else (packed[0], factor[0])
    gate, of_up = (*(x.global_scale for x in weights), None)[:2]
    options = {"global_scale": gate, "gated": up is not None, "up_global_scale": of_up, "packing": name}
    return PreparedWeight(
        packed, weight.rows, weight.k, packing.dtype, row_factor=factor.contiguous(), promoted=promoted, **options
    )


def _rounded(
    matrices: list[tuple[torch.Tensor, torch.Tensor]], format: Format, packing: Packing
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tiles (1, …) and the factors of the padded rows (1, rows), of one matrix or of two that are interleaved."""
    codes = [unpack_e2m1(data) for data, _ in matrices]
    scales = [format.decode_scale(scale, torch.float64) for _, scale in matrices]
    scales = [x.repeat_interleave(format.block // NVFP4.block, dim=-1) for x in scales]
    one, other = (x[0] if len(matrices) == 1 else interleaved(*x) for x in (codes, scales))
    rows = by_row(one, other)
    if format is MXFP4 and (least := float(rows.least)) < LEAST:
        raise OperandError.of(
            "scales in a row of an MXFP4 weight for torch.float8_e4m3fn",
            got=f"2**{6 - int(math.log2(least))} apart",
            expected=f"at most 2**{6 - int(math.log2(LEAST))}, where a block is not zero",
            hint="dtype=torch.bfloat16 takes 2**30.",
        )
    factor = torch.nn.functional.pad(rows.factor, (0, -rows.factor.shape[-1] % SLAB_ROWS), value=1.0)
    return pack_rows(rows, packing), factor

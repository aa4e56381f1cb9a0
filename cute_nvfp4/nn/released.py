"""A weight whose only copy is the repacked one: what packing loses, and how to restore the checkpoint's bytes.

``prepare_weight`` keeps every value, and the bytes of nearly every block. Some blocks it rewrites: codes under a scale
of ±0 become zeros, the sign of a negative scale moves to its block's codes, and MXFP4 blocks without a value, or with a
NaN scale, get another scale. For FP8, whose values are rounded when they are decoded, not when they are packed, it also
rewrites blocks far below the largest of their row, and blocks of rows with a NaN. ``rewritten`` finds these blocks by
unpacking and comparing, so ``unpacked`` returns exactly what was packed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cute_nvfp4.formats import MXFP4, NVFP4, Format, as_bytes, pack_e2m1
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.scale_layout import blocked_flat, to_blocked
from cute_nvfp4.weight_layout import TILE_ROWS, packed_rows, separated, unpack_nvfp4, unpack_powers
from cute_nvfp4.weight_layout_fp8 import unpack_blocks

_SLAB = 1 << 20
"""About how many elements are unpacked at a time; each takes some forty bytes of memory."""


class Rewritten(NamedTuple):
    """The blocks that packing rewrote. places: (n,), their positions in row-major order. contents: (n, block bytes +
    1) bytes, their codes and scale."""

    places: torch.Tensor
    contents: torch.Tensor


def rewritten(weight: BlockScaledTensor, packed: PreparedWeight) -> Rewritten | None:
    """The blocks of ``weight`` that ``packed``, which was made from it, does not restore; None if it restores all.

    weight: (N, K), or a stack (L, N, K); the rows of a gated weight are those of gate and then of up. It waits for the
    device.
    """
    block = weight.format.block_bytes
    codes = as_bytes(weight.data).reshape(-1, block)
    scales = as_bytes(weight.rowmajor_scale()).reshape(-1)
    found, done = [], 0
    for one in _matrices(packed):
        data, scale = (x.reshape(-1, n) for x, n in zip(_rowmajor_matrix(one, weight.format), (block, 1)))
        mine = slice(done, done + len(data))
        different = (data != codes[mine]).any(-1).logical_or_(scale[:, 0] != scales[mine])
        found.append(different.nonzero().flatten().add_(done))
        done = mine.stop
    places = torch.cat(found)
    return Rewritten(places, torch.cat((codes[places], scales[places, None]), dim=1)) if places.numel() else None


def unpacked_rowmajor(
    packed: PreparedWeight, lost: Rewritten | None, format: Format = NVFP4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data (N, K / 2) and row-major scales of the weight that was packed, with every code and every scale.

    A stack gives (L, …), a gated weight (2 N, …).
    """
    data, scale = _rowmajor(packed, format)
    if lost is not None:
        data.view(-1, format.block_bytes)[lost.places] = lost.contents[:, :-1]
        scale.view(-1)[lost.places] = lost.contents[:, -1]
    return data, scale


def unpacked(packed: PreparedWeight, lost: Rewritten | None, format: Format = NVFP4) -> BlockScaledTensor:
    """The weight (N, K) that was packed, with blocked scales in one dimension."""
    data, scale = unpacked_rowmajor(packed, lost, format)
    factor = packed.global_scale if format is NVFP4 else None
    return BlockScaledTensor(data, blocked_flat(to_blocked(scale)), factor, format)


def _matrices(packed: PreparedWeight) -> list[PreparedWeight]:
    """The weight itself, or each matrix of a stack."""
    if not packed.is_batched:
        return [packed]
    factors = [None] * packed.batch if packed.row_factor is None else packed.row_factor
    return [replace(packed, packed=one, row_factor=factor) for one, factor in zip(packed.packed, factors)]


def _rowmajor(packed: PreparedWeight, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and row-major scales as packing left them, for a matrix or a stack."""
    made = [_rowmajor_matrix(one, format) for one in _matrices(packed)]
    if not packed.is_batched:
        return made[0]
    data, scale = (torch.stack(x) for x in zip(*made))
    return data, scale


def _rowmajor_matrix(packed: PreparedWeight, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and row-major scales as packing left them, for one matrix."""
    rows, blocks = packed_rows(packed.rows, packed.gated), packed.k // format.block
    size: dict[str, Any] = {"dtype": torch.uint8, "device": packed.device}
    data = torch.empty((rows, packed.k // 2), **size)
    scale = torch.empty((rows, blocks), **size)
    together = max(1, _SLAB // (TILE_ROWS * packed.k))
    for first in range(0, packed.packed.shape[0], together):
        slab = slice(first * TILE_ROWS, min((first + together) * TILE_ROWS, rows))
        tiles = packed.packed[None, first : first + together]
        if packed.row_factor is not None:
            codes, values = unpack_blocks(tiles, packed.layout, packed.row_factor[None, slab])
            scales = _scales_of(values, format)
        else:
            codes, scales = (unpack_powers if format is MXFP4 else unpack_nvfp4)(tiles, packed.layout)
        count = slab.stop - slab.start
        data[slab] = pack_e2m1(codes[0, :count, : packed.k])
        scale[slab] = scales[0, :count, :blocks]
    halves = [data, scale]
    if packed.gated:
        halves = [separated(x)[:, : packed.rows] for x in halves]
    if format is MXFP4 and packed.row_factor is None:
        halves[1] = _powers(halves[1], packed)
    data, scale = (x.reshape(-1, x.shape[-1]) for x in halves)
    return data, scale


def _scales_of(values: torch.Tensor, format: Format) -> torch.Tensor:
    """The bytes of the scales of blocks of ``format``, from float64; 0 stands for no scale."""
    if format is MXFP4:
        return (values.frexp().exponent + 126).clamp(0, 0xFE).to(torch.uint8)
    return values.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)


def _powers(exponents: torch.Tensor, packed: PreparedWeight) -> torch.Tensor:
    """UE8M0 codes for the packing's exponents (…, rows, K / 32), moved back by the global scales of gate and up."""
    moved = [0 if x is None else x.log2().to(torch.int16).reshape(1, 1) for x in packed.global_scales]
    shift = torch.stack(moved) if torch.is_tensor(moved[0]) and packed.gated else moved[0]
    found = exponents.to(torch.int16) + (127 - packed.layout.exponent_bias) + shift
    return found.clamp(0, 0xFE).to(torch.uint8)

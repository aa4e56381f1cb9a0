"""A weight whose only copy is the repacked one: what packing does not keep, and the checkpoint's bytes back.

``prepare_weight`` keeps every value, and the bytes of nearly every block. Two kinds of blocks it rewrites: under a
scale of ±0 codes become zeros, and the sign of a negative scale moves to its block's codes. For FP8 values are rounded
when they are decoded, not when they are packed: a third kind of blocks is those far below the largest of their row, a
fourth those of a row with a NaN. A block of zeros is taken for one whose scale is 0. ``rewritten`` finds them by
unpacking and comparing, so that what ``unpacked`` gives is what was packed, whatever that was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_nvfp4.formats import NVFP4, as_bytes, pack_e2m1
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.scale_layout import blocked_flat, to_blocked
from cute_nvfp4.weight_layout import TILE_ROWS, unpack_nvfp4
from cute_nvfp4.weight_layout_fp8 import unpack_blocks

_BLOCK_BYTES = NVFP4.block_bytes
_SLAB_TILES = 16
"""Row tiles that are unpacked at a time: unpacking takes some forty bytes of memory for each element of these."""


class Rewritten(NamedTuple):
    """The blocks that packing rewrote: their places (n,) in row-major order, and (n, 9) bytes, codes and scale."""

    places: torch.Tensor
    contents: torch.Tensor


def rewritten(weight: BlockScaledTensor, packed: PreparedWeight) -> Rewritten | None:
    """The blocks of ``weight`` (N, K) that ``packed``, made of it, does not give back; None where it gives back all.

    It waits for the device.
    """
    data, scale = _rowmajor(packed)
    blocks = _blocks(as_bytes(weight.data), as_bytes(weight.rowmajor_scale())[0])
    places = (blocks != _blocks(data, scale)).any(-1).nonzero().flatten()
    return Rewritten(places, blocks[places]) if places.numel() else None


def unpacked(packed: PreparedWeight, lost: Rewritten | None) -> BlockScaledTensor:
    """The weight (N, K) that was packed, scales blocked and flat: every code, every scale."""
    data, scale = _rowmajor(packed)
    if lost is not None:
        data.view(-1, _BLOCK_BYTES)[lost.places] = lost.contents[:, :_BLOCK_BYTES]
        scale.view(-1)[lost.places] = lost.contents[:, _BLOCK_BYTES]
    return BlockScaledTensor(data, blocked_flat(to_blocked(scale)), packed.global_scale)


def _blocks(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each block's eight bytes of codes and its scale: (N · K / 16, 9), a copy."""
    return torch.cat((data.reshape(-1, _BLOCK_BYTES), scale.reshape(-1, 1)), dim=1)


def _rowmajor(packed: PreparedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Data (N, K / 2) and row-major scales (N, K / 16) as packing left them."""
    size: dict[str, Any] = {"dtype": torch.uint8, "device": packed.device}
    data = torch.empty((packed.rows, packed.k // 2), **size)
    scale = torch.empty((packed.rows, packed.k // NVFP4.block), **size)
    for first in range(0, packed.packed.shape[0], _SLAB_TILES):
        slab = packed.packed[None, first : first + _SLAB_TILES]
        rows = slice(first * TILE_ROWS, min((first + _SLAB_TILES) * TILE_ROWS, packed.rows))
        if packed.row_factor is None:
            codes, scales = unpack_nvfp4(slab, packed.layout)
        else:
            codes, scales = unpack_blocks(slab, packed.layout, packed.row_factor[None, rows])
        count = rows.stop - rows.start
        data[rows] = pack_e2m1(codes[0, :count, : packed.k])
        scale[rows] = scales[0, :count, : scale.shape[1]]
    return data, scale

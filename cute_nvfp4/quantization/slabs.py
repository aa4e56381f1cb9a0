"""Quantizes a tensor in torch, a slab at a time, so that temporaries stay small beside it; and finds its amax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_nvfp4.formats import Format, pack_e2m1
from cute_nvfp4.quantization import philox
from cute_nvfp4.quantization.block_request import GlobalScale, Request
from cute_nvfp4.quantization.blocks import quantize_blocks
from cute_nvfp4.quantization.hadamard import Hadamard
from cute_nvfp4.quantization.rules import Rule

# elements of a slab; temporaries take some twenty bytes for each, a hundred with stochastic rounding
_CPU_SLAB, _DEVICE_SLAB = 1 << 19, 1 << 23


class Slab(NamedTuple):
    """A part of a source: its ``batch`` and ``rows``, and its values, (L', MN' rounded up to whole tiles, k)."""

    batch: slice
    rows: slice
    values: torch.Tensor


@dataclass(frozen=True)
class Source:
    """Matrices (L, MN, K), read in slabs as float32, padded to ``k`` columns and whole tiles, and rotated."""

    matrices: torch.Tensor
    k: int
    rotation: Hadamard | None
    tile: int

    def slabs(self) -> Iterator[Slab]:
        """The whole source, in parts that are small enough."""
        batch, rows, _ = self.matrices.shape
        if torch.compiler.is_compiling():
            # compiled code has few temporaries, and slices would give it several copies, each for its sizes only
            yield self._read(slice(None), slice(None))
            return
        limit = _CPU_SLAB if self.matrices.device.type == "cpu" else _DEVICE_SLAB
        row_step = max(1, limit // (self.k * self.tile)) * self.tile
        batch_step = max(1, limit // (self.k * rows)) if row_step >= rows else 1
        for first in range(0, batch, batch_step):
            for row in range(0, rows, row_step):
                yield self._read(slice(first, min(first + batch_step, batch)), slice(row, min(row + row_step, rows)))

    def _read(self, batch: slice, rows: slice) -> Slab:
        values = self.matrices[batch, rows].to(torch.float32)
        extra_rows = -values.shape[1] % self.tile
        values = torch.nn.functional.pad(values, (0, self.k - values.shape[2], 0, extra_rows))
        return Slab(batch, rows, values if self.rotation is None else self.rotation.rotate(values))


def quantize_slabs(
    source: Source,
    rule: Rule,
    format: Format,
    factor: torch.Tensor | None,
    seed: int | None,
    hessian: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a source: data (L, MN, bytes of K) and row-major scales (L, MN, K/block)."""
    batch, rows, _ = source.matrices.shape
    device = source.matrices.device
    data = torch.empty((batch, rows, format.data_columns(source.k)), dtype=torch.uint8, device=device)
    scale = torch.empty((batch, rows, format.scale_columns(source.k)), dtype=torch.uint8, device=device)
    one = torch.ones((), device=device)
    scaling = GlobalScale.of(one if factor is None else factor) if format.has_global_scale else None
    for slab in source.slabs():
        shape, height = slab.values.shape, data[:, slab.rows].shape[1]
        uniform = None
        if seed is not None:

            def uniform(stream: int, slab: Slab = slab) -> torch.Tensor:
                index = _element_index(slab, rows)
                return philox.uniform(seed, _to_blocks(index, format, source.tile), stream)

        request = Request(format, rule, scaling, source.tile > 1, uniform, hessian)
        codes, scales = quantize_blocks(_to_blocks(slab.values, format, source.tile), request)
        codes = _from_blocks(codes, shape, format, source.tile)[:, :height]
        scales = scales.reshape(shape[0], -1, shape[2] // format.block).repeat_interleave(source.tile, 1)
        data[slab.batch, slab.rows] = pack_e2m1(codes) if format.elements_per_byte == 2 else codes
        scale[slab.batch, slab.rows] = scales[:, :height]
    return data, scale


def _to_blocks(values: torch.Tensor, format: Format, tile: int) -> torch.Tensor:
    """(L, MN, K) as element-major blocks (elements, blocks), with blocks in the order (L, MN / tile, K / block)."""
    batch, rows, k = values.shape
    tiles = values.reshape(batch, rows // tile, tile, k // format.block, format.block)
    return tiles.permute(2, 4, 0, 1, 3).reshape(tile * format.block, -1)


def _from_blocks(blocks: torch.Tensor, shape: torch.Size, format: Format, tile: int) -> torch.Tensor:
    """The inverse of ``_to_blocks``."""
    batch, rows, k = shape
    tiles = blocks.reshape(tile, format.block, batch, rows // tile, k // format.block)
    return tiles.permute(2, 3, 0, 4, 1).reshape(shape)


def _element_index(slab: Slab, rows: int) -> torch.Tensor:
    """(l · MN + row) · K + k for the elements of a slab, in int64. Rows that pad a tile repeat later indices."""
    (batch, slab_rows, k), device = slab.values.shape, slab.values.device
    matrix = torch.arange(batch, device=device)[:, None] + (slab.batch.start or 0)
    lines = matrix * rows + torch.arange(slab_rows, device=device) + (slab.rows.start or 0)
    return lines[:, :, None] * k + torch.arange(k, device=device)


def amax(source: Source) -> torch.Tensor:
    """The largest finite magnitude, a float32 tensor without dimensions; 0 if no element is finite."""
    largest = torch.zeros((), device=source.matrices.device)
    for slab in source.slabs():
        magnitude = slab.values.abs()
        finite = magnitude.masked_fill_(~torch.isfinite(magnitude), 0)
        largest = torch.maximum(largest, finite.amax())
    return largest

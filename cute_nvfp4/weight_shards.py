"""Cuts weights into shards for several GPUs: rows (N) or columns (K), only where bytes can be cut, without rounding.

A shard has the codes, scales and global scale of the whole weight, so it multiplies the same values as the whole weight
does in its place. Rows of a ``BlockScaledTensor`` can be cut anywhere, columns between blocks. A ``PreparedWeight`` can
be cut between its tiles of 128 rows (64 of gate and 64 of up) and 128 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.scale_layout import blocked_flat, to_blocked
from cute_nvfp4.weight_layout import TILE_K, TILE_ROWS

PREPARED_K = 2 * TILE_K
"""The columns of a prepared weight that a stage of its kernels reads: K can be cut at multiples of this."""
Weight = TypeVar("Weight", BlockScaledTensor, PreparedWeight)


def shard_rows(weight: Weight, rank: int, count: int, parts: Sequence[int] | None = None) -> Weight:
    """The rows (N) of ``weight`` that rank ``rank`` of ``count`` multiplies in a column-parallel layer; a copy.

    parts: the rows of the matrices that lie one below the other in a fused weight, such as (q, k, v) or (gate, up);
        their sum is N. A rank gets its share of each, in order. None: one matrix. A gated prepared weight is one
        matrix: its shard has the same rows of gate and of up.

    Raises:
        OperandError: the rows do not divide by the ranks, or a prepared weight cannot be cut there.
    """
    _check_rank(rank, count)
    sizes = [weight.rows] if parts is None else list(parts)
    if sum(sizes) != weight.rows or min(sizes) < 1:
        raise OperandError.of("parts of a fused weight", got=sizes, expected=f"positive numbers with sum {weight.rows}")
    prepared = isinstance(weight, PreparedWeight)
    step = 1 if not prepared else TILE_ROWS // 2 if weight.gated else TILE_ROWS
    cut, first = [], 0
    for size in sizes:
        share = _share("rows (N)", size, count, step, "ranks" if step == 1 else f"ranks times {step}, a tile's rows")
        cut.append(slice(first + rank * share, first + (rank + 1) * share))
        first += size
    rows = sum(x.stop - x.start for x in cut)
    if not prepared:
        data = torch.cat([weight.data[..., x, :] for x in cut], dim=-2)
        return _block_scaled(weight, data, torch.cat([weight.rowmajor_scale()[:, x] for x in cut], dim=1))
    tiles = [slice(x.start // step, x.stop // step) for x in cut]
    packed, factor = torch.cat([weight.packed[..., x, :, :] for x in tiles], dim=-3), weight.row_factor
    if factor is not None:
        factor = torch.cat([factor[..., x.start * TILE_ROWS : x.stop * TILE_ROWS] for x in tiles], dim=-1)
    return replace(weight, packed=packed, rows=rows, row_factor=factor)


def shard_columns(weight: Weight, rank: int, count: int) -> Weight:
    """The columns (K) of ``weight`` that rank ``rank`` of ``count`` multiplies in a row-parallel layer; a copy.

    The row factors of an FP8 weight stay those of the whole rows.

    Raises:
        OperandError: the columns do not divide by the ranks, or only within a block, or a tile of a prepared weight.
    """
    _check_rank(rank, count)
    if isinstance(weight, PreparedWeight):
        words = f"ranks times {PREPARED_K}, a tile's columns"
        share = _share("columns (K) of a prepared weight", weight.k, count, PREPARED_K, words)
        tiles = share // TILE_K
        packed = weight.packed[..., rank * tiles : (rank + 1) * tiles, :].contiguous()
        return replace(weight, packed=packed, k=share)
    block = weight.format.block
    share = _share("columns (K)", weight.k, count, block, f"ranks times {block}, which share a scale")
    bytes_, scales = share // weight.format.elements_per_byte, share // block
    data = weight.data[..., rank * bytes_ : (rank + 1) * bytes_].contiguous()
    return _block_scaled(weight, data, weight.rowmajor_scale()[..., rank * scales : (rank + 1) * scales])


def shard_stack(weight: Weight, rank: int, count: int) -> Weight:
    """The matrices of a stack (L, N, K) that rank ``rank`` of ``count`` holds in expert parallelism; a view."""
    _check_rank(rank, count)
    if not weight.is_batched:
        raise OperandError.of("weights of experts", got="a matrix", expected="a stack (L, N, K)")
    share = _share("experts", weight.batch, count, 1, "ranks")
    mine = slice(rank * share, (rank + 1) * share)
    if isinstance(weight, PreparedWeight):
        factor = None if weight.row_factor is None else weight.row_factor[mine]
        return replace(weight, packed=weight.packed[mine], row_factor=factor)
    blocked = weight.scale_layout == "blocked"
    scale = weight.blocked_scale()[..., mine] if blocked else weight.scale[mine]
    return BlockScaledTensor(weight.data[mine], scale, weight.global_scale, weight.format)


def _block_scaled(weight: BlockScaledTensor, data: torch.Tensor, scale: torch.Tensor) -> BlockScaledTensor:
    """An operand of cut data and row-major scales (L, N, K / block), in the scale layout of ``weight``."""
    if weight.scale_layout == "blocked":
        laid_out = to_blocked(scale)
        laid_out = blocked_flat(laid_out) if weight.scale.ndim == 1 else laid_out
    else:
        laid_out = (scale if weight.is_batched else scale[0]).contiguous()
    return BlockScaledTensor(data, laid_out, weight.global_scale, weight.format)


def _share(what: str, size: int, count: int, step: int, expected: str) -> int:
    """The share of ``size`` that a rank has.

    Raises:
        OperandError: the share is not a multiple of ``step``.
    """
    if size % (count * step):
        raise OperandError.of(
            f"{what} over {count} ranks",
            got=size,
            expected=f"a multiple of {count * step} ({expected})",
            hint="Use fewer ranks, or pad the weight with zeros before it is quantized.",
        )
    return size // count


def _check_rank(rank: int, count: int) -> None:
    if not 0 <= rank < count:
        raise OperandError.of("rank", got=f"{rank} of {count}", expected="0 ≤ rank < count")

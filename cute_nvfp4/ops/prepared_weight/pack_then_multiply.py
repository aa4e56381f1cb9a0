"""Products of block-scaled operands on sm_90a: each call packs the weights and multiplies them as prepared ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ...formats import NVFP4, as_bytes
from ...kernels.gemm.config import INTERLEAVED_ROWS
from ...operand import BlockScaledTensor
from ...planning.packed import check_plan
from ...prepared_weight import PreparedWeight
from ...runtime.backend import Backend
from ...scale_layout import to_blocked
from ...weight_layout import PACKINGS, tiles
from ...weight_packing import in_turn
from ..checks import check_overlap, reads
from ..list_launch import ListRequest, Pair
from ..prepare_weight import packed_tiles
from ..quantize import quantize
from .gemm import PREPARED_GEMM, quantized_scale
from .groups import PreparedList


def product_dtype(weight: BlockScaledTensor) -> torch.dtype:
    """The dtype in which a product with this weight is exact in all values of both operands."""
    return torch.float16 if weight.format is NVFP4 else torch.bfloat16


def as_prepared(packed: torch.Tensor, weight: BlockScaledTensor, up: BlockScaledTensor | None = None) -> PreparedWeight:
    """The prepared weight made of the tiles of ``weight``, or of ``weight`` and ``up``."""
    gated, of_up = up is not None, None if up is None else up.global_scale
    dtype, packing = product_dtype(weight), weight.format.name
    return PreparedWeight(packed, weight.rows, weight.k, dtype, weight.global_scale, gated, of_up, packing)


def packed_first(weight: BlockScaledTensor, backend: Backend) -> PreparedWeight:
    """A stack (L, N, K), packed by one launch."""
    return as_prepared(packed_tiles(weight, product_dtype(weight), backend=backend), weight)


class PackThenMultiply:
    """A planned call of ``gemm`` or ``gated_gemm`` that packs its weights.

    One launch packs all matrices of b; two weights are first copied into one with their rows in turn. Each matrix is
    multiplied by one launch, or by two if a has more rows than the streaming kernel takes, or is MX. An output that is
    contiguous along M is a copy of the product; a quantized output takes one more launch.

    Products are in float16 for NVFP4 and in bfloat16 for MX, which hold both operands exactly.
    """

    def __init__(self, r: Any) -> None:
        check_plan(r.config)
        self._request, self._quantized = type(r), isinstance(r.out, BlockScaledTensor)
        shape = (*r.out.data.shape[:-1], r.out.k) if self._quantized else r.out.shape
        dtype = torch.float32 if self._quantized else r.out.dtype
        self._new = functools.partial(torch.empty, shape, dtype=dtype, device=r.a.device)

    def __call__(self, *args: Any) -> torch.Tensor | BlockScaledTensor:
        r = self._request(*args)
        a, out, bias, (first, second) = r.a, r.out, getattr(r, "bias", None), _weights(r)
        written = isinstance(out, torch.Tensor)
        if written:
            check_overlap(reads(r), out)
        along_n = written and (out.shape[-1] == 1 or out.stride(-1) == 1)
        product = out if along_n else self._new()
        both = first if second is None else in_turn(first, second)
        packed = packed_tiles(both, product_dtype(first), backend=r.backend)
        products = product if a.is_batched else product.unsqueeze(0)
        for i in range(a.batch):
            weight = as_prepared(packed[i], first, second)
            own, gate = bias[i] if bias is not None and bias.ndim == 2 else bias, getattr(r, "gate", "")
            PREPARED_GEMM(_matrix(a, i), weight, r.alpha, own, products[i], None, r.config, r.backend, gate)
        if self._quantized:
            scale = quantized_scale(r, product.shape[-1])
            return quantize(product, NVFP4, "max", global_scale=scale, out=out, backend=r.backend)
        return out.copy_(product) if written and not along_n else product


def _weights(r: Any) -> tuple[BlockScaledTensor, BlockScaledTensor | None]:
    """The weights of a request: one and None, or two."""
    if "b" in r._fields:
        return r.b, None
    return (r.b1, r.b2) if r.b2 is not None else _halves(r.b1, r.interleaved)


def _matrix(a: BlockScaledTensor, i: int) -> BlockScaledTensor:
    """Matrix i of a batch, with blocked scales."""
    blocked = a.blocked_scale() if a.scale_layout == "blocked" else to_blocked(a.rowmajor_scale())
    return BlockScaledTensor(a.data[i] if a.is_batched else a.data, blocked[..., i : i + 1], a.global_scale, a.format)


class PackThenMultiplyList:
    """The planned launches of a list of groups: one for each group packs its weight, then those of ``PreparedList``."""

    repeatable: ClassVar[bool] = False

    def __init__(self, r: ListRequest) -> None:
        check_plan(r.config)
        self._backend: Backend = r.target.backend
        like = [(_matrix(a, 0), as_prepared(self._room(b), b)) for a, b in r.pairs]
        self._launch = PreparedList(r._replace(pairs=like))

    @staticmethod
    def _room(weight: BlockScaledTensor) -> torch.Tensor:
        """New memory for the tiles of a weight."""
        size = PACKINGS[weight.format.name][product_dtype(weight)].tile_bytes
        return torch.empty((*tiles(weight.rows, weight.k), size), dtype=torch.uint8, device=weight.device)

    def multiply(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> None:
        """Packs the weights of groups like the planned ones, and multiplies."""

        def packed(b: BlockScaledTensor) -> PreparedWeight:
            return as_prepared(packed_tiles(b, product_dtype(b), backend=self._backend)[0], b)

        self._launch.multiply([(_matrix(a, 0), packed(b)) for a, b in pairs], outs, scalar, alpha)


def _halves(both: BlockScaledTensor, interleaved: bool) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """The two weights that one holds: all rows of the first before those of the second, or blocks of both in turn."""
    block = INTERLEAVED_ROWS if interleaved else both.rows // 2
    parts = as_bytes(both.data), as_bytes(both.rowmajor_scale() if both.is_batched else both.rowmajor_scale()[0])
    split = [x.unflatten(-2, (-1, 2, block)) for x in parts]
    weights = [[x[..., i, :, :].flatten(-3, -2) for x in split] for i in range(2)]
    return tuple(BlockScaledTensor(*x, both.global_scale, both.format) for x in weights)

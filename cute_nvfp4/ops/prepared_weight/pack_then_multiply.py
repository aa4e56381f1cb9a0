"""Products of block-scaled operands on sm_90a: weights are packed by each call, and multiplied as prepared ones are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ...formats import NVFP4, as_bytes
from ...kernels.gemm.config import INTERLEAVED_ROWS
from ...operand import BlockScaledTensor
from ...planning.packed import PackedPlan, check_plan
from ...prepared_weight import PreparedWeight
from ...runtime.backend import Backend
from ...scale_layout import to_blocked
from ...target import Target
from ...weight_layout import PACKINGS, tiles
from ..checks import check_overlap, inputs
from ..list_launch import Pair
from ..prepare_weight import in_turn, packed_tiles
from ..quantize import quantize
from .gemm import PREPARED_GEMM, quantized_scale
from .groups import PreparedList


def product_dtype(weight: BlockScaledTensor) -> torch.dtype:
    """The dtype in which values of a format, and of an x in it, are exact."""
    return torch.float16 if weight.format is NVFP4 else torch.bfloat16


def as_prepared(packed: torch.Tensor, weight: BlockScaledTensor, up: BlockScaledTensor | None = None) -> PreparedWeight:
    """The prepared weight that tiles of ``weight``, or of it and ``up``, are."""
    gated, of_up = up is not None, None if up is None else up.global_scale
    dtype, packing = product_dtype(weight), weight.format.name
    return PreparedWeight(packed, weight.rows, weight.k, dtype, weight.global_scale, gated, of_up, packing)


def packed_first(weight: BlockScaledTensor, backend: Backend) -> PreparedWeight:
    """A stack (L, N, K), packed by one launch."""
    return as_prepared(packed_tiles(weight, product_dtype(weight), backend=backend), weight)


class PackThenMultiply:
    """A planned call: a launch packs all matrices of b, and each is multiplied by one launch, or by two where a has
    more rows than the streaming kernel takes, or is MX. An output contiguous along M is a copy of the product's.

    Products are in float16 for NVFP4, in bfloat16 for MX, in which both operands are exact.
    """

    def __init__(
        self,
        a: BlockScaledTensor,
        b: BlockScaledTensor,
        out: torch.Tensor,
        config: PackedPlan | None,
        backend: Backend,
    ) -> None:
        check_plan(config)
        self._dtype = product_dtype(b)
        self._shape, self._options = out.shape, {"dtype": out.dtype, "device": out.device}
        self._config, self._backend = config, backend

    def __call__(
        self, a: BlockScaledTensor, b: BlockScaledTensor, alpha: Any, bias: Any, out: torch.Tensor | None, *options: Any
    ) -> torch.Tensor:
        if out is not None:
            check_overlap(inputs(a=a, b=b, alpha=alpha, bias=bias), out)
        along_n = out is not None and (b.rows == 1 or out.stride(-1) == 1)
        product = out if along_n else torch.empty(self._shape, **self._options)
        packed = packed_tiles(b, self._dtype, backend=self._backend)
        products = product if a.is_batched else product.unsqueeze(0)
        for i in range(a.batch):
            weight = as_prepared(packed[i], b)
            own = bias[i] if bias is not None and bias.ndim == 2 else bias
            PREPARED_GEMM(_matrix(a, i), weight, alpha, own, products[i], None, self._config, self._backend, "")
        return product if out is None or along_n else out.copy_(product)


def _matrix(a: BlockScaledTensor, i: int) -> BlockScaledTensor:
    """Matrix i of a batch, scales blocked."""
    blocked = a.blocked_scale() if a.scale_layout == "blocked" else to_blocked(a.rowmajor_scale())
    return BlockScaledTensor(a.data[i] if a.is_batched else a.data, blocked[..., i : i + 1], a.global_scale, a.format)


class PackThenGate:
    """A planned gated call: a launch packs both weights, whose rows are copied in turn before, and each matrix of a
    batch is multiplied as by ``PackThenMultiply``; a quantized result takes a launch more. n: rows of each weight."""

    def __init__(self, r: Any, n: int) -> None:
        check_plan(r.config)
        self._n, self._quantized = n, isinstance(r.out, BlockScaledTensor)
        shape = (r.a.batch, r.a.rows, n) if r.a.is_batched else (r.a.rows, n)
        dtype = torch.float32 if self._quantized else r.out.dtype
        self._new = functools.partial(torch.empty, shape, dtype=dtype, device=r.a.device)

    def __call__(
        self,
        a: BlockScaledTensor,
        b1: BlockScaledTensor,
        b2: BlockScaledTensor | None,
        gate: str,
        alpha: Any,
        interleaved: bool,
        out: Any,
        out_dtype: torch.dtype | None,
        out_global_scale: Any,
        config: PackedPlan | None,
        backend: Backend,
    ) -> Any:
        if isinstance(out, torch.Tensor):
            check_overlap(inputs(a=a, b1=b1, b2=b2, alpha=alpha), out)
        along_n = isinstance(out, torch.Tensor) and (self._n == 1 or out.stride(-1) == 1)
        product = out if along_n else self._new()
        first, second = (b1, b2) if b2 is not None else _halves(b1, interleaved)
        packed = packed_tiles(in_turn(first, second), product_dtype(first), backend=backend)
        products = product if a.is_batched else product.unsqueeze(0)
        for i in range(a.batch):
            weight = as_prepared(packed[i], first, second)
            PREPARED_GEMM(_matrix(a, i), weight, alpha, None, products[i], None, config, backend, gate)
        if self._quantized:
            scale = quantized_scale(out, out_dtype, out_global_scale)
            return quantize(product, NVFP4, "max", global_scale=scale, out=out, backend=backend)
        return product if out is None or along_n else out.copy_(product)


class PackThenMultiplyList:
    """The planned launches of a list of groups: one packs the weight of each, then those of ``PreparedList``."""

    only_addresses: ClassVar[bool] = False

    def __init__(
        self,
        pairs: Sequence[Pair],
        outs: Sequence[torch.Tensor],
        alpha: torch.Tensor | None,
        target: Target,
        config: PackedPlan | None,
        gate: str,
    ) -> None:
        check_plan(config)
        self._backend: Backend = target.backend
        like = [(_matrix(a, 0), as_prepared(self._room(b), b)) for a, b in pairs]
        self._launch = PreparedList(like, outs, alpha, target, config, gate)

    @staticmethod
    def _room(weight: BlockScaledTensor) -> torch.Tensor:
        """Memory for the tiles of a weight."""
        size = PACKINGS[weight.format.name][product_dtype(weight)].tile_bytes
        return torch.empty((*tiles(weight.rows, weight.k), size), dtype=torch.uint8, device=weight.device)

    def __call__(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> None:
        def packed(b: BlockScaledTensor) -> PreparedWeight:
            return as_prepared(packed_tiles(b, product_dtype(b), backend=self._backend)[0], b)

        self._launch([(_matrix(a, 0), packed(b)) for a, b in pairs], outs, scalar, alpha)


def _halves(both: BlockScaledTensor, interleaved: bool) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """The two weights that one has: all rows of the first before those of the second, or blocks of both in turn."""
    block = INTERLEAVED_ROWS if interleaved else both.rows // 2
    parts = as_bytes(both.data), as_bytes(both.rowmajor_scale() if both.is_batched else both.rowmajor_scale()[0])
    split = [x.unflatten(-2, (-1, 2, block)) for x in parts]
    weights = [[x[..., i, :, :].flatten(-3, -2) for x in split] for i in range(2)]
    return tuple(BlockScaledTensor(*x, both.global_scale, both.format) for x in weights)

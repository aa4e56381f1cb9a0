"""gemm of two block-scaled operands on sm_90a: b is packed by each call, and multiplied as a prepared weight is."""

from __future__ import annotations

from typing import Any

import torch

from ...formats import NVFP4
from ...operand import BlockScaledTensor
from ...planning.packed import PackedPlan, check_plan
from ...prepared_weight import PreparedWeight
from ...runtime.backend import Backend
from ...scale_layout import to_blocked
from ..checks import check_overlap, inputs
from ..prepare_weight import packed_tiles
from .gemm import PREPARED_GEMM


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
        self._dtype = torch.float16 if b.format is NVFP4 else torch.bfloat16
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
            weight = PreparedWeight(packed[i], b.rows, b.k, self._dtype, b.global_scale, packing=b.format.name)
            own = bias[i] if bias is not None and bias.ndim == 2 else bias
            PREPARED_GEMM(_matrix(a, i), weight, alpha, own, products[i], None, self._config, self._backend, "")
        return product if out is None or along_n else out.copy_(product)


def _matrix(a: BlockScaledTensor, i: int) -> BlockScaledTensor:
    """Matrix i of a batch, scales blocked."""
    blocked = a.blocked_scale() if a.scale_layout == "blocked" else to_blocked(a.rowmajor_scale())
    return BlockScaledTensor(a.data[i] if a.is_batched else a.data, blocked[..., i : i + 1], a.global_scale, a.format)

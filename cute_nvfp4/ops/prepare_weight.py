"""prepare_weight: repack an NVFP4 weight once, for the GEMMs of sm_90a."""

from __future__ import annotations

import torch

from ..errors import OperandTypeError
from ..formats import NVFP4, as_bytes
from ..operand import BlockScaledTensor
from ..prepared_weight import PreparedWeight
from ..weight_layout import DECODERS, pack
from .checks import check_format


def prepare_weight(weight: BlockScaledTensor, *, dtype: torch.dtype = torch.bfloat16) -> PreparedWeight:
    """Repacks an NVFP4 weight (N, K) for ``gemm(x, weight)`` on a Hopper GPU, once, when a model is loaded; or a stack
    (L, N, K) for ``grouped_gemm_contiguous``.

    The result takes as many bytes (rows padded to 128, K to 128) and stands for the same numbers, bit for bit.

    Args:
        weight: an NVFP4 operand, scales in any layout, of either sign. K is a multiple of 16.
        dtype: bfloat16 or float16: that of the x it will be multiplied with. An NVFP4 x takes float16.

    Raises:
        OperandError, OperandTypeError: another format, another dtype.
    """
    if not isinstance(weight, BlockScaledTensor):
        raise OperandTypeError.of("weight", got=type(weight).__name__, expected="BlockScaledTensor")
    check_format("weight", weight, (NVFP4,))
    if dtype not in DECODERS:
        raise OperandTypeError.of("dtype", got=dtype, expected=" or ".join(map(str, DECODERS)))
    data = as_bytes(weight.data)
    scales = as_bytes(weight.rowmajor_scale())

    def codes(data: torch.Tensor) -> torch.Tensor:
        return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).unsqueeze(0)

    if weight.is_batched:
        # a matrix at a time: packing takes many times its bytes
        packed = torch.cat([pack(codes(data[i]), scales[i : i + 1], dtype) for i in range(weight.batch)])
    else:
        packed = pack(codes(data), scales, dtype)[0]
    return PreparedWeight(packed, weight.rows, weight.k, dtype, weight.global_scale)

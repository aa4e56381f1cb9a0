"""prepare_weight: repack an NVFP4 weight once, for the GEMMs of sm_90a."""

from __future__ import annotations

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import NVFP4, as_bytes
from ..operand import BlockScaledTensor
from ..prepared_weight import PreparedWeight
from ..weight_layout import DECODERS, pack
from .checks import check_format


def prepare_weight(weight: BlockScaledTensor, *, dtype: torch.dtype = torch.bfloat16) -> PreparedWeight:
    """Repacks an NVFP4 weight (N, K) for ``gemm(x, weight)`` on a Hopper GPU, once, when a model is loaded.

    The result takes as many bytes (rows padded to 128, K to 128) and stands for the same numbers, bit for bit.

    Args:
        weight: an NVFP4 operand without a batch dimension, scales in any layout, of either sign. K is a multiple of 16.
        dtype: bfloat16 or float16: that of the x it will be multiplied with. An NVFP4 x takes float16.

    Raises:
        OperandError, OperandTypeError: another format, a batch, another dtype.
    """
    if not isinstance(weight, BlockScaledTensor):
        raise OperandTypeError.of("weight", got=type(weight).__name__, expected="BlockScaledTensor")
    check_format("weight", weight, (NVFP4,))
    if weight.is_batched:
        raise OperandError.of(
            "weight", got=f"a batch of {weight.batch}", expected="a matrix (N, K)", hint="Prepare each matrix."
        )
    if dtype not in DECODERS:
        raise OperandTypeError.of("dtype", got=dtype, expected=" or ".join(map(str, DECODERS)))
    data = as_bytes(weight.data)
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
    packed = pack(codes.unsqueeze(0), as_bytes(weight.rowmajor_scale()), dtype)[0]
    return PreparedWeight(packed, weight.rows, weight.k, dtype, weight.global_scale)

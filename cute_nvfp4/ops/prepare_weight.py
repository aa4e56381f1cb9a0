"""prepare_weight: repack an NVFP4 weight once, for the GEMMs of sm_90a."""

from __future__ import annotations

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import NVFP4, as_bytes
from ..operand import BlockScaledTensor
from ..prepared_weight import PreparedWeight
from ..weight_layout import DECODERS, interleaved, pack
from .checks import check_format


def prepare_weight(
    weight: BlockScaledTensor, up: BlockScaledTensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> PreparedWeight:
    """Repacks an NVFP4 weight (N, K) for ``gemm(x, weight)`` on a Hopper GPU, once, when a model is loaded.

    The result takes as many bytes (rows padded to 128, K to 128) and stands for the same numbers, bit for bit.

    Args:
        weight: an NVFP4 operand without a batch dimension, scales in any layout, of either sign. K is a multiple of 16.
        up: another (N, K): the result is both, for ``gated_gemm(x, result)``; the gate takes the product of ``weight``.
            Both have a global scale, each its own, or none.
        dtype: bfloat16 or float16: that of the x it will be multiplied with. An NVFP4 x takes float16.

    Raises:
        OperandError, OperandTypeError: another format, a batch, another dtype, two weights that do not fit together.
    """
    weights = {"weight": weight} if up is None else {"weight": weight, "up": up}
    for name, x in weights.items():
        _check(name, x)
    if dtype not in DECODERS:
        raise OperandTypeError.of("dtype", got=dtype, expected=" or ".join(map(str, DECODERS)))
    if up is not None:
        _check_pair(weight, up)
    codes = [_codes(x) for x in weights.values()]
    scales = [as_bytes(x.rowmajor_scale())[0] for x in weights.values()]
    if up is not None:
        codes, scales = [interleaved(*codes)], [interleaved(*scales)]
    packed = pack(codes[0].unsqueeze(0), scales[0].unsqueeze(0), dtype)[0]
    up_scale = None if up is None else up.global_scale
    return PreparedWeight(packed, weight.rows, weight.k, dtype, weight.global_scale, up is not None, up_scale)


def _codes(weight: BlockScaledTensor) -> torch.Tensor:
    """Its E2M1 codes (N, K), one a byte."""
    data = as_bytes(weight.data)
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def _check(name: str, weight: BlockScaledTensor) -> None:
    """Raises unless ``weight`` can be repacked."""
    if not isinstance(weight, BlockScaledTensor):
        raise OperandTypeError.of(name, got=type(weight).__name__, expected="BlockScaledTensor")
    check_format(name, weight, (NVFP4,))
    if weight.is_batched:
        raise OperandError.of(
            name, got=f"a batch of {weight.batch}", expected="a matrix (N, K)", hint="Prepare each matrix."
        )


def _check_pair(gate: BlockScaledTensor, up: BlockScaledTensor) -> None:
    """Raises unless both can be one weight."""
    both = [f"{x.rows} x {x.k}, {'no' if x.global_scale is None else 'a'} global scale, {x.device}" for x in (gate, up)]
    if both[0] != both[1]:
        raise OperandError.of(
            "weights of a gated GEMM",
            got=" and ".join(both),
            expected="the same sizes and device, global scales or none",
        )

"""A weight whose only copy is the repacked one gives every byte back: all codes under all scales, NaN included."""

from __future__ import annotations

import pytest
import torch

from cute_nvfp4 import BlockScaledTensor, prepare_weight, quantize
from cute_nvfp4.formats import pack_e2m1
from cute_nvfp4.nn.released import rewritten, unpacked

DTYPES = [torch.bfloat16, torch.float16]


def everything() -> BlockScaledTensor:
    """Each of 256 scales with each of 16 codes at each of 16 places: (256, 256)."""
    codes = (torch.arange(16)[:, None] + torch.arange(16)).remainder(16).flatten().to(torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    return BlockScaledTensor(pack_e2m1(codes.expand(256, 256)), scales, torch.tensor(0.5))


def same(found: BlockScaledTensor, weight: BlockScaledTensor) -> bool:
    scales = found.rowmajor_scale().equal(weight.rowmajor_scale())
    return scales and found.data.equal(weight.data) and found.global_scale is weight.global_scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_scale(dtype: torch.dtype) -> None:
    weight = everything()
    packed = prepare_weight(weight, dtype=dtype, backend="reference")
    lost = rewritten(weight, packed)
    assert same(unpacked(packed, lost), weight)
    # what packing rewrites, and nothing else: negative scales, and both zeros
    rows = torch.arange(256)
    expected = ((rows >= 0x80) | (rows == 0))[:, None].expand(256, 16).flatten().nonzero().flatten()
    assert lost.places.equal(expected)
    assert not same(unpacked(packed, None), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, k", [(1, 16), (130, 144), (4100, 64)])
def test_random_blocks(dtype: torch.dtype, rows: int, k: int) -> None:
    """Sizes that fill no tile, and more row tiles than are unpacked at a time."""
    generator = torch.Generator().manual_seed(rows)
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (rows, k // 16), dtype=torch.uint8, generator=generator)
    weight = BlockScaledTensor(data, scale)
    packed = prepare_weight(weight, dtype=dtype, backend="reference")
    assert same(unpacked(packed, rewritten(weight, packed)), weight)


@pytest.mark.parametrize("rule", ["max", "four_six_mse", "optimal"])
def test_nothing_is_kept_of_what_quantize_gives(rule: str) -> None:
    """Its scales are positive, or zeros with codes of zeros."""
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    x[2, 16:32], x[3, :16] = -0.0, 0.0
    weight = quantize(x, rule=rule)
    packed = prepare_weight(weight, backend="reference")
    assert rewritten(weight, packed) is None
    assert unpacked(packed, None).dequantize().equal(weight.dequantize())

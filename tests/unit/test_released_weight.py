"""A weight whose only copy is the repacked one gives every byte back: all codes under all scales, NaN included."""

from __future__ import annotations

import pytest
import torch
from support.live_storages import LiveStorages

from cute_nvfp4 import BlockScaledTensor, prepare_weight, quantize
from cute_nvfp4.formats import MXFP4, NVFP4, Format, pack_e2m1
from cute_nvfp4.nn.released import rewritten, unpacked, unpacked_rowmajor

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
@pytest.mark.parametrize("rows, k", [(1, 16), (130, 144), (16500, 64)])
def test_random_blocks(dtype: torch.dtype, rows: int, k: int) -> None:
    """Sizes that fill no tile, and more row tiles than are unpacked at a time."""
    generator = torch.Generator().manual_seed(rows)
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (rows, k // 16), dtype=torch.uint8, generator=generator)
    weight = BlockScaledTensor(data, scale)
    packed = prepare_weight(weight, dtype=dtype, backend="reference")
    assert same(unpacked(packed, rewritten(weight, packed)), weight)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_memory_does_not_grow_with_the_weight(dtype: torch.dtype) -> None:
    """But for its bytes again: some forty bytes an element are for a slab only. A model's layers are released
    while it is loaded."""
    more = []
    for rows in (512, 4096):
        weight = everything()
        weight = BlockScaledTensor(weight.data.repeat(rows // 256, 8), weight.scale.repeat(rows // 256, 8))
        packed = prepare_weight(weight, dtype=dtype, backend="reference")
        held = [weight.data, weight.scale, packed.packed]
        with LiveStorages() as live:
            live.note(held)
            rewritten(weight, packed)
        more.append((sum(x.nbytes for x in held), live.peak - sum(x.nbytes for x in held)))
    (small, first), (large, last) = more
    assert 0 < last - first < 4 * (large - small)


@pytest.mark.parametrize("rule", ["max", "four_six_mse", "optimal"])
def test_nothing_is_kept_of_what_quantize_gives(rule: str) -> None:
    """Its scales are positive, or zeros with codes of zeros."""
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    x[2, 16:32], x[3, :16] = -0.0, 0.0
    weight = quantize(x, rule=rule)
    packed = prepare_weight(weight, backend="reference")
    assert rewritten(weight, packed) is None
    assert unpacked(packed, None).dequantize().equal(weight.dequantize())


def powers(seed: int, *shape: int) -> BlockScaledTensor:
    """MXFP4 with scales of 2**-12 to 2**12, some of NaN, and blocks of zeros under any scale."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(115, 140, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=generator)
    drawn = torch.rand(scale.shape, generator=generator)
    scale[drawn < 0.1] = 0xFF
    empty = drawn > 0.9
    scale[empty] = torch.randint(0, 255, (int(empty.sum()),), dtype=torch.uint8, generator=generator)
    data.unflatten(-1, (-1, 16))[empty] = 0x80
    return BlockScaledTensor(data, scale, format=MXFP4)


@pytest.mark.parametrize("shape", [(40, 96), (3, 20, 64)])
def test_mxfp4(shape: tuple[int, ...]) -> None:
    weight = powers(0, *shape)
    packed = prepare_weight(weight, backend="reference")
    lost = rewritten(weight, packed)
    data, scale = unpacked_rowmajor(packed, lost, MXFP4)
    assert data.equal(weight.data) and scale.equal(weight.scale)
    # most blocks need no help; those of NaN, and some of zeros, do
    assert 0 < len(lost.places) < 0.3 * weight.scale.numel()
    assert not unpacked_rowmajor(packed, None, MXFP4)[1].equal(weight.scale)


@pytest.mark.parametrize("rows", [5, 24])
@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
def test_gate_and_up_of_a_stack(format: Format, rows: int) -> None:
    """Rows of both, in turn when they are packed, come back one after the other; each has a shift of its own."""
    if format is MXFP4:
        gate, up = powers(1, 3, rows, 64), powers(2, 3, rows, 64)
        up = BlockScaledTensor(
            up.data, torch.where(up.scale == 0xFF, 0xFF, up.scale.clamp(max=0xE0) + 20), format=MXFP4
        )
    else:
        generator = torch.Generator().manual_seed(0)
        parts = [torch.randint(256, (3, rows, n), generator=generator).byte() for n in (32, 4, 32, 4)]
        gate, up = BlockScaledTensor(*parts[:2]), BlockScaledTensor(*parts[2:])
    packed = prepare_weight(gate, up, backend="reference")
    both = (torch.cat(x, dim=1) for x in ((gate.data, up.data), (gate.scale, up.scale)))
    weight = BlockScaledTensor(*both, format=format)
    found = unpacked_rowmajor(packed, rewritten(weight, packed), format)
    assert found[0].view_as(weight.data).equal(weight.data) and found[1].view_as(weight.scale).equal(weight.scale)

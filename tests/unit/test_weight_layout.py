"""Weights packed for the tensor-core kernels of sm_90a: the decoder's registers give every value back."""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_nvfp4 import weight_layout as layout
from cute_nvfp4.formats import NVFP4


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


def values(codes, scales):
    """(L, N, K) in float32, by the formats' own decoders."""
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    blocks = NVFP4.decode_data(pairs, torch.float32).unflatten(-1, (-1, 16))
    return (blocks * scales.view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2)


@pytest.mark.parametrize("rows, k", [(128, 64), (200, 144), (1, 16)])
def test_round_trip(dtype, rows, k):
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (2, rows, k), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (2, rows, k // 16), dtype=torch.uint8, generator=generator)
    scales[scales & 0x7F == 0x7F] = 0
    packed = layout.pack(codes, scales, dtype)
    assert packed.shape == (2, *layout.tiles(rows, k), layout.TILE_BYTES)
    found = layout.unpack(packed, dtype)
    assert torch.equal(found[:, :rows, :k], values(codes, scales))
    assert not found[:, rows:].any() and not found[..., k:].any()


def test_every_code_in_every_element(dtype):
    for element, code in itertools.product(range(8), range(16)):
        word = layout.encoder(dtype)[element][code]
        registers = layout.registers_of(word, layout.DECODERS[dtype])
        bits = (registers[element // 2] >> (16 * (element % 2))) & 0xFFFF
        exact = torch.tensor([bits]).sub(0x10000 if bits & 0x8000 else 0).to(torch.int16).view(dtype).double()
        expected = NVFP4.decode_data(torch.tensor([code], dtype=torch.uint8), torch.float64)[0]
        assert exact.item() == expected * (2.0**-126 if dtype is torch.bfloat16 else 2.0**-14)
        others = [r for i, r in enumerate(registers) if i != element // 2]
        assert not any(others)


def test_every_scale(dtype):
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    codes = torch.full((1, 256, 16), 2, dtype=torch.uint8)  # 1.0
    found = layout.unpack(layout.pack(codes, scales, dtype), dtype)[0, :256, 0]
    assert torch.equal(
        found.nan_to_num(12345.0), scales.view(torch.float8_e4m3fn).float().flatten().nan_to_num(12345.0)
    )


def test_a_wrong_shift_is_seen(dtype, monkeypatch):
    right = layout.DECODERS[dtype]
    codes = torch.randint(0, 16, (1, 128, 64), dtype=torch.uint8)
    scales = torch.full((1, 128, 4), 0x38, dtype=torch.uint8)
    packed = layout.pack(codes, scales, dtype)
    wrong = right._replace(registers=(*right.registers[:3], right.registers[3][:1]))
    monkeypatch.setitem(layout.DECODERS, dtype, wrong)
    assert not torch.equal(layout.unpack(packed, dtype)[0], values(codes, scales)[0])

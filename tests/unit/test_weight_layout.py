"""Weights packed for the tensor-core kernels of sm_90a: the decoder's registers give every value back."""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_nvfp4 import weight_layout as layout
from cute_nvfp4.formats import FORMATS, MXFP8, MXFP8_E5M2, NVFP4, pack_e2m1

NVFP4S = layout.PACKINGS["nvfp4"]


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
    packed = layout.pack(codes, scales, NVFP4S[dtype])
    assert packed.shape == (2, *layout.tiles(rows, k), NVFP4S[dtype].tile_bytes)
    found = layout.unpack(packed, NVFP4S[dtype]).float()
    assert torch.equal(found[:, :rows, :k], values(codes, scales))
    assert not found[:, rows:].any() and not found[..., k:].any()


ELEMENTS = {
    "nvfp4": (NVFP4, 126, 14),
    "mxfp4": (NVFP4, 126, 14),
    "mxfp8": (MXFP8, 120, 8),
    "mxfp8_e5m2": (MXFP8_E5M2, 112, 0),
}
"""Of what is packed: the format of the elements, and by what power of two the registers of bf16 and fp16 are less."""


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_in_every_element(name):
    format, *powers = ELEMENTS[name]
    for packing, power in zip(layout.PACKINGS[name].values(), powers):
        for element, code in itertools.product(range(packing.word_elements), range(1 << packing.element_bits)):
            word = layout.encoder(packing)[element][code]
            registers = layout.registers_of(word, packing)
            bits = (registers[element // 2] >> (16 * (element % 2))) & 0xFFFF
            exact = (
                torch.tensor([bits]).sub(0x10000 if bits & 0x8000 else 0).to(torch.int16).view(packing.dtype).double()
            )
            expected = format.decode_data(torch.tensor([code], dtype=torch.uint8), torch.float64)[0]
            assert exact.item() == expected * 2.0**-power or (packing.special and code & 0x7F >= packing.special)
            others = [r for i, r in enumerate(registers) if i != element // 2]
            assert not any(others)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8_e5m2"])
def test_every_power_of_two(name):
    """Every code under every scale, NaN and infinities of a block in all of it."""
    packing, format = layout.PACKINGS[name][torch.bfloat16], FORMATS[name]
    k = 256 if packing.element_bits == 8 else 64
    codes = torch.arange(k).remainder(1 << packing.element_bits).to(torch.uint8).expand(1, 256, k)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, k // 32)
    values = codes if packing.element_bits == 8 else pack_e2m1(codes)
    expected = format.decode_data(values, torch.float64).unflatten(-1, (-1, 32))
    nan = (scales == 0xFF) | ~expected.isfinite().all(-1)
    expected = expected * format.decode_scale(scales, torch.float64).unsqueeze(-1)
    expected = expected.masked_fill(nan.unsqueeze(-1), float("nan")).flatten(-2)
    packed = layout.pack_powers(codes, scales, nan, packing)
    found = layout.unpack(packed, packing)[:, :256, :k]
    assert torch.equal(found.nan_to_num(0.7), expected.nan_to_num(0.7)) and nan.any() and not nan.all()


def test_every_scale(dtype):
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    codes = torch.full((1, 256, 16), 2, dtype=torch.uint8)  # 1.0
    found = layout.unpack(layout.pack(codes, scales, NVFP4S[dtype]), NVFP4S[dtype])[0, :256, 0].float()
    assert torch.equal(
        found.nan_to_num(12345.0), scales.view(torch.float8_e4m3fn).float().flatten().nan_to_num(12345.0)
    )


def test_a_wrong_shift_is_seen(dtype):
    right = NVFP4S[dtype]
    codes = torch.randint(0, 16, (1, 128, 64), dtype=torch.uint8)
    scales = torch.full((1, 128, 4), 0x38, dtype=torch.uint8)
    packed = layout.pack(codes, scales, NVFP4S[dtype])
    wrong = right._replace(registers=(*right.registers[:3], right.registers[3][:1]))
    assert not torch.equal(layout.unpack(packed, wrong)[0, :, :64].float(), values(codes, scales)[0])
    assert torch.equal(layout.unpack(packed, right)[0, :, :64].float(), values(codes, scales)[0])

"""``dequantize`` by its kernel: the bits of torch for every format, code, scale and layout."""

from __future__ import annotations

import pytest
import torch
from support import backends
from support.mutants import LAST, Ptx, at, instead, offset, outcome

from cute_nvfp4 import BlockScaledTensor, dequantize, simulating, to_blocked
from cute_nvfp4.formats import FORMATS, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, Format

pytestmark = [pytest.mark.kernels]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operand(
    format: Format, layout: str = "blocked", factor: float | None = None, shape: tuple[int, int, int] = (2, 150, 288)
) -> BlockScaledTensor:
    """Every code and every scale; rows that are neighbours' parts."""
    batch, rows, k = shape
    generator = torch.Generator().manual_seed(rows)
    columns = format.data_columns(k)
    data = torch.randint(0, 256, (batch, rows, columns + 16), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (batch, rows, format.scale_columns(k)), dtype=torch.uint8, generator=generator)
    scale = to_blocked(scale) if layout == "blocked" else scale
    given = None if factor is None else backends.place(torch.tensor(factor))
    return BlockScaledTensor(backends.place(data)[..., :columns], backends.place(scale), given, format)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, but those of NaN."""
    bits = torch.int32 if found.dtype is torch.float32 else torch.int16
    equal = (found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())
    return found.shape == expected.shape and found.dtype is expected.dtype and bool(equal.all())


def run(x: BlockScaledTensor, dtype: torch.dtype, arch: str) -> torch.Tensor:
    if backends.backend() == "cuda":
        return dequantize(x, dtype)
    with simulating(arch) as runs:
        found = dequantize(x, dtype)
    assert [x.name for x in runs] == ["dequantize"]
    return found


CASES = [(NVFP4, "blocked", None, x) for x in DTYPES] + [(NVFP4, "rowmajor", 0.37, x) for x in DTYPES]
CASES += [(f, "blocked", None, x) for f in (MXFP4, MXFP8, MXFP8_E5M2) for x in DTYPES]
CASES += [(MXFP8, "rowmajor", None, torch.float32), (NVFP4, "blocked", 1e30, torch.bfloat16)]


@pytest.mark.sweep
@pytest.mark.parametrize("format, layout, factor, dtype", CASES)
@pytest.mark.parametrize("arch", backends.architectures())
def test_the_bits_of_torch(format: Format, layout: str, factor: float | None, dtype: torch.dtype, arch: str) -> None:
    x = operand(format, layout, factor)
    assert same(run(x, dtype, arch), x.dequantize(dtype))


def test_every_code_under_every_scale() -> None:
    """A row for each scale, all codes in it."""
    for format in FORMATS.values():
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes if format.elements_per_byte == 1 else codes.view(-1, format.block_bytes).flatten()
        scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 256 // format.block_bytes).contiguous()
        x = BlockScaledTensor(
            backends.place(codes.expand(256, 256).contiguous()), backends.place(to_blocked(scale)), None, format
        )
        assert same(run(x, torch.float32, "sm_90a"), x.dequantize()), format.name


def test_one_row_and_one_block() -> None:
    for rows, k in ((1, 32), (33, 32), (128, 1056)):
        x = operand(MXFP4, shape=(1, rows, k))
        x = BlockScaledTensor(x.data[0], x.scale, None, MXFP4)
        assert same(run(x, torch.bfloat16, "sm_90a"), x.dequantize(torch.bfloat16)), (rows, k)


@pytest.mark.sim_only("asks for exact torch")
def test_torch_where_there_is_no_kernel() -> None:
    x = operand(NVFP4)
    with simulating("sm_90a") as runs:
        assert dequantize(x, torch.float64).dtype is torch.float64
        dequantize(x, backend="reference")
    assert not runs


MUTANTS = (
    ("scales beyond the atom", at("ld.global.v4.b32", offset(16)), "OutOfBounds"),
    ("one scale for all", at("cvt.rn.f16x2.e4m3x2", instead("mov.b32 {0}, 0x3C003C00;"), LAST), "wrong"),
    ("elements exchanged", at("cvt.rn.bf16x2.f32", instead("cvt.rn.bf16x2.f32 {0}, {2}, {1};"), LAST), "wrong"),
    ("no global scale", at("mul.rn.f32", instead("mov.f32 {0}, {1};"), LAST), "wrong"),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change, noticed", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name: str, change: Ptx, noticed: str) -> None:
    x = operand(NVFP4, factor=0.37, shape=(1, 130, 64))
    right = x.dequantize(torch.bfloat16)
    assert outcome(change, lambda: same(dequantize(x, torch.bfloat16), right), "sm_90a") == noticed

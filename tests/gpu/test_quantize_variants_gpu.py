"""The fused quantization kernels of rotations, tiles and transposed reads on the GPU: the bits of the torch backend."""

from __future__ import annotations

import pytest
import torch
from quantize_problems import DTYPES, differences, edges, rules

from cute_nvfp4.quantization.hadamard import Hadamard

pytestmark = pytest.mark.gpu

MX = [("mxfp4", "even"), ("mxfp8_e4m3", "rceil")]
KINDS = [*(("nvfp4", rule) for rule in rules("nvfp4")), *MX]
TILE_KINDS = [*(("nvfp4", rule) for rule in rules("nvfp4", tile=True)), *MX]


def check(x: torch.Tensor, format: str, rule: str, **options: object) -> None:
    scales = (torch.tensor(0.0007, device="cuda"), "auto") if format == "nvfp4" else (None,)
    for scale in scales:
        assert differences(x.cuda(), format, rule, global_scale=scale, **options) == []


def random(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 2, rows)[:, None]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", KINDS)
def test_rotated(format: str, rule: str, dtype: torch.dtype) -> None:
    for size in (2, 16):
        check(edges(129, 544).to(dtype), format, rule, hadamard=Hadamard.from_seed(1, size))
    check(random(1500, 4096, dtype), format, rule, hadamard=Hadamard.from_seed(2))
    check(random(300, 96, dtype), format, rule, hadamard=Hadamard.from_seed(3), seed=11, scale_layout="rowmajor")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", TILE_KINDS)
def test_tiles(format: str, rule: str, dtype: torch.dtype) -> None:
    check(edges(137, 544).to(dtype), format, rule, block_2d=True)
    check(random(1500, 4096, dtype), format, rule, block_2d=True)
    check(random(300, 96, dtype), format, rule, block_2d=True, seed=11, scale_layout="rowmajor")
    check(random(300, 96, dtype), format, rule, block_2d=True, hadamard=Hadamard.from_seed(3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", KINDS)
def test_transposed(format: str, rule: str, dtype: torch.dtype) -> None:
    """K strided: of views on the device, because moving a tensor there may change its strides."""

    def lies(x: torch.Tensor) -> torch.Tensor:
        return x.cuda().t()

    check(lies(edges(544, 138).to(dtype)), format, rule)
    check(lies(random(4096, 1500, dtype)), format, rule)
    if (format, rule) in TILE_KINDS:
        check(lies(random(4096, 1500, dtype)), format, rule, block_2d=True)
    check(lies(random(96, 300, dtype)), format, rule, seed=11, scale_layout="rowmajor")
    check(lies(random(96, 300, dtype)), format, rule, hadamard=Hadamard.from_seed(3))

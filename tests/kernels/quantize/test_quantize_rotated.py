"""The fused quantization kernels rotate as ``quantization.hadamard`` does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.quantize_problems import DTYPES, SWEEP, VIEWS, differences, edges, fused

from cute_nvfp4.errors import OperandError
from cute_nvfp4.ops.dequantize import dequantize
from cute_nvfp4.quantization.hadamard import Hadamard

pytestmark = [pytest.mark.kernels, SWEEP, pytest.mark.usefixtures("poisoned")]
KINDS = [
    ("nvfp4", "max"),
    ("nvfp4", "max_normal"),
    ("nvfp4", "static_4"),
    ("nvfp4", "four_six_mse"),
    ("nvfp4", "four_six_mae"),
    ("nvfp4", "four_six_abs_max"),
    ("mxfp4", "even"),
    ("mxfp8_e4m3", "rceil"),
    ("mxfp8_e5m2", "floor"),
]


def check(x: torch.Tensor, format: str, rule: str, **options: object) -> None:
    assert differences(x, format, rule, **options) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", KINDS)
def test_edges(arch: str, format: str, rule: str, dtype: torch.dtype) -> None:
    """Numbers of every kind (infinities and NaN spread over a rotation), a row and a block too many for a tile."""
    scale = torch.tensor(0.0007) if format == "nvfp4" else None
    check(edges(129, 544).to(dtype), format, rule, global_scale=scale, hadamard=Hadamard.from_seed(1))


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize(
    "format,rule,size",
    [*(("nvfp4", "max", size) for size in (2, 4, 8, 16)), *(("mxfp4", "rceil", size) for size in (2, 4, 8, 16, 32))],
)
def test_sizes_and_signs(arch: str, format: str, rule: str, size: int, dtype: torch.dtype) -> None:
    """Every size that fits, every sign in turn; one half of a larger block does not reach the other."""
    x = edges(33, 64).bfloat16()
    mixed = [tuple(-1 if i == j else 1 for i in range(size)) for j in range(size)]
    for signs in ((1,) * size, (-1,) * size, *(mixed if size == 8 else mixed[-1:])):
        check(x.to(dtype), format, rule, hadamard=Hadamard(signs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row,block", [(0, 0), (34, 12), (20, 5)])
def test_computed_global_scale(arch: str, row: int, block: int, dtype: torch.dtype) -> None:
    """From the rotated values: a block of equal numbers quadruples its first; what overflows does not count."""
    plain = Hadamard((1,) * 16)
    finite = torch.finfo(dtype)
    for value in (1.0, 0.0, finite.smallest_normal, finite.max, float("nan"), float("-inf")):
        x = torch.zeros(35, 208, dtype=dtype)
        x[3, 5] = 1.5
        x[row, 16 * block : 16 * block + 16] = value
        check(x, "nvfp4", "max", global_scale="auto", hadamard=plain)
    found = fused(torch.ones(4, 32, dtype=dtype), "nvfp4", "max", global_scale="auto", hadamard=plain)
    assert torch.equal(found.global_scale.cpu(), torch.tensor(4.0) / 2688)


_VIEWS = {
    **VIEWS,
    "one block": lambda x: x[:1, :16],
    "many blocks": lambda x: x[:, :240],
    "batch": lambda x: x[:72].reshape(3, 24, 256),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", _VIEWS)
def test_strides_and_alignments(arch: str, view: str, dtype: torch.dtype) -> None:
    """Rows at every alignment, for both passes; a batch; one block and many in a row."""
    rule = "four_six_mse" if view == "batch" else "max"
    x = _VIEWS[view](edges(80, 256).to(dtype))
    check(x, "nvfp4", rule, global_scale="auto", hadamard=Hadamard.from_seed(2))


@pytest.mark.parametrize("dtype,seed", list(zip(DTYPES, (0, 7, 2**63 - 1))), ids=str)
@pytest.mark.parametrize(
    "format,rule", [("nvfp4", "max"), ("nvfp4", "four_six_mae"), ("mxfp4", "even"), ("mxfp8_e5m2", "floor")]
)
def test_stochastic(arch: str, format: str, rule: str, dtype: torch.dtype, seed: int) -> None:
    scale = torch.tensor(0.01) if format == "nvfp4" else None
    x = edges(130, 96, seed=1).to(dtype).reshape(2, 65, 96)
    check(x, format, rule, global_scale=scale, seed=seed, hadamard=Hadamard.from_seed(3), scale_layout="rowmajor")


@pytest.mark.parametrize("rule", ["four_six_mse", "four_six_mae", "four_six_abs_max"])
@pytest.mark.parametrize("rotated", [False, True])
def test_equal_errors(arch: str, rule: str, rotated: bool) -> None:
    """Of small integers in float32, and of what they become when rotated: decided in the definition's order."""
    generator = torch.Generator().manual_seed(3)
    for largest, value in ((6, 1.0), (9, 1 / 3), (2, 0.3), (9, 0.0007)):
        x = torch.randint(-largest, largest + 1, (128, 512), generator=generator).float()
        rotation = Hadamard.from_seed(6) if rotated else None
        check(x, "nvfp4", rule, global_scale=torch.tensor(value), hadamard=rotation)


def test_rotates_back() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    rotation = Hadamard.from_seed(5)
    found = fused(x, "mxfp8_e4m3", "rceil", hadamard=rotation)
    assert (dequantize(found, hadamard=rotation)[0].cpu() - x).abs().max() < 0.3


def test_what_is_refused() -> None:
    x = torch.ones(1, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(OperandError, match="size of a rotation for the fused kernels: got 32, expected 16 or smaller"):
        fused(x, "nvfp4", "max", hadamard=Hadamard.from_seed(1, 32))
    with pytest.raises(OperandError, match="size of a rotation for the fused kernels: got 64, expected 32 or smaller"):
        fused(x, "mxfp4", "rceil", hadamard=Hadamard.from_seed(1, 64))

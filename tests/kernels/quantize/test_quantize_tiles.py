"""The fused kernels of square tiles give the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from support.mutants import plan_anew
from support.quantize_problems import (
    DTYPES,
    SWEEP,
    TILE_PAIRS,
    VIEWS,
    differences,
    edges,
    fused,
    golden_inputs,
    near_ties,
)

from cute_nvfp4.planning import quantize as planning
from cute_nvfp4.quantization.hadamard import Hadamard

pytestmark = [pytest.mark.kernels, SWEEP, pytest.mark.usefixtures("poisoned")]
FOUR_SIX = ("four_six_mse", "four_six_mae", "four_six_abs_max")


def check(x: torch.Tensor, format: str, rule: str, **options: object) -> None:
    assert differences(x, format, rule, block_2d=True, **options) == []


def spread(rows: int, k: int) -> torch.Tensor:
    """Random numbers, each tile of another magnitude, from far too small to far too large; a few are not finite."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=generator)
    exponents = torch.randint(-130, 120, (-(-rows // 16), -(-k // 16)), generator=generator) / 4
    x *= exponents.exp2().repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :k]
    x[rows // 2, 3], x[rows - 1, k - 1], x[0, 40 % k] = float("nan"), float("inf"), -float("inf")
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", TILE_PAIRS)
def test_edges(arch: str, format: str, rule: str, dtype: torch.dtype) -> None:
    """Numbers of every kind; a part of a tile, of an atom and of a unit too many."""
    scale = torch.tensor(0.0007) if format == "nvfp4" else None
    for x in (edges(41, 160), spread(137, 160)):
        check(x.to(dtype), format, rule, global_scale=scale)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("rule", ["max", "four_six_mse"])
def test_golden_inputs(arch: str, rule: str, part: int) -> None:
    for name, x in list(golden_inputs().items())[part::4]:
        assert (name, differences(x, "nvfp4", rule, global_scale="auto", block_2d=True)) == (name, [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["max", "four_six_mse"])
@pytest.mark.parametrize(
    "value",
    [1.0, 93 / 16 / 2688, 5.25 / 1536, 1 / 3, 2.0**-100, 2.0**118, 2.0**101, float("nan"), 1e-40, -1.0],
    ids=str,
)
def test_ties_and_global_scales(arch: str, value: float, dtype: torch.dtype, rule: str) -> None:
    scale = torch.tensor(value, dtype=torch.float32)
    x = near_ties(dtype, value if 1e-30 < value < 1e30 else 1.0).repeat_interleave(16, 0)
    check(x[::7, :128], "nvfp4", rule, global_scale=scale)
    check(spread(48, 64).to(dtype), "nvfp4", rule, global_scale=scale)


@pytest.mark.parametrize("rule", FOUR_SIX)
@pytest.mark.parametrize("largest,value", [(6, 1.0), (9, 1 / 3), (2, 0.3), (4, 0.0007)])
def test_equal_errors(arch: str, rule: str, largest: int, value: float) -> None:
    """Small integers: the two candidates' errors are often the same, or differ by a rounding, a matter of order."""
    x = torch.randint(-largest, largest + 1, (128, 256), generator=torch.Generator().manual_seed(3)).bfloat16()
    check(x, "nvfp4", rule, global_scale=torch.tensor(value))
    check(x[:64].float() * 0.3, "nvfp4", rule, global_scale="auto")


@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 97, 128, 129, 300])
def test_every_kind_of_last_row(arch: str, rows: int, layout: str) -> None:
    check(spread(rows, 128).bfloat16(), "nvfp4", "max", scale_layout=layout)
    check(spread(rows, 64).half(), "mxfp4", "floor", scale_layout=layout)


@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
@pytest.mark.parametrize("k", [16, 32, 48, 64, 80, 128, 144, 208])
def test_every_kind_of_last_block(arch: str, k: int, layout: str) -> None:
    check(spread(40, k).bfloat16(), "nvfp4", "max_normal", scale_layout=layout)


_VIEWS = {
    **VIEWS,
    "batch": lambda x: x[:78].reshape(3, 26, 256),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", _VIEWS)
def test_strides_alignments_and_batches(arch: str, view: str, dtype: torch.dtype) -> None:
    rule = "four_six_mse" if view == "batch" else "max"
    check(_VIEWS[view](spread(80, 256).to(dtype)), "nvfp4", rule, global_scale="auto")


@pytest.mark.parametrize("dtype,seed", list(zip(DTYPES, (0, 7, 2**63 - 1))), ids=str)
@pytest.mark.parametrize(
    "format,rule", [("nvfp4", "max"), *(("nvfp4", r) for r in FOUR_SIX), ("mxfp4", "even"), ("mxfp8_e5m2", "floor")]
)
@pytest.mark.parametrize("way", ["stochastic", "rotated", "both"])
def test_stochastic_and_rotated(arch: str, format: str, rule: str, dtype: torch.dtype, seed: int, way: str) -> None:
    options = {
        "stochastic": {"seed": seed},
        "rotated": {"hadamard": Hadamard.from_seed(3)},
        "both": {"hadamard": Hadamard.from_seed(3, 8), "seed": seed},
    }
    scale = torch.tensor(0.01) if format == "nvfp4" else None
    check(spread(46, 64).to(dtype).reshape(2, 23, 64), format, rule, global_scale=scale, **options[way])


@pytest.mark.parametrize("rule", ["max", *FOUR_SIX])
def test_a_matrix_and_its_transpose(rule: str) -> None:
    """Have the same values."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(4)).bfloat16()
    first, second = (fused(y, "nvfp4", rule, global_scale="auto", block_2d=True) for y in (x, x.t()))
    assert first.dequantize().equal(second.dequantize().transpose(1, 2))


@pytest.mark.parametrize("rule", ["max", "four_six_mse"])
def test_one_block_of_threads_for_all(arch: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes unit after unit; every other grid is somewhere between this one and one unit for each."""
    monkeypatch.setattr(planning, "_WAVES", 0)
    plan_anew(monkeypatch)
    check(spread(300, 288).bfloat16(), "nvfp4", rule, global_scale="auto")

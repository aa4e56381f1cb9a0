"""The fused quantization kernels give the bits of the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import quantize_problems as problems
from support.mutants import plan_anew
from support.quantize_problems import DTYPES, PAIRS, SWEEP, VIEWS, differences, edges, fused, near_ties

from cute_nvfp4.errors import OperandError, TargetError
from cute_nvfp4.formats import Format
from cute_nvfp4.kernels.quantize.arguments import Walk
from cute_nvfp4.planning import quantize as planning
from cute_nvfp4.planning.quantize import QuantizeProblem, can_implement
from cute_nvfp4.quantization.rules import resolve_format, resolve_rule
from cute_nvfp4.target import architecture

pytestmark = [pytest.mark.kernels, SWEEP, pytest.mark.usefixtures("poisoned")]
FOUR_SIX = ("four_six_mse", "four_six_mae", "four_six_abs_max")


def check(x: torch.Tensor, format: str, rule: str, **options: object) -> None:
    assert differences(x, format, rule, **options) == []


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("format,rule", PAIRS)
def test_golden_inputs(arch: str, format: str, rule: str, part: int) -> None:
    """An eighth of them."""
    scale = "auto" if format == "nvfp4" else None
    inputs = list(problems.golden_inputs().items())
    assert len(inputs) >= 20
    for name, x in inputs[part::8]:
        assert (name, differences(x, format, rule, global_scale=scale)) == (name, [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", PAIRS)
def test_edges(arch: str, format: str, rule: str, dtype: torch.dtype) -> None:
    """Numbers of every kind, a row and a block too many for a tile."""
    scale = torch.tensor(0.0007) if format == "nvfp4" else None
    check(edges(129, 544).to(dtype), format, rule, global_scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["max", *FOUR_SIX])
@pytest.mark.parametrize(
    "value", [1.0, 0.75, 2.0**-100, 2.0**118, 2.0**101, 1e-40, float("inf"), float("nan"), -1.0], ids=str
)
def test_global_scales(arch: str, dtype: torch.dtype, rule: str, value: float) -> None:
    """Those between 2**-100 and 2**118 work; all others make everything NaN."""
    check(edges(128, 512).to(dtype), "nvfp4", rule, global_scale=torch.tensor(value, dtype=torch.float32))


# powers of two, what amax / 2688 and amax / 1536 are for 8-bit amax, numbers with and without ties in both directions
_SCALES = [
    (1.0, 93 / 16 / 2688, 0.0014142135, 2.5e-7),
    (2.0**-9, 5.25 / 2688, 93 / 16 / 1536, 0.91 * 6 / 2688, 1 / 3),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["max", *FOUR_SIX])
@pytest.mark.parametrize("scales", _SCALES, ids=["first", "second"])
def test_ties(arch: str, dtype: torch.dtype, rule: str, scales: tuple[float, ...]) -> None:
    """Under every scale, elements on ties and beside them."""
    for value in scales:
        x = near_ties(dtype, value)
        assert (value, differences(x, "nvfp4", rule, global_scale=torch.tensor(value))) == (value, [])


@pytest.fixture
def one_cta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems, too, have one CTA of many warps on a multiprocessor."""
    monkeypatch.setattr(planning, "_ONE_CTA_BLOCKS", 1)
    planning._config.cache_clear()
    plan_anew(monkeypatch)
    yield
    planning._config.cache_clear()


@pytest.mark.usefixtures("one_cta")
@pytest.mark.parametrize("rule", ["four_six_mse", "four_six_mae"])
@pytest.mark.parametrize("rows", [40, 256])
def test_one_cta_of_many_warps(hopper: None, rows: int, rule: str) -> None:
    """Numbers of every kind, and ties, which wait for the others of their work tile."""
    nvfp4 = resolve_format("nvfp4")
    problem = QuantizeProblem(nvfp4, resolve_rule(rule, nvfp4), rows, 512)
    assert planning.choose(problem, architecture("sm_90a"), 132).config.warps == 16
    check(edges(rows, 512).bfloat16(), "nvfp4", rule, global_scale=torch.tensor(0.0007))
    x, scale = near_ties(torch.bfloat16, 2.0**-9), torch.tensor(2.0**-9)
    check(x, "nvfp4", rule, global_scale=scale)


@pytest.mark.parametrize("rule", FOUR_SIX)
def test_equal_errors(arch: str, rule: str) -> None:
    """Small integers: the two candidates' errors are often the same, or differ by a rounding."""
    x = torch.randint(-9, 10, (128, 512), generator=torch.Generator().manual_seed(3)).bfloat16()
    for value in (1.0, 1 / 3, 0.3):
        check(x, "nvfp4", rule, global_scale=torch.tensor(value))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("rule", FOUR_SIX)
def test_nearly_equal_errors(arch: str, rule: str, dtype: torch.dtype) -> None:
    """Blocks that the fast path leaves undecided, many and few in a row, under global scales with many ties, with
    some and without."""
    for value in (2.0**-9, 93 / 16 / 1536, 0.0014142135):
        for count in (32, 3):
            x = problems.nearly_equal(rule, value, dtype, 32, count)
            case = (value, count)
            assert (case, differences(x, "nvfp4", rule, global_scale=torch.tensor(value))) == (case, [])


@pytest.mark.parametrize("rule", FOUR_SIX)
def test_undecided_neighbours(arch: str, rule: str) -> None:
    """Infinity and NaN in some lanes, zeros and scales at both ends of the range in others: each block is its own."""
    x = torch.randn(64, 544, generator=torch.Generator().manual_seed(4))
    blocks = x.view(-1, 16)
    blocks[::5] *= torch.logspace(-6, 6, len(blocks[::5]))[:, None]
    blocks[1::7] = 0.0
    blocks[2::7, 3] = -0.0
    blocks[3::11, 5] = float("inf")
    blocks[4::11, 6] = float("nan")
    blocks[6::11] = -0.0
    for dtype in DTYPES[:2]:
        check(x.to(dtype), "nvfp4", rule, global_scale=torch.tensor(0.01))


@pytest.mark.parametrize("rows", [1, 31, 33, 97, 128, 129, 300])
@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
def test_every_kind_of_last_row(arch: str, rows: int, layout: str) -> None:
    check(edges(max(rows, 60), 128)[:rows].bfloat16(), "nvfp4", "max", scale_layout=layout)


@pytest.mark.parametrize("k", [16, 32, 48, 64, 496, 512, 528, 1088])
@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
def test_every_kind_of_last_block(arch: str, k: int, layout: str) -> None:
    check(edges(70, max(k, 64))[:, :k].contiguous().bfloat16(), "nvfp4", "max", scale_layout=layout)


@pytest.mark.parametrize(
    "rows,k,layout,rule,ctas", [(128, 1024, "blocked", "four_six_mse", 3), (129, 560, "rowmajor", "max", 1)]
)
def test_work_tiles_of_a_cta(
    arch: str, rows: int, k: int, layout: str, rule: str, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Follow one another along K and from one group of rows to the next; some CTAs have one more."""
    grid = planning.grid

    def few(*arguments: object) -> tuple[int, Walk]:
        walk = grid(*arguments)[1]
        return ctas, Walk(walk.inner, walk.count, *divmod(ctas, walk.inner), *divmod(walk.count, ctas))

    monkeypatch.setattr(planning, "grid", few)
    plan_anew(monkeypatch)
    check(edges(rows, k).bfloat16(), "nvfp4", rule, scale_layout=layout)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3"])
def test_ragged_mx(arch: str, format: str) -> None:
    for k in (32, 96, 1056):
        check(edges(35, k).half(), format, "floor", scale_layout="rowmajor")


_VIEWS = {
    **VIEWS,
    "from 16": lambda x: x[:, 16:],
    "transposed": lambda x: x.t()[:, :64],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", _VIEWS)
def test_strides_and_alignments(arch: str, dtype: torch.dtype, view: str) -> None:
    """Rows apart, rows at every alignment, columns that are not contiguous."""
    check(_VIEWS[view](edges(80, 256).to(dtype)), "nvfp4", "max", global_scale=torch.tensor(0.001))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches(arch: str, dtype: torch.dtype) -> None:
    batch = edges(3 * 40, 96).to(dtype).reshape(3, 40, 96)
    check(batch, "nvfp4", "four_six_mse", global_scale="auto")
    check(batch.transpose(0, 1), "nvfp4", "max", global_scale="auto", scale_layout="rowmajor")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_computed_global_scale(arch: str, dtype: torch.dtype) -> None:
    """Infinity and NaN do not count; zeros, the largest and the smallest numbers do; the largest anywhere."""
    finite = torch.finfo(dtype)
    for value in (0.0, finite.smallest_normal, finite.max, float("nan"), float("inf")):
        for place in ((0, 0), (34, 207)):
            x = torch.zeros(35, 208, dtype=dtype)
            x[3, 5] = 1.5 if value == value and abs(value) == float("inf") else 0.0
            x[place] = value
            check(x, "nvfp4", "max", global_scale="auto")


@pytest.mark.parametrize(
    "format,rule",
    [("nvfp4", "max"), ("nvfp4", "four_six_mae"), ("mxfp4", "even"), ("mxfp8_e4m3", "rceil"), ("mxfp8_e5m2", "floor")],
)
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_stochastic(arch: str, format: str, rule: str, dtype: torch.dtype) -> None:
    scale = torch.tensor(0.01) if format == "nvfp4" else None
    for seed in (0, 2**63 - 1):
        check(edges(34, 544, seed=1).to(dtype), format, rule, global_scale=scale, seed=seed)
    check(edges(96, 64).to(dtype).reshape(2, 48, 64), format, rule, global_scale=scale, seed=7)


def test_repeats_bit_for_bit(arch: str) -> None:
    x = edges(128, 512).bfloat16()
    first, second = (fused(x, "nvfp4", "four_six_mse", global_scale="auto") for _ in range(2))
    assert first.data.equal(second.data) and first.scale.equal(second.scale)


@pytest.mark.sim_only("refuses CPU tensors")
def test_what_is_refused() -> None:
    x = torch.ones(1, 4, 64, dtype=torch.bfloat16)
    nvfp4 = resolve_format("nvfp4")
    with pytest.raises(OperandError, match="hessian with backend='sim'"):
        fused(x, "nvfp4", "hessian", hessian=torch.ones(4, 64))
    with pytest.raises(OperandError, match="K of nvfp4: got 40"):
        fused(x[..., :40], "nvfp4", "max")
    odd = Format("nvfp4_b32", "e2m1", 32, "e4m3", True)
    with pytest.raises(OperandError, match="format for the fused kernels: got nvfp4_b32"):
        fused(x, odd, "max")
    with pytest.raises(TargetError, match="backend='cuda': got cpu"):
        fused(x, "nvfp4", "max", backend="cuda")
    many = QuantizeProblem(nvfp4, resolve_rule("max", nvfp4), 4, 64, batch=70000)
    assert can_implement(many).startswith("matrices for the fused")
    rule = resolve_rule("hessian", nvfp4)
    assert can_implement(QuantizeProblem(nvfp4, rule, 4, 64)).startswith("rule for the fused kernels: got 'hessian'")

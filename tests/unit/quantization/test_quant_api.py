"""``quantize`` and ``dequantize``: what the arguments mean, what cannot be quantized, and that slabs do not show."""

from __future__ import annotations

import math

import pytest
import torch

from cute_nvfp4.errors import OperandError, OperandTypeError, TargetError
from cute_nvfp4.formats import FORMATS, decode_e2m1, decode_e4m3, unpack_e2m1
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.dequantize import dequantize
from cute_nvfp4.ops.quantize import (
    quantize,
    tensor_amax,
)
from cute_nvfp4.quantization import slabs
from cute_nvfp4.quantization.rules import rules_of
from cute_nvfp4.scale_layout import from_blocked

ALL_RULES = [
    (fmt, rule) for fmt in ("nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2") for rule in rules_of(fmt) if rule != "hessian"
]
STOCHASTIC = {"rounding": "stochastic", "generator": 7}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(a: BlockScaledTensor, b: BlockScaledTensor) -> bool:
    scales = torch.equal(a.rowmajor_scale(), b.rowmajor_scale())
    globals_equal = (a.global_scale is None) == (b.global_scale is None) and (
        a.global_scale is None or torch.equal(a.global_scale, b.global_scale)
    )
    return scales and globals_equal and torch.equal(a.data, b.data)


def test_an_example_by_hand() -> None:
    """amax 12 and the default rule: global scale 12 / 2688; blocks of 12 and of 3 get scales 448 and 112."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([12.0, -6.0, 1.0, 0.4])
    x[0, 16:19] = torch.tensor([3.0, 0.5, -0.2])
    q = quantize(x, scale_layout="rowmajor")
    assert float(q.global_scale) == pytest.approx(12 / 2688)
    assert decode_e4m3(q.scale).tolist() == [[448.0, 112.0]]
    values = decode_e2m1(unpack_e2m1(q.data))[0]
    assert values[:4].tolist() == [6.0, -3.0, 0.5, 0.0]
    assert values[16:19].tolist() == [6.0, 1.0, -0.5]
    torch.testing.assert_close(
        dequantize(q)[0, [0, 1, 2, 16, 17, 18]], torch.tensor([12, -6, 1, 3, 0.5, -0.25]), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(("fmt", "rule"), ALL_RULES)
def test_error_is_within_half_a_step(fmt: str, rule: str) -> None:
    """Where nothing is clipped, no element is off by more than half a step of its scale; and clipping is rare."""
    x = normal(32, 256)
    q = quantize(x, fmt, rule, scale_layout="rowmajor")
    scale = q.format.decode_scale(q.scale).repeat_interleave(q.format.block, 1)
    scale = scale * (1 if q.global_scale is None else q.global_scale)
    y = (x / scale).abs()
    mantissa_bits = {"e2m1": 1, "e4m3": 3, "e5m2": 2}[q.format.element]
    smallest = {"e2m1": 0, "e4m3": -6, "e5m2": -14}[q.format.element]
    step = 2.0 ** (y.log2().floor().clamp(min=smallest) - mantissa_bits)
    error = (dequantize(q) - x).abs() / scale
    clipped = y > q.format.max_value
    assert (error <= step / 2 * 1.0001)[~clipped].all()
    assert clipped.float().mean() < 0.06


@pytest.mark.sweep
@pytest.mark.parametrize(("fmt", "rule"), ALL_RULES)
@pytest.mark.parametrize(
    "options", [{}, {"block_2d": True}, {"rounding": "stochastic", "generator": 7}, {"hadamard": 3}]
)
def test_slabs_do_not_show(fmt: str, rule: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits whatever is worked on at once."""
    x = normal(3, 80, 96)
    whole = quantize(x, fmt, rule, **options)
    for slab in (1, 96 * 40, 96 * 130):
        monkeypatch.setattr(slabs, "_CPU_SLAB", slab)
        assert same(quantize(x, fmt, rule, **options), whole), slab


@pytest.mark.parametrize(("fmt", "rule"), ALL_RULES)
def test_matrices_of_a_batch_are_independent_but_for_the_global_scale(fmt: str, rule: str) -> None:
    x = normal(3, 40, 64)
    factor = quantize(x, fmt, rule).global_scale
    batch = quantize(x, fmt, rule, global_scale=factor)
    assert batch.batch == 3 and batch.rows == 40 and batch.k == 64
    for index in range(3):
        one = quantize(x[index], fmt, rule, global_scale=factor)
        assert torch.equal(one.data, batch.data[index])
        assert torch.equal(one.rowmajor_scale()[0], batch.rowmajor_scale()[index])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_are_their_values(dtype: torch.dtype) -> None:
    x = normal(16, 64).to(dtype)
    assert same(quantize(x, rule="four_six_mse"), quantize(x.float(), rule="four_six_mse"))


def test_strides_do_not_matter() -> None:
    x = normal(64, 48)
    wide = torch.full((64, 96), torch.nan)
    wide[:, ::2] = x
    for view in (x.t().contiguous().t(), wide[:, ::2], x.flip(0).flip(0)):
        assert same(quantize(view), quantize(x))


def test_axis_and_transpose() -> None:
    x = normal(2, 48, 64)
    along_rows = quantize(x, transpose=True)
    assert (along_rows.rows, along_rows.k, along_rows.batch) == (64, 48, 2)
    assert same(along_rows, quantize(x.mT.contiguous()))
    assert same(along_rows, quantize(x, axis=-2)) and same(along_rows, quantize(x, axis=1))
    assert same(quantize(x[0], axis=0), quantize(x[0].t()))
    cube = normal(16, 3, 5)
    assert same(quantize(cube, axis=0), quantize(cube.permute(1, 2, 0)))
    assert same(quantize(x, axis=-1), quantize(x))
    with pytest.raises(OperandError, match="transpose"):
        quantize(x, transpose=True, axis=0)
    with pytest.raises(OperandError, match="axis"):
        quantize(x, axis=3)


def test_a_vector_is_one_row() -> None:
    x = normal(64)
    q = quantize(x)
    assert q.data.shape == (1, 32) and same(q, quantize(x[None])) and dequantize(q).shape == (1, 64)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("rule", ["max", "static_4", "optimal"])
def test_scale_layouts_hold_the_same_scales(fmt: str, rule: str) -> None:
    x = normal(2, 200, 224)
    blocked, rowmajor = quantize(x, fmt, rule), quantize(x, fmt, rule, scale_layout="rowmajor")
    assert blocked.scale_layout == "blocked" and rowmajor.scale_layout == "rowmajor"
    assert torch.equal(from_blocked(blocked.scale, 200, 224 // FORMATS[fmt].block), rowmajor.scale)
    assert torch.equal(blocked.data, rowmajor.data)


@pytest.mark.parametrize(("fmt", "rule"), ALL_RULES)
@pytest.mark.parametrize("shape", [(64, 96), (96, 96)])
def test_tiles_make_the_transpose_alike(fmt: str, rule: str, shape: tuple[int, int]) -> None:
    """W and Wᵀ have the same values, exactly: also Wᵀ as a tensor of its own, also where candidates tie."""
    w = normal(*shape, seed=1)
    # tiles in which every element is on the grid, and both candidates of four over six are exact
    w[:32, :32] = torch.arange(32 * 32).reshape(32, 32).remainder(5) - 2.0
    q = quantize(w, fmt, rule, block_2d=True)
    t = quantize(w, fmt, rule, block_2d=True, transpose=True)
    u = quantize(w.t().contiguous(), fmt, rule, block_2d=True)
    assert same(t, u)
    assert torch.equal(dequantize(q).t(), dequantize(t))
    block = q.format.block
    scale = q.rowmajor_scale()[0].unflatten(0, (-1, block))
    assert (scale == scale[:, :1]).all()


def test_tiles_may_be_ragged_along_the_rows() -> None:
    w = normal(40, 64)
    q = quantize(w, "nvfp4", block_2d=True, scale_layout="rowmajor")
    padded = quantize(torch.nn.functional.pad(w, (0, 0, 0, 8)), "nvfp4", block_2d=True, scale_layout="rowmajor")
    assert q.rows == 40 and torch.equal(q.data, padded.data[:40]) and torch.equal(q.scale, padded.scale[:40])


def test_tiles_are_a_choice() -> None:
    """Must fail: rows' own scales are not the same for the transpose."""
    w = normal(64, 64)
    assert not torch.equal(dequantize(quantize(w)).t(), dequantize(quantize(w, transpose=True)))


def test_global_scale() -> None:
    x = normal(32, 64)
    amax = float(x.abs().max())
    for rule, full in (("max", 2688), ("static_4", 1792), ("four_six_mse", 1536), ("optimal", 1536)):
        assert float(quantize(x, rule=rule).global_scale) == pytest.approx(amax / full, rel=1e-6), rule
    tensor = torch.tensor([0.01])
    assert same(quantize(x, global_scale=0.01), quantize(x, global_scale=tensor))
    assert quantize(x, global_scale=None).global_scale is None
    one = quantize(x, global_scale=1.0)
    none = quantize(x, global_scale=None)
    assert torch.equal(one.data, none.data) and torch.equal(one.scale, none.scale)
    assert quantize(x, "mxfp4").global_scale is None
    for wrong in (0.0, -1.0, math.inf, math.nan, 2.0**-120):
        with pytest.raises(OperandError, match="global scale"):
            quantize(x, global_scale=wrong)
    for wrong in ("max", torch.tensor([1.0, 2.0]), torch.tensor(1.0, dtype=torch.float64), True):
        with pytest.raises(OperandTypeError, match="global scale"):
            quantize(x, global_scale=wrong)
    with pytest.raises(OperandError, match="global scale of mxfp4"):
        quantize(x, "mxfp4", global_scale=1.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 2.0**-120])
def test_a_global_scale_that_cannot_be_makes_everything_nan(value: float) -> None:
    """A tensor on the device is not read; a number in it that makes no sense must show, and cannot pass for values."""
    for rule in rules_of("nvfp4"):
        if rule != "hessian":
            q = quantize(normal(16, 32), rule=rule, global_scale=torch.tensor(value))
            assert torch.isnan(decode_e4m3(q.rowmajor_scale())).all(), rule
            assert torch.isnan(dequantize(q)).all(), rule


def test_too_small_a_global_scale_saturates() -> None:
    x = torch.tensor([[100.0, -50.0, 1.0] + [0.0] * 13])
    got = dequantize(quantize(x, global_scale=0.001))
    torch.testing.assert_close(got[0, :3], torch.tensor([2.688, -2.688, 0.896]), rtol=1e-6, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize(("fmt", "rule"), ALL_RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_not_finite(fmt: str, rule: str, bad: float, rounding: str) -> None:
    """A block with NaN or infinity is NaN, all of it; nothing else notices."""
    x = normal(4, 128)
    options = {"rounding": rounding, "generator": 0 if rounding == "stochastic" else None}
    spoiled = x.clone()
    spoiled[1, 40] = bad
    spoiled[3, 127] = bad
    # the largest magnitude of all must not be in a block that is spoiled
    x[0, 0] = spoiled[0, 0] = 9.0
    got, want = quantize(spoiled, fmt, rule, **options), quantize(x, fmt, rule, **options)
    values, block = dequantize(got), got.format.block
    nan = torch.zeros(4, 128, dtype=torch.bool)
    nan[1, 40 // block * block : (40 // block + 1) * block] = True
    nan[3, 128 - block :] = True
    assert torch.equal(torch.isnan(values), nan)
    assert torch.equal(values[~nan], dequantize(want)[~nan])
    assert torch.isnan(dequantize(quantize(spoiled, fmt, rule, block_2d=True)))[nan].all()


@pytest.mark.parametrize(("fmt", "rule"), ALL_RULES)
def test_zeros(fmt: str, rule: str) -> None:
    x = torch.zeros(16, 64)
    x[::2] = -0.0
    values = dequantize(quantize(x, fmt, rule))
    assert (values == 0).all()
    q = quantize(torch.cat((x, normal(16, 64))), fmt, rule)
    assert (dequantize(q)[:16] == 0).all() and (dequantize(q)[16:] != 0).any()


@pytest.mark.sweep
@pytest.mark.parametrize(("fmt", "rule"), ALL_RULES)
@pytest.mark.parametrize("exponent", [-148, -140, -130, -126, -110, -90, -60, 60, 100, 120, 125])
def test_magnitudes_of_float32(fmt: str, rule: str, exponent: int) -> None:
    """Never NaN or infinity from numbers; as accurate as elsewhere, but where float32 itself loses digits."""
    x = (normal(16, 64).double() * 2.0**exponent).clamp(-3.4e38, 3.4e38).float()
    q = quantize(x, fmt, rule)
    values = dequantize(q, torch.float64)
    assert torch.isfinite(values).all()
    error = (values - x.double()).abs().max() / x.double().abs().max()
    tiny = exponent <= (-85 if fmt == "nvfp4" else -120)
    # the smallest scales there are bound the error of what is smaller
    floor = 2.0**-100 * 2.0**-9 if fmt == "nvfp4" else 2.0**-127
    assert error < (0.34 if not tiny else 0.34 + 6 * floor / float(x.double().abs().max()))
    if not tiny:
        reference = quantize(normal(16, 64), fmt, rule)
        if exponent < 120:
            assert torch.equal(q.data, reference.data)


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,), (2, 0, 16)])
def test_empty(shape: tuple[int, ...]) -> None:
    with pytest.raises(OperandError, match="empty"):
        quantize(torch.zeros(shape))


@pytest.mark.parametrize("k", [1, 15, 17, 33, 100])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8_e4m3"])
def test_sizes_that_are_no_multiple_of_the_block(fmt: str, k: int) -> None:
    x = normal(5, k)
    block = FORMATS["mxfp8" if fmt == "mxfp8_e4m3" else fmt].block
    if k % block:
        with pytest.raises(OperandError, match=f"multiple of {block}.*pad=True"):
            quantize(x, fmt)
    q = quantize(x, fmt, pad=True)
    assert q.k == -(-k // block) * block
    assert same(q, quantize(torch.nn.functional.pad(x, (0, q.k - k)), fmt))
    assert (dequantize(q)[:, k:] == 0).all()
    assert torch.equal(dequantize(q, k=k), dequantize(q)[:, :k])


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary grows with the tensor: the core never sees more than a slab."""
    seen = []
    original = slabs.quantize_blocks
    monkeypatch.setattr(slabs, "quantize_blocks", lambda x, r: seen.append(x.numel()) or original(x, r))
    quantize(torch.zeros(4096, 1024, dtype=torch.bfloat16))
    assert len(seen) > 1 and max(seen) <= slabs._CPU_SLAB


def test_amax_counts_what_is_finite() -> None:
    x = torch.tensor([[1.0, -3.0, math.nan, math.inf]])
    assert float(tensor_amax(x)) == 3.0
    assert float(tensor_amax(torch.full((1, 2), math.nan))) == 0.0


def test_gradients_stop() -> None:
    x = normal(16, 32).requires_grad_()
    q = quantize(x, global_scale=torch.tensor(0.01, requires_grad=True))
    assert not q.global_scale.requires_grad and not dequantize(q).requires_grad


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"format": "fp4"}, OperandError, "format"),
        ({"rule": "best"}, OperandError, "rule for nvfp4.*four_six_mse"),
        ({"rule": "floor"}, OperandError, "rule for nvfp4"),
        ({"format": "mxfp8_e4m3", "rule": "optimal"}, OperandError, "rule for mxfp8"),
        ({"rounding": "up"}, OperandError, "rounding"),
        ({"generator": 1}, OperandError, "generator"),
        ({"rounding": "stochastic", "generator": -1}, OperandError, "seed"),
        ({"rounding": "stochastic", "generator": 1.5}, OperandTypeError, "generator"),
        ({"scale_layout": "columns"}, OperandError, "scale_layout"),
        ({"rule": "hessian"}, OperandError, "hessian"),
        ({"hessian": torch.zeros(4, 64)}, OperandError, "hessian"),
        ({"rule": "hessian", "hessian": torch.zeros(4, 80)}, OperandError, "hessian"),
        ({"rule": "hessian", "hessian": torch.zeros(4, 64), "block_2d": True}, OperandError, "block_2d"),
        ({"hadamard": True}, OperandTypeError, "hadamard"),
        ({"backend": "tpu"}, TargetError, "backend"),
    ],
)
def test_arguments_that_do_not_fit(options: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        quantize(torch.zeros(16, 64), **options)


@pytest.mark.parametrize("x", [[1.0], torch.zeros(16, dtype=torch.float64), torch.zeros(16, dtype=torch.int32)])
def test_inputs_of_other_types(x: object) -> None:
    with pytest.raises(OperandTypeError, match="x to quantize"):
        quantize(x)


def test_dequantize_arguments() -> None:
    q = quantize(normal(4, 32))
    assert dequantize(q, torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(OperandError, match="k to keep"):
        dequantize(q, k=33)
    with pytest.raises(OperandTypeError, match="dequantize"):
        dequantize(torch.zeros(4, 32))


def test_static_6_is_max() -> None:
    x = normal(16, 64)
    assert same(quantize(x, rule="static_6"), quantize(x, rule="max"))
    assert same(quantize(x, "mxfp4", "max"), quantize(x, "mxfp4", "rceil"))


def test_max_normal_has_no_subnormal_scales() -> None:
    x = normal(16, 64) * 10.0 ** torch.linspace(-8, 0, 16)[:, None]
    normal_only = quantize(x, rule="max_normal", scale_layout="rowmajor").scale
    assert (normal_only >= 0x08).all() and (quantize(x, scale_layout="rowmajor").scale < 0x08).any()

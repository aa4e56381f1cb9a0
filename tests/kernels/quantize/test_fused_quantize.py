"""rmsnorm_quantize and silu_mul_quantize: the bits of quantizing what they compute, which is near the reference."""

from __future__ import annotations

import pytest
import torch
from support import backends
from support.fused_problems import check_rmsnorm, check_silu_mul, random, same
from support.quantize_problems import DTYPES, SWEEP, edges

from cute_nvfp4 import quantize, rmsnorm_quantize, silu_mul_quantize
from cute_nvfp4.ops import fused

pytestmark = [pytest.mark.kernels, SWEEP, pytest.mark.usefixtures("poisoned")]
SCALE = torch.tensor(0.004)
PAIRS = [
    ("nvfp4", "max"), ("nvfp4", "four_six_mse"), ("nvfp4", "four_six_abs_max"), ("mxfp4", "even"),
    ("mxfp8_e4m3", "rceil"), ("mxfp8_e5m2", "floor"),
]  # fmt: skip


def scale_of(format: str) -> torch.Tensor | None:
    return SCALE if format == "nvfp4" else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format,rule", PAIRS)
@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
def test_formats(arch: str, format: str, rule: str, dtype: torch.dtype, layout: str) -> None:
    """Of every dtype; a ragged last row and last block, a weight of either dtype."""
    x, other = random(3, 544, dtype), random(3, 544, dtype, 1).flip(0)
    options = {"format": format, "rule": rule, "global_scale": scale_of(format), "scale_layout": layout}
    check_rmsnorm(x, random(1, 544, torch.float32, 2)[0] + 1, other, **options)
    check_silu_mul(x, other, **options)


@pytest.mark.parametrize("residual", [False, True], ids=["x", "x+residual"])
@pytest.mark.parametrize("k", [16, 528, 4080, 8192, 16384])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_kind_of_row(arch: str, k: int, dtype: torch.dtype, residual: bool) -> None:
    """One warp to sixteen, one block a thread to two, threads without a block."""
    x, other = random(2, k, dtype), random(2, k, dtype, 1)
    weight = (random(1, k, torch.float32, 2)[0] + 1).to(dtype)
    check_rmsnorm(x, weight, other if residual else None, global_scale=SCALE, scale_layout="rowmajor")


@pytest.mark.parametrize("rows", [1, 33, 128, 130])
@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
def test_every_kind_of_last_row(arch: str, rows: int, layout: str) -> None:
    x, other = random(rows, 112, torch.bfloat16), random(rows, 112, torch.bfloat16, 1)
    check_rmsnorm(x, None, other, global_scale=SCALE, scale_layout=layout)
    check_silu_mul(x, other, global_scale=SCALE, scale_layout=layout, alone=True)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["x", "x+residual"])
def test_several_rows_for_a_cta(arch: str, residual: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a prefill; by tables where the plan takes them."""
    monkeypatch.setattr(fused, "sm_count", lambda target, device: 1)
    x, other = random(40, 512, dtype), random(40, 512, dtype, 1)
    weight = random(1, 512, dtype, 2)[0]
    check_rmsnorm(x, weight, other if residual else None, global_scale=SCALE, scale_layout="rowmajor", alone=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_every_kind(arch: str, dtype: torch.dtype) -> None:
    """NaN, infinity, zeros, subnormals, the largest numbers: a row for each kind, and blocks of all."""
    x = edges(9, 512).to(dtype)
    x[1:5] = random(4, 512, dtype)
    x[1, 7], x[2, 300], x[3] = float("nan"), float("inf"), 0.0
    x[4] = torch.finfo(dtype).max
    x[6:] = x[6:].nan_to_num(0.0, 1.0, 1.0).clamp(-100, 100)
    for weight in (None, torch.full((512,), 0.25)):
        normed = check_rmsnorm(x, weight, global_scale=SCALE).normed
        assert normed[1].isnan().all() and (normed[3] == 0).all()
        assert normed[2, 300].isnan() and (normed[2, :288] == 0).all()
    # silu needs gates that float32 can raise e to; its factors any
    gate = torch.linspace(-80, 80, 9 * 512).reshape(9, 512).to(dtype)
    gate[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    check_silu_mul(gate, x, global_scale=SCALE)
    activation = check_silu_mul(torch.full((1, 64), -1e4).to(dtype), x[6:7, :64], global_scale=SCALE).activation
    assert (activation == 0).all()


@pytest.mark.parametrize("eps", [0.0, 1e-6, 3.0])
def test_eps(arch: str, eps: float) -> None:
    normed = check_rmsnorm(random(4, 64, torch.bfloat16), None, global_scale=None, eps=eps).normed
    if eps == 0:
        zeros = check_rmsnorm(torch.zeros(1, 64, dtype=torch.bfloat16), None, global_scale=None, eps=eps).normed
        assert zeros.isnan().all() and not normed.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_strides_and_alignments(arch: str, dtype: torch.dtype) -> None:
    """Halves of one tensor, rows apart, columns that a kernel cannot read where they are, a vector."""
    wide = random(6, 512, dtype)
    both = check_silu_mul(wide, global_scale=SCALE)
    apart = check_silu_mul(wide[:, :256].clone(), wide[:, 256:].clone(), global_scale=SCALE)
    assert both.activation.equal(apart.activation)
    for first in (wide[::2, :256], wide[1::2, 3:259], wide[::2, ::2]):
        check_silu_mul(first, wide[:3, :256], global_scale=SCALE)
        check_rmsnorm(first, wide[0, 5:261], wide[3:, :256], global_scale=SCALE)
    check_rmsnorm(wide[0], wide[1], wide[2], global_scale=SCALE)
    check_silu_mul(wide[0], global_scale=SCALE)


def test_computed_and_other_global_scales(arch: str) -> None:
    x, other = (backends.place(random(5, 256, torch.bfloat16, seed)) for seed in (0, 1))
    backend = backends.backend()
    got = rmsnorm_quantize(x, None, residual=other, global_scale="auto", return_normed=True, backend=backend)
    assert same(got.quantized, quantize(got.normed, backend="reference")) == []
    got = silu_mul_quantize(x, other, global_scale="auto", return_activation=True, backend=backend)
    assert same(got.quantized, quantize(got.activation, backend="reference")) == []
    check_rmsnorm(x, None, global_scale=0.5)
    check_silu_mul(x, other, global_scale=torch.tensor([float("nan")]))


def test_results_in_memory_that_is_there(arch: str) -> None:
    """The residual in place of the old one or of x, codes and scales in a former result."""
    x, other, weight = (backends.place(random(n, 256, torch.bfloat16, n)) for n in (5, 5, 1))
    scale, backend = backends.place(SCALE), backends.backend()
    want = rmsnorm_quantize(x, weight[0], residual=other, global_scale=scale, backend=backend)
    for reused in ("residual", "x"):
        held = {"x": x.clone(), "residual": other.clone()}
        out = rmsnorm_quantize(x * 2, weight[0], global_scale=scale, backend=backend)
        options = {"residual": held["residual"], "out": out, "residual_out": held[reused], "global_scale": scale}
        got = rmsnorm_quantize(held["x"], weight[0], **options, backend=backend)
        assert got.quantized is out and same(out, want.quantized) == []
        assert got.residual.data_ptr() == held[reused].data_ptr() and held[reused].equal(want.residual)
    want = silu_mul_quantize(x, other, global_scale=0.25, backend=backend)
    assert silu_mul_quantize(x, other, global_scale=0.25, out=out, backend=backend) is out
    assert same(out, want) == []
    want = silu_mul_quantize(x, other, global_scale="auto", backend=backend)
    assert same(silu_mul_quantize(x, other, global_scale="auto", out=out, backend=backend), want) == []


def test_a_row_does_not_depend_on_the_others(arch: str) -> None:
    x = backends.place(random(3, 4096, torch.bfloat16))
    options = {"global_scale": backends.place(SCALE), "scale_layout": "rowmajor", "backend": backends.backend()}
    whole = rmsnorm_quantize(x, None, **options)
    for i in range(3):
        one = rmsnorm_quantize(x[i], None, **options)
        assert one.data[0].equal(whole.data[i]) and one.scale[0].equal(whole.scale[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference(dtype: torch.dtype) -> None:
    """Is near torch's own modules."""
    x, other = random(4, 512, dtype).clamp(-50, 50), random(4, 512, dtype, 1)
    weight = random(1, 512, dtype, 2)[0]
    got = rmsnorm_quantize(x, weight, residual=other, global_scale=SCALE, return_normed=True, backend="reference")
    want = torch.nn.functional.rms_norm((x + other).float(), (512,), weight.float(), 1e-6)
    assert got.residual.equal(x + other)
    torch.testing.assert_close(got.normed.float(), want.to(dtype).float(), rtol=2**-7, atol=1e-30)
    assert same(got.quantized, quantize(got.normed, global_scale=SCALE, backend="reference")) == []
    got = silu_mul_quantize(x, other, global_scale=SCALE, return_activation=True, backend="reference")
    want = torch.nn.functional.silu(x.float()) * other.float()
    torch.testing.assert_close(got.activation.float(), want.to(dtype).float(), rtol=2**-7, atol=1e-30)
    assert same(got.quantized, quantize(got.activation, global_scale=SCALE, backend="reference")) == []

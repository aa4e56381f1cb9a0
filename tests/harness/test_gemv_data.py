"""Data and reference of nvfp4_gemv against plain loops; its decoders are tested in test_product_data.py."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from cute_nvfp4.harness.problem import get_problem
from cute_nvfp4.harness.problems import data
from cute_nvfp4.harness.problems.nvfp4_gemv import reference as gemv

PROBLEM = get_problem("nvfp4_gemv")
CASE = {"m": 130, "k": 80, "l": 2, "seed": 5}  # two atoms along M, two along K, both with padding


def views(case, kind):
    tensors = PROBLEM.generate(case, case["seed"], kind)
    tensors["c"] = torch.zeros(case["l"], case["m"], 1, dtype=torch.float16)
    return tensors, PROBLEM.views(tensors)


def test_shapes_dtypes_and_strides_of_the_data_tuple():
    _, (a, b, sfa, sfb, sfa_permuted, sfb_permuted, c) = views(CASE, "public")
    assert [t.dtype for t in (a, b)] == [torch.float4_e2m1fn_x2] * 2
    assert [t.dtype for t in (sfa, sfb, sfa_permuted, sfb_permuted)] == [torch.float8_e4m3fn] * 4
    assert (tuple(a.shape), a.stride()) == ((130, 40, 2), (40, 1, 130 * 40))
    assert (tuple(b.shape), b.stride()) == ((128, 40, 2), (40, 1, 128 * 40))
    assert (tuple(sfa.shape), sfa.stride()) == ((130, 5, 2), (5, 1, 650))
    assert tuple(sfb.shape) == (128, 5, 2)
    assert (tuple(c.shape), c.stride(), c.dtype) == ((130, 1, 2), (1, 1, 130), torch.float16)
    assert tuple(sfa_permuted.shape) == (32, 4, 2, 4, 2, 2)
    assert tuple(sfb_permuted.shape) == (32, 4, 1, 4, 2, 2)
    # memory is ordered (L, rest_m, rest_k, 32, 4, 4)
    assert sfa_permuted.stride() == (16, 4, 1024, 1, 512, 2048)
    assert sfa_permuted.permute(5, 2, 4, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("kind", ["public", "full"])
def test_blocked_scales_against_a_loop(kind):
    _, data = views(CASE, kind)
    for rowmajor, blocked in ((data[2], data[4]), (data[3], data[5])):
        plain, tiles = rowmajor.view(torch.uint8), blocked.view(torch.uint8)
        seen = torch.zeros(tiles.shape, dtype=torch.bool)
        for i in range(plain.shape[0]):
            for j in range(plain.shape[1]):
                for batch in range(plain.shape[2]):
                    place = (i % 32, (i % 128) // 32, i // 128, j % 4, j // 4, batch)
                    assert tiles[place] == plain[i, j, batch], place
                    seen[place] = True
        assert not tiles[~seen].any()  # padding is zero


def test_public_draws():
    tensors, _ = views({"m": 64, "k": 512, "l": 2, "seed": 1}, "public")
    for name in ("a", "b"):
        assert sorted(tensors[name].unique().tolist()) == [0, 1, 2, 3]
    for name in ("sfa", "sfb"):
        values = tensors[name].view(torch.float8_e4m3fn).float()
        assert sorted(values.unique().tolist()) == [0.0, 1.0, 2.0]
        assert values.mean().item() == pytest.approx(1.0, abs=0.1)


def test_full_draws_cover_every_code_and_stay_finite_in_fp16():
    case = {"m": 512, "k": 4096, "l": 1, "seed": 1}
    tensors, _ = views(case, "full")
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    for name in ("sfa", "sfb"):
        assert sorted(tensors[name].unique().tolist()) == finite
    for name in ("a", "b"):
        assert tensors[name].unique().numel() == 256
    expected = PROBLEM.reference(case, tensors)[0]
    assert np.isfinite(expected.value.astype(np.float16)).all()
    scales = data.e4m3_table()
    product = scales[tensors["sfa"].long()] * scales[tensors["sfb"][:, :1].long()]
    assert product.abs().max() <= gemv.SCALE_PRODUCT_BOUND


@pytest.mark.parametrize("kind", ["public", "full"])
def test_reference_is_exact(kind):
    """Against rational arithmetic, one product at a time."""
    case = {"m": 3, "k": 80, "l": 2, "seed": 9}
    tensors, _ = views(case, kind)
    expected = PROBLEM.reference(case, tensors)[0]
    e2m1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    e2m1 += [-v for v in e2m1]
    e4m3 = tensors["sfa"].new_tensor(range(256), dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()

    def value(name: str, batch: int, row: int, k: int) -> Fraction:
        byte = int(tensors[name][batch, row, k // 2])
        return e2m1[byte >> 4 if k % 2 else byte & 15] * Fraction(e4m3[int(tensors["sf" + name][batch, row, k // 16])])

    for batch in range(case["l"]):
        for row in range(case["m"]):
            products = [value("a", batch, row, k) * value("b", batch, 0, k) for k in range(case["k"])]
            assert expected.value[row, 0, batch] == float(sum(products))
            assert expected.magnitude[row, 0, batch] == float(sum(map(abs, products)))


def test_padding_rows_of_b_do_not_matter_but_row_zero_does():
    tensors, _ = views(CASE, "full")
    before = PROBLEM.reference(CASE, tensors)[0].value
    tensors["b"][:, 1:] = 0x77
    np.testing.assert_array_equal(PROBLEM.reference(CASE, tensors)[0].value, before)
    tensors["b"][:, 0] ^= 0x11
    assert (PROBLEM.reference(CASE, tensors)[0].value != before).all()


def test_draws_repeat_with_the_seed_and_differ_without():
    one, two = (PROBLEM.generate(CASE, 7, "full") for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["a"], PROBLEM.generate(CASE, 8, "full")["a"])


def test_k_must_be_whole_blocks():
    with pytest.raises(ValueError, match="k is 40, must be a multiple of 16"):
        PROBLEM.validate({"m": 1, "k": 40, "l": 1, "seed": 0})

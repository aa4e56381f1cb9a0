"""Data and references of the GEMM-like problems against plain loops and rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_nvfp4.harness.problem import get_problem, known_problems
from cute_nvfp4.harness.problems import data

# Two atoms of scales along M, two along K (both with padding), odd N; L where the problem has one.
CASES = {
    "nvfp4_gemm": {"m": 130, "n": 5, "k": 80, "l": 2, "seed": 5},
    "nvfp4_dual_gemm": {"m": 130, "n": 5, "k": 80, "l": 2, "seed": 5},
    "nvfp4_group_gemm": {"m": [130, 3], "n": [5, 129], "k": [80, 32], "seed": 5},
}
FINITE_UNSIGNED = list(range(127))
problems = pytest.mark.parametrize("name", list(CASES))
kinds = pytest.mark.parametrize("kind", ["public", "full"])


def filled(name: str, case: dict, kind: str) -> dict[str, torch.Tensor]:
    """Every buffer of a case, its outputs zero."""
    problem = get_problem(name)
    tensors = problem.generate(case, case["seed"], kind)
    for buffer in problem.buffers(case):
        if buffer.output:
            tensors[buffer.name] = torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype))
    return tensors


def flat_views(name: str, tensors: dict) -> list[tuple]:
    """Of every product: (a, b, sfa, sfb, sfa blocked, sfb blocked, c)."""
    views = get_problem(name).views(tensors)
    if name == "nvfp4_gemm":
        return [views]
    if name == "nvfp4_dual_gemm":
        a, b1, b2, sfa, sfb1, sfb2, blocked_a, blocked_b1, blocked_b2, c = views
        return [(a, b1, sfa, sfb1, blocked_a, blocked_b1, c), (a, b2, sfa, sfb2, blocked_a, blocked_b2, c)]
    abc, scales, blocked, _ = views
    return [(a, b, *plain, *tiles, c) for (a, b, c), plain, tiles in zip(abc, scales, blocked)]


def sizes(name: str, case: dict) -> list[tuple[int, int, int, int]]:
    """(m, n, k, l) of every product."""
    if name == "nvfp4_group_gemm":
        return [(m, n, k, 1) for m, n, k in zip(case["m"], case["n"], case["k"])]
    return [(case["m"], case["n"], case["k"], case["l"])] * (2 if name == "nvfp4_dual_gemm" else 1)


def test_decode_tables_against_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    e4m3 = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(data.e4m3_table().numpy(), e4m3)
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    pairs = data.e2m1_pair_table().numpy()
    np.testing.assert_array_equal(pairs[:, 0], nibbles[codes & 15])  # the low nibble is the even element
    np.testing.assert_array_equal(pairs[:, 1], nibbles[codes >> 4])


def test_decode_is_exact_for_every_byte_and_scale():
    elements = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 32)
    nibbles = np.stack((elements.numpy() & 15, elements.numpy() >> 4), -1).reshape(256, 512)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    exact = values * np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)[:, None]
    np.testing.assert_array_equal(data.decode(elements, scales).double().numpy(), exact)


@problems
def test_shapes_dtypes_and_strides(name):
    case = CASES[name]
    for (m, n, k, batch), views in zip(sizes(name, case), flat_views(name, filled(name, case, "public")), strict=True):
        a, b, sfa, sfb, blocked_a, blocked_b, c = views
        for elements, scales, blocked, rows in ((a, sfa, blocked_a, m), (b, sfb, blocked_b, n)):
            assert elements.dtype is torch.float4_e2m1fn_x2
            assert scales.dtype is blocked.dtype is torch.float8_e4m3fn
            # an (L, R, K/2) contiguous tensor permuted (1, 2, 0)
            assert (tuple(elements.shape), elements.stride()) == ((rows, k // 2, batch), (k // 2, 1, rows * k // 2))
            assert (tuple(scales.shape), scales.stride()) == ((rows, k // 16, batch), (k // 16, 1, rows * k // 16))
            # memory ordered (L, rest_m, rest_k, 32, 4, 4)
            rest_m, rest_k = math.ceil(rows / 128), math.ceil(k / 64)
            assert tuple(blocked.shape) == (32, 4, rest_m, 4, rest_k, batch)
            assert blocked.stride() == (16, 4, 512 * rest_k, 1, 512, 512 * rest_k * rest_m)
        assert (tuple(c.shape), c.stride(), c.dtype) == ((m, n, batch), (n, 1, m * n), torch.float16)


def test_the_data_tuple_of_each_problem():
    views = {name: get_problem(name).views(filled(name, case, "public")) for name, case in CASES.items()}
    assert [len(views[name]) for name in CASES] == [7, 10, 4]
    assert [type(part) for part in views["nvfp4_group_gemm"]] == [list] * 4
    abc, scales, blocked, problem_sizes = views["nvfp4_group_gemm"]
    assert problem_sizes == [(130, 5, 80, 1), (3, 129, 32, 1)]
    assert [[len(entry) for entry in part] for part in (abc, scales, blocked)] == [[3, 3], [2, 2], [2, 2]]


@problems
@kinds
def test_blocked_scales_against_a_loop(name, kind):
    for views in flat_views(name, filled(name, CASES[name], kind)):
        for plain, tiles in ((views[2], views[4]), (views[3], views[5])):
            plain, tiles = plain.view(torch.uint8).numpy(), tiles.view(torch.uint8).numpy()
            seen = np.zeros(tiles.shape, dtype=bool)
            for i, j, batch in np.ndindex(plain.shape):
                place = (i % 32, (i % 128) // 32, i // 128, j % 4, j // 4, batch)
                assert tiles[place] == plain[i, j, batch], place
                seen[place] = True
            assert not tiles[~seen].any()  # padding is zero


@problems
def test_public_elements_are_masked_bytes(name):
    case = dict(CASES[name], m=[64, 64] if "group" in name else 64)
    for views in flat_views(name, filled(name, case, "public")):
        for elements in views[:2]:
            codes = set(elements.view(torch.uint8).unique().tolist())
            assert codes <= {byte & 0b10111011 for byte in range(256)}
        assert len(codes) > 32  # of 64


@pytest.mark.parametrize("name,values", [("nvfp4_gemm", [0, 1, 2]), ("nvfp4_group_gemm", [1, 2, 3])])
def test_public_scales_are_small_integers(name, values):
    for views in flat_views(name, filled(name, CASES[name], "public")):
        for scales in views[2:4]:
            if scales.numel() > 20:
                assert scales.float().unique().tolist() == values


def test_public_scales_of_the_dual_problem_are_uniform_between_0_and_1():
    case = {"m": 512, "n": 512, "k": 1024, "l": 1, "seed": 3}
    a, b1, b2 = (filled("nvfp4_dual_gemm", case, "public")[f"sf{name}"] for name in ("a", "b1", "b2"))
    for scales in (a, b1, b2):
        values = scales.view(torch.float8_e4m3fn).double()
        assert values.min() >= 0 and values.max() == 1.0
        assert values.mean().item() == pytest.approx(0.5, abs=0.01)
        assert values.var().item() == pytest.approx(1 / 12, rel=0.02)
    assert not torch.equal(b1, b2)


FULL_CASES = {
    "nvfp4_gemm": ({"m": 256, "n": 192, "k": 16384, "l": 1, "seed": 1}, 32.0),
    "nvfp4_dual_gemm": ({"m": 512, "n": 1024, "k": 7168, "l": 1, "seed": 1}, 1.0),
    "nvfp4_group_gemm": ({"m": [256, 160], "n": [192, 160], "k": [7168, 7168], "seed": 1}, 32.0),
}


@problems
def test_full_draws_cover_every_code_and_stay_finite_in_fp16(name):
    case, bound = FULL_CASES[name]
    tensors = filled(name, case, "full")
    table = data.e4m3_table()
    for views in flat_views(name, tensors):
        sfa, sfb = (scales.view(torch.uint8) for scales in views[2:4])
        for scales in (sfa, sfb):
            assert scales.unique().tolist() == FINITE_UNSIGNED  # MMA reads them as unsigned
        for elements in views[:2]:
            assert elements.view(torch.uint8).unique().numel() == 256
        largest = table[sfa.long()].amax(0) * table[sfb.long()].amax(0)  # of each block of K
        assert bound / 2 < largest.max() <= bound
    for expected in get_problem(name).reference(case, tensors):
        assert np.isfinite(expected.value.astype(np.float16)).all()
        assert (np.abs(expected.value) > 1).mean() > 0.3  # and they are not all tiny


E2M1 = [Fraction(value) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
E2M1 += [-value for value in E2M1]
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()


def rational(views: tuple, row: int, column: int, batch: int) -> tuple[Fraction, Fraction]:
    """One element of A Bᵀ and its sum of absolute products, one product at a time."""
    a, b, sfa, sfb = (view.view(torch.uint8) for view in views[:4])

    def value(elements: torch.Tensor, scales: torch.Tensor, row: int, k: int) -> Fraction:
        byte = int(elements[row, k // 2, batch])
        return E2M1[byte >> 4 if k % 2 else byte & 15] * Fraction(E4M3[int(scales[row, k // 16, batch])])

    products = [value(a, sfa, row, k) * value(b, sfb, column, k) for k in range(2 * a.shape[1])]
    return sum(products, Fraction(0)), sum(map(abs, products), Fraction(0))


@kinds
@pytest.mark.parametrize(
    "name,case",
    [
        ("nvfp4_gemm", {"m": 3, "n": 4, "k": 80, "l": 2, "seed": 9}),
        ("nvfp4_group_gemm", {"m": [3, 1, 2], "n": [2, 5, 1], "k": [48, 16, 80], "seed": 9}),
    ],
)
def test_products_are_exact(name, case, kind):
    tensors = filled(name, case, kind)
    found = get_problem(name).reference(case, tensors)
    for expected, views in zip(found, flat_views(name, tensors), strict=True):
        assert expected.value.shape == tuple(views[6].shape)
        for place in np.ndindex(expected.value.shape):
            value, magnitude = rational(views, *place)
            assert expected.value[place] == float(value)
            assert expected.magnitude[place] == pytest.approx(float(magnitude), rel=1e-6)  # only sets a tolerance


@problems
@kinds
def test_values_do_not_need_magnitudes(name, kind):
    tensors, problem = filled(name, CASES[name], kind), get_problem(name)
    without = problem.reference(CASES[name], tensors, magnitude=False)
    for one, two in zip(without, problem.reference(CASES[name], tensors), strict=True):
        np.testing.assert_array_equal(one.value, two.value)
        assert one.magnitude is None and two.magnitude is not None


@pytest.mark.parametrize(
    "k,code,exact",
    [
        (28096, 0x40, True),  # scales of 2: 12 * 12 * 28096 * 4 = 2^24 - 593,920
        (29136, 0x40, False),  # 2^24 + 5,120
        (16, 0x30, False),  # 0.5 is no integer
        (16, 0xC0, True),  # -2 is
    ],
)
def test_float32_is_used_only_where_its_sums_are_exact(k, code, exact):
    a, b = data.Operand("a", 1, k, 1), data.Operand("b", 1, k, 1)
    tensors = {}
    for operand in (a, b):
        tensors[operand.name] = torch.full(operand.elements_shape, 0x77, dtype=torch.uint8)  # 6, the largest
        tensors[f"sf{operand.name}"] = torch.full(operand.scales_shape, code, dtype=torch.uint8)
    assert data._exact_in_float32(tensors, a, b) is exact
    tensors["a"][0, 0, -1] = 0x71  # one 6 becomes 0.5: no multiple of a large power of two is left
    value = data.exact_product(tensors, a, b, magnitude=False)[0].item()
    scale = E4M3[code]
    assert value == (36 * (k - 1) + 3) * scale * scale


@kinds
def test_the_gated_product(kind):
    case = {"m": 4, "n": 3, "k": 80, "l": 2, "seed": 9}
    tensors = filled("nvfp4_dual_gemm", case, kind)
    (expected,) = get_problem("nvfp4_dual_gemm").reference(case, tensors)
    first, second = flat_views("nvfp4_dual_gemm", tensors)
    assert expected.value.shape == (4, 3, 2)
    for place in np.ndindex(expected.value.shape):
        (gate, gate_sum), (up, up_sum) = (rational(views, *place) for views in (first, second))

        def gated(gate: float, up: float) -> float:
            return gate / (1 + math.exp(-gate)) * up

        gate, up, step = float(gate), float(up), 2.0**-20
        assert expected.value[place] == pytest.approx(gated(gate, up), rel=1e-13, abs=1e-300)
        by_gate = (gated(gate + step, up) - gated(gate - step, up)) / (2 * step)
        by_up = gated(gate, 1.0)
        moved = abs(by_gate) * float(gate_sum) + abs(by_up) * float(up_sum)
        assert expected.magnitude[place] == pytest.approx(moved, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("step", [80, 400, 1 << 24])
def test_products_do_not_depend_on_how_much_is_decoded_at_once(step, monkeypatch):
    case = CASES["nvfp4_gemm"]
    tensors = filled("nvfp4_gemm", case, "full")
    whole = get_problem("nvfp4_gemm").reference(case, tensors)[0]
    monkeypatch.setattr(data, "_ELEMENTS_AT_ONCE", step)
    parts = get_problem("nvfp4_gemm").reference(case, tensors)[0]
    np.testing.assert_allclose(parts.value, whole.value, rtol=0, atol=1e-12 * whole.magnitude.max())
    np.testing.assert_allclose(parts.magnitude, whole.magnitude, rtol=1e-6)


@problems
@kinds
def test_draws_repeat_with_the_seed_and_differ_without(name, kind):
    problem, case = get_problem(name), CASES[name]
    one, two, other = (problem.generate(case, seed, kind) for seed in (7, 7, 8))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in one)
    inputs = {buffer.name: buffer for buffer in problem.buffers(case) if not buffer.output}
    assert one.keys() == inputs.keys()
    assert all(tuple(one[key].shape) == inputs[key].shape for key in inputs)


@pytest.mark.parametrize(
    "name,case,message",
    [
        ("nvfp4_gemm", {"m": 1, "n": 1, "k": 40, "l": 1, "seed": 0}, "k is 40, must be a multiple of 16"),
        ("nvfp4_dual_gemm", {"m": 1, "n": 1, "k": 8, "l": 1, "seed": 0}, "k is 8, must be a multiple of 16"),
        ("nvfp4_group_gemm", {"m": [1, 1], "n": [1, 1], "k": [16, 24], "seed": 0}, "group 1: k is 24, must be"),
    ],
)
def test_k_must_be_whole_blocks(name, case, message):
    with pytest.raises(ValueError, match=message):
        get_problem(name).validate(case)


@pytest.mark.parametrize("name", known_problems())
@kinds
def test_varied_data_is_of_its_kind_and_new(name, kind):
    """Every element and every scale is one that could have been drawn; scales in both layouts are the same."""
    problem = get_problem(name)
    case = {"m": 40, "n": 24, "k": 64, "l": 2, "seed": 1} if name != "nvfp4_group_gemm" else None
    case = case or {"m": [40, 8], "n": [24, 16], "k": [64, 32], "seed": 1}
    case = {key: value for key, value in case.items() if key != "n" or name != "nvfp4_gemv"}
    drawn = problem.generate(case, 5, kind)
    varied = problem.vary(drawn, 6, kind)
    assert set(varied) == set(drawn)
    for operand in (key for key in drawn if f"sf{key}" in drawn):
        before, after = drawn[operand], varied[operand]
        assert after.shape == before.shape and not torch.equal(after, before)
        mask = 0xFF if kind == "full" else 3 if name == "nvfp4_gemv" else data.PUBLIC_MASK
        assert int((after & (0xFF ^ mask)).max()) == 0
        scales = varied[f"sf{operand}"]
        assert torch.equal(scales.flatten(1).sort().values, drawn[f"sf{operand}"].flatten(1).sort().values)
        assert torch.equal(data.blocked_storage(scales), varied[f"sf{operand}_permuted"])
    exact = [problem.reference(case, contents)[0].value for contents in (drawn, varied)]
    assert np.isfinite(exact[1]).all() and np.abs(exact[1]).max() < 65504 and not np.array_equal(*exact)

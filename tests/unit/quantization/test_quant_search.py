"""The searching rules against evaluating every scale, and against every other rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_nvfp4 import formats
from cute_nvfp4.formats import MXFP4, NVFP4
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.quantization import search
from cute_nvfp4.quantization.rules import rules_of

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(y: np.ndarray) -> np.ndarray:
    """The nearest E2M1 magnitude, ties to the even code: by distances, not by this library's arithmetic."""
    distance = np.abs(np.abs(y)[..., None] - E2M1)
    best = distance.min(-1, keepdims=True)
    # of two equally near codes, which are neighbours, one is even
    ranks = np.where(distance == best, np.arange(8) % 2, 2)
    return np.sign(y) * E2M1[ranks.argmin(-1)]


def lanes(values: np.ndarray) -> np.ndarray:
    """The documented order of summation over the last dimension, in float32."""
    total = values[..., :8]
    for start in range(8, values.shape[-1], 8):
        total = total + values[..., start : start + 8]
    result = total[..., 0]
    for lane in range(1, 8):
        result = result + total[..., lane]
    return result


def tiles(values: np.ndarray, side: int) -> np.ndarray:
    square = values.reshape(*values.shape[:-1], side, side)
    return lanes(lanes(square)) + lanes(lanes(square.swapaxes(-1, -2)))


def exhaustive(blocks: np.ndarray, g: np.float32, first: np.ndarray, side: int = 0) -> np.ndarray:
    """The E4M3 code of least error of (n, B) float32 blocks: all of them, the formula's first, then ascending."""
    scales = formats.decode_e4m3(torch.arange(127, dtype=torch.uint8)).numpy()
    shift = np.float32(2.0 ** -np.floor(np.log2(g)))
    least, best = None, None
    for codes in (first, *(np.full(len(blocks), code) for code in range(127))):
        scale = scales[codes][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            y = blocks * np.where(scale == 0, np.float32(0), np.float32(1) / (g * scale))
        values = nearest(y.astype(np.float64)).astype(np.float32)
        error = (values * scale) * (g * shift) - blocks * shift
        error = tiles(error * error, side) if side else lanes(error * error)
        if least is None:
            least, best = error, codes.copy()
            continue
        best = np.where(error < least, codes, best)
        least = np.minimum(error, least)
    return best


def blocks_of(x: torch.Tensor, side: int) -> np.ndarray:
    rows, k = x.shape
    if not side:
        return x.numpy().reshape(-1, 16)
    return x.numpy().reshape(rows // 16, 16, k // 16, 16).transpose(0, 2, 1, 3).reshape(-1, 256)


def scales_of(q, side: int) -> np.ndarray:
    scale = q.scale.numpy()
    return (scale[::16] if side else scale).reshape(-1).astype(np.int64)


def samples(seed: int, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    made = {
        "normal": random.standard_normal(shape),
        "student": random.standard_t(2, shape),
        "sparse": random.standard_normal(shape) * (random.random(shape) < 0.1),
        "one hot": np.eye(shape[0], shape[1]) * random.standard_normal(shape),
        "on the grid": random.choice(E2M1, shape) * random.choice([-1, 1], shape) * 2.0 ** random.integers(-6, 6),
        "small": random.standard_normal(shape) * 10.0 ** random.uniform(-6, 0, (shape[0], 1)),
        "wide": random.standard_normal(shape) * 10.0 ** random.uniform(-30, 30),
    }
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in made.items()}


@pytest.mark.sweep
@pytest.mark.parametrize("tile", [False, True])
@pytest.mark.parametrize("name", samples(0, (16, 16)))
def test_optimal_is_the_exhaustive_minimum(name: str, tile: bool) -> None:
    side = 16 if tile else 0
    for seed in range(3):
        x = samples(seed, (64, 64))[name]
        best = quantize(x, rule="optimal", block_2d=tile, scale_layout="rowmajor")
        first = quantize(x, rule="max", global_scale=best.global_scale, block_2d=tile, scale_layout="rowmajor")
        want = exhaustive(blocks_of(x, side), first.global_scale.numpy(), scales_of(first, side), side)
        np.testing.assert_array_equal(scales_of(best, side), want)


def test_a_range_that_is_too_narrow_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Must fail: bounds that leave out good scales."""
    monkeypatch.setattr(search, "_ERROR_MARGIN", 0.2)
    with pytest.raises(AssertionError):
        test_optimal_is_the_exhaustive_minimum("normal", False)


def errors(x: torch.Tensor, q, block: int) -> np.ndarray:
    """Sum of squares of every block in float64."""
    difference = q.dequantize(torch.float64).numpy() - x.to(torch.float64).numpy()
    return (difference.reshape(x.shape[0], -1, block) ** 2).sum(-1)


blocks = st.lists(
    st.one_of(
        st.floats(-4, 4, width=32),
        st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True),
        st.sampled_from([0.0, -0.0, 0.25, 0.75, 1.25, 5.0, -6.0, 448.0, 2.0**-20]),
    ),
    min_size=32,
    max_size=32,
)


@settings(max_examples=80, deadline=None)
@given(blocks, st.sampled_from([None, 1.0, 0.37, 2.0**-9, 1e6]))
def test_optimal_is_never_worse(values: list[float], global_scale: float | None) -> None:
    """On any block, under the same global scale, no rule has a smaller error than ``optimal``."""
    x = torch.tensor(values, dtype=torch.float32).reshape(2, 16)
    scale = quantize(x).global_scale if global_scale is None else global_scale
    best = errors(x, quantize(x, rule="optimal", global_scale=scale), 16)
    for rule in rules_of("nvfp4"):
        if rule == "hessian":
            continue
        other = errors(x, quantize(x, rule=rule, global_scale=scale), 16)
        # beyond what the float32 errors that are compared can tell apart
        assert (best <= other * (1 + 1e-5)).all(), rule


@settings(max_examples=60, deadline=None)
@given(blocks)
def test_optimal_mxfp4_is_never_worse(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32).reshape(1, 32)
    best = errors(x, quantize(x, "mxfp4", "optimal"), 32)
    for rule in ("max", "floor", "ceil", "even", "static_4"):
        assert (best <= errors(x, quantize(x, "mxfp4", rule), 32) * (1 + 1e-5)).all(), rule


def test_optimal_mxfp4_is_the_exhaustive_minimum() -> None:
    for name, x in samples(5, (16, 64)).items():
        q = quantize(x, "mxfp4", "optimal", scale_layout="rowmajor")
        got = errors(x, q, 32)
        rows = x.to(torch.float64).numpy().reshape(16, 2, 32)
        least = np.full((16, 2), np.inf)
        for code in range(1, 255):
            scale = 2.0 ** (code - 127)
            least = np.minimum(least, ((nearest(rows / scale) * scale - rows) ** 2).sum(-1))
        np.testing.assert_allclose(got, least, rtol=1e-5, err_msg=name)


def test_optimal_looks_at_few_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of normal numbers the bounds leave a sixth of the 127 scales for each block."""
    x = torch.tensor(np.random.default_rng(0).standard_normal((256, 1024)), dtype=torch.float32)
    evaluate, evaluated = search._evaluate, []
    monkeypatch.setattr(search, "_evaluate", lambda x, *rest: evaluated.append(x.shape[1]) or evaluate(x, *rest))
    quantize(x, rule="optimal")
    blocks_there = x.numel() // 16
    assert blocks_there < sum(evaluated) < 127 / 6 * blocks_there


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_hessian_weighs_columns(fmt) -> None:
    """Better than ``optimal`` in what it minimises, and equal to it where the Hessian is the identity."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(32, 128, generator=random)
    x = torch.randn(256, 128, generator=random) * torch.randn(128, generator=random).exp()
    by_hessian = quantize(w, fmt, "hessian", hessian=x, scale_layout="rowmajor")
    by_error = quantize(w, fmt, "optimal", scale_layout="rowmajor")

    def weighted(q) -> torch.Tensor:
        difference = (q.dequantize(torch.float64) - w).unflatten(-1, (-1, fmt.block))
        inputs = x.to(torch.float64).unflatten(-1, (-1, fmt.block))
        return torch.einsum("rgi,ngi->rgn", difference, inputs).square().sum(-1)

    assert (weighted(by_hessian) <= weighted(by_error) * (1 + 1e-5)).all()
    assert weighted(by_hessian).sum() < 0.995 * weighted(by_error).sum()
    identity = torch.eye(fmt.block).expand(128 // fmt.block, -1, -1)
    same = quantize(w, fmt, "hessian", hessian=identity, scale_layout="rowmajor")
    assert torch.equal(same.scale, by_error.scale) and torch.equal(same.data, by_error.data)
    # the blocks XᵀX given instead of X
    blocks = x.unflatten(-1, (-1, fmt.block)).transpose(0, 1)
    given_blocks = quantize(w, fmt, "hessian", hessian=blocks.transpose(1, 2) @ blocks, scale_layout="rowmajor")
    # another product of the same matrices: its last bits may decide between equals
    torch.testing.assert_close(weighted(given_blocks), weighted(by_hessian), rtol=1e-5, atol=0)


SQNR = {
    # rule: decibels for standard normal, Laplace and Student t3 numbers, 1024², of peers' implementations
    "max": (20.44, 20.66, 20.93),
    "static_4": (20.17, 19.61, 19.26),
    "four_six_mse": (21.22, 21.19, 21.30),
    "four_six_mae": (21.08, 21.06, 21.20),
    "four_six_abs_max": (20.98, 20.87, 21.01),
    "optimal": (21.81, 21.67, 21.64),
}


def sqnr(x: torch.Tensor, q) -> float:
    x = x.to(torch.float64)
    noise = q.dequantize(torch.float64) - x
    return float(10 * torch.log10(x.square().sum() / noise.square().sum()))


DISTRIBUTIONS = ("normal", "laplace", "student")


@pytest.fixture(scope="module")
def million() -> list[torch.Tensor]:
    random, shape = np.random.default_rng(0), (1024, 1024)
    made = random.standard_normal(shape), random.laplace(size=shape), random.standard_t(3, shape)
    return [torch.tensor(values, dtype=torch.float32) for values in made]


@pytest.mark.sweep
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rule", SQNR)
def test_accuracy(rule: str, distribution: str, million: list[torch.Tensor]) -> None:
    place = DISTRIBUTIONS.index(distribution)
    # the figures are rounded to 0.01
    assert sqnr(million[place], quantize(million[place], rule=rule)) >= SQNR[rule][place] - 0.006


def test_accuracy_of_the_others(million: list[torch.Tensor]) -> None:
    got = [sqnr(x, quantize(x, rule="four_six_mse", block_2d=True)) for x in million]
    assert all(g >= want - 0.006 for g, want in zip(got, (19.08, 17.76, 14.78))), got
    normal = million[0]
    for rule, want in (("floor", 18.79), ("rceil", 18.76), ("even", 19.03), ("optimal", 19.05)):
        assert sqnr(normal, quantize(normal, "mxfp4", rule)) >= want - 0.006, rule
    assert sqnr(normal, quantize(normal, "mxfp8_e4m3", "rceil")) >= 31.53 - 0.006

"""The fused search for the best scale gives the bits of the reference, and so the minimum over all scales."""

from __future__ import annotations

from collections.abc import Iterator

import cutlass
import numpy as np
import pytest
import torch
from support import mutants
from support import quantize_problems as problems
from support.quantize_problems import DTYPES, differences, edges, fused, near_ties

from cute_nvfp4.formats import decode_e4m3
from cute_nvfp4.kernels.quantize.block import error_table, optimal, optimal_by_table, optimal_definition
from cute_nvfp4.planning import quantize as planning

SHARED = pytest.mark.sweep(shared=("arch", "dtype", "name"))
pytestmark = [pytest.mark.kernels, SHARED, pytest.mark.usefixtures("poisoned")]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# one under which no product is a tie, one of few bits, a power of two
SCALES = (6.1803 / 2688, 93 / 16 / 2688, 2.0**-8)


def samples(shape: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    signs = random.choice([-1.0, 1.0], shape)
    rows, k = shape
    made = {
        "normal": random.standard_normal(shape),
        "laplace": random.laplace(size=shape),
        "student": random.standard_t(3, shape),
        "uniform": random.uniform(-1, 1, shape),
        "constant": np.repeat(random.standard_normal((rows, k // 16)), 16, 1) * signs,
        "one a block": random.standard_normal(shape) * (np.arange(k) % 16 == random.integers(16, size=(rows, 1))),
        "sparse": random.standard_normal(shape) * (random.random(shape) < 0.1),
        # the codes of half a scale are those of the scale: errors are equal, or all are zero
        "integers": random.integers(-9, 10, shape),
        "powers of two": signs * 2.0 ** random.integers(-3, 3, shape),
        "on the grid": signs * random.choice(E2M1, shape) * 2.0 ** random.integers(-4, 4, (rows, 1)),
        "one magnitude, and others": np.where(random.random(shape) < 0.5, 1.0, random.uniform(0, 1, shape)) * signs,
        # scales from the largest to subnormal ones, and blocks that vanish
        "from large to small": random.standard_normal(shape) * np.logspace(1, -7, rows)[:, None],
        "two of a size": np.where(random.random(shape) < 0.1, 6.0, 0.2) * signs * random.uniform(0.98, 1.02, shape),
    }
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in made.items()}


def check(x: torch.Tensor, **options: object) -> None:
    assert differences(x, "nvfp4", "optimal", **options) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", samples((2, 16)))
@pytest.mark.parametrize("scale", [*SCALES, "auto"], ids=str)
def test_samples(arch: str, name: str, dtype: torch.dtype, scale: float | str) -> None:
    x = samples((32, 512))[name].to(dtype)
    check(x, global_scale=scale if scale == "auto" else torch.tensor(scale))


_LAYOUTS = {
    "no global scale": (lambda dtype: edges(33, 544).to(dtype), {}),
    "row-major scales": (lambda dtype: edges(129, 80).to(dtype), {"global_scale": "auto", "scale_layout": "rowmajor"}),
    "unaligned rows": (lambda dtype: edges(33, 544).to(dtype)[:, 2:514], {"global_scale": torch.tensor(0.001)}),
    "batch": (lambda dtype: edges(3 * 40, 96).to(dtype).reshape(3, 40, 96) * 0.01, {}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", _LAYOUTS)
def test_layouts_and_sizes(arch: str, name: str, dtype: torch.dtype) -> None:
    """Without a global scale most scales are subnormal here; a row and a block too many; a batch; unaligned rows."""
    make, options = _LAYOUTS[name]
    check(make(dtype), **options)


@pytest.mark.parametrize("value", [2.0**-100, 2.0**118, 2.0**117, 1e-40, float("nan")], ids=str)
def test_global_scales(arch: str, value: float) -> None:
    x = edges(32, 512)
    check(x.bfloat16(), global_scale=torch.tensor(value, dtype=torch.float32))
    check((x * value).bfloat16(), global_scale=torch.tensor(value, dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [1.0, 2.0**-9, 93 / 16 / 2688, 0.91 * 6 / 2688, 1 / 3, 0.0014142135], ids=str)
def test_ties(arch: str, dtype: torch.dtype, value: float) -> None:
    """Under every scale, elements on ties and beside them."""
    check(near_ties(dtype, value), global_scale=torch.tensor(value))


def test_stochastic(arch: str) -> None:
    """The search is the same; the winner's codes are rounded at random."""
    check(edges(34, 544, seed=1).bfloat16(), global_scale=torch.tensor(0.01), seed=2**63 - 1)


def least_errors(blocks: np.ndarray, g: float) -> np.ndarray:
    """The least sum of squares that any E4M3 scale gives each block, in float64, by distances."""
    least = np.full(len(blocks), np.inf)
    for scale in decode_e4m3(torch.arange(127, dtype=torch.uint8)).double().numpy() * g:
        distance = np.abs(np.abs(blocks)[..., None] - E2M1 * scale).min(-1)
        least = np.minimum(least, (distance**2).sum(-1))
    return least


@pytest.mark.parametrize("name", samples((2, 16)))
def test_minimum_over_all_scales(arch: str, name: str) -> None:
    x = samples((16, 512), 7)[name].bfloat16()
    q = fused(x, "nvfp4", "optimal", global_scale="auto")
    got = ((q.dequantize(torch.float64)[0].cpu() - x.double()).numpy().reshape(-1, 16) ** 2).sum(-1)
    want = least_errors(x.double().numpy().reshape(-1, 16), float(q.global_scale))
    # what float32 cannot tell apart
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-11 * float(q.global_scale) ** 2)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems look up errors, too."""
    monkeypatch.setattr(planning, "_TABLE_BLOCKS", 1)
    planning._config.cache_clear()
    mutants.plan_anew(monkeypatch)
    yield
    planning._config.cache_clear()


@pytest.mark.usefixtures("looked_up")
@pytest.mark.parametrize("scale", [SCALES[0], SCALES[2], 2.0**-12], ids=str)
def test_looked_up_errors(scale: float) -> None:
    """All samples, one after the other, and what is out of the ordinary; small scales, and such as do not exist."""
    x = torch.cat([*samples((8, 512), seed=3).values(), edges(23, 512)]).bfloat16()
    check(x, global_scale=torch.tensor(scale))


TABLE_MUTANTS = {
    "halves for zeros": (error_table, "_FLOOR", 0.5, "normal"),
    "estimates always decide": (optimal_by_table, "_NEAR", -1.0, "normal"),
    "another block is searched": (optimal_definition, "lowest_bit", lambda _: cutlass.Int32(0), "normal"),
    "no scale below the octave": (optimal_by_table, "_clipped", lambda *_: cutlass.Boolean(False), "uniform"),
}


@pytest.mark.sim_only("runs mutants")
@pytest.mark.sweep(1)
@pytest.mark.usefixtures("looked_up")
@pytest.mark.parametrize("name", TABLE_MUTANTS)
def test_mutants_of_the_table_are_noticed(name: str) -> None:
    module, constant, value, sample = TABLE_MUTANTS[name]
    x, change = samples((64, 512))[sample].bfloat16(), mutants.Source(module, constant, value)

    def right() -> bool:
        return not differences(x, "nvfp4", "optimal", global_scale=torch.tensor(SCALES[0]))

    assert mutants.outcome(None, right, "sm_90a") == ""
    assert mutants.outcome(change, right, "sm_90a") == mutants.WRONG


def _never(*_: object) -> object:
    return cutlass.Boolean(False)


# what is changed, by what, and an input on which that shows
MUTANTS = {
    "candidates of another octave": (optimal, "_LARGEST_PRODUCT", 5.0, "normal", SCALES[0]),
    "products that saturate": (optimal, "_LARGEST_PRODUCT", 9.0, "normal", SCALES[0]),
    "no candidates below the window": (optimal, "may_be_better", _never, "uniform", SCALES[0]),
    "estimates always decide": (optimal, "_NEAR", -1.0, "integers", SCALES[2]),
    "no code of a tie is raised": (optimal, "RAISING", 0, "integers", 1.0),
    "halves of a unit for whole ones": (optimal, "HALF_UNIT", 0x00800080, "normal", SCALES[0]),
    "bounds too narrow": (optimal_definition, "ERROR_MARGIN", 0.1, "from large to small", 2.0**6),
}


@pytest.mark.sim_only("runs mutants")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str) -> None:
    module, constant, value, sample, scale = MUTANTS[name]
    x, change = samples((64, 512))[sample].bfloat16(), mutants.Source(module, constant, value)

    def right() -> bool:
        return not differences(x, "nvfp4", "optimal", global_scale=torch.tensor(scale))

    assert mutants.outcome(None, right, "sm_90a") == ""
    assert mutants.outcome(change, right, "sm_90a") == mutants.WRONG


def test_inputs_reach_every_way() -> None:
    """The samples have blocks whose best scale is the formula's, one of its neighbours, and one far above it."""
    steps = set()
    for x in samples((64, 512)).values():
        formula = fused(x.bfloat16(), "nvfp4", "max", global_scale="auto")
        best = fused(x.bfloat16(), "nvfp4", "optimal", global_scale=formula.global_scale)
        steps |= set((best.scale.int() - formula.scale.int()).flatten().tolist())
    assert steps >= set(range(-3, 7)), sorted(steps)
    assert problems.rules("nvfp4").count("optimal") == 1

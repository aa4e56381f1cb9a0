"""Fake quantization, the three products of a linear layer's training step, calibration and ``NVFP4Linear``."""

from __future__ import annotations

import pytest
import torch

import cute_nvfp4
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.nn import linear, training
from cute_nvfp4.nn.calibration import AmaxObserver
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.nn.training import (
    LinearRecipe,
    fake_quantize,
    quantized_linear,
)
from cute_nvfp4.ops.dequantize import dequantize
from cute_nvfp4.ops.quantize import (
    quantize,
)
from cute_nvfp4.quantization.hadamard import Hadamard

PLAIN = LinearRecipe(gradient_rounding="nearest", hadamard=None)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(*shape: int, seed: int = 0) -> torch.Tensor:
    """Matrices that NVFP4 holds exactly, by rows, by columns and by tiles: E2M1 values, ±6 in every block of each."""
    random = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(8, shape, generator=random)]
    values = values * (2 * torch.randint(2, shape, generator=random) - 1)
    i, j = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")
    return torch.where((i - j) % 16 == 0, 6.0, values)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def gradients(recipe: LinearRecipe | None, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor):
    """y, dx, dW and db of the layer; of torch's in float32 without a recipe."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
    function = torch.nn.functional.linear if recipe is None else lambda *a: quantized_linear(*a, recipe)
    y = function(*leaves)
    y.backward(dy)
    return y.detach(), *(leaf.grad for leaf in leaves)


def test_fake_quantize_is_quantize_and_back() -> None:
    x = normal(40, 48)
    for options in ({}, {"block_2d": True}, {"rounding": "stochastic", "generator": 3}, {"global_scale": 0.02}):
        got = fake_quantize(x, "nvfp4", "four_six_mse", **options)
        assert torch.equal(got, dequantize(quantize(x, "nvfp4", "four_six_mse", **options))), options
    by_columns = fake_quantize(x[:32], axis=0)
    assert torch.equal(by_columns, dequantize(quantize(x[:32], transpose=True)).t())
    assert torch.equal(fake_quantize(x[:32], transpose=True), by_columns)
    ragged = fake_quantize(x[:, :41])
    assert ragged.shape == (40, 41)
    assert torch.equal(ragged, dequantize(quantize(x[:, :41], pad=True), k=41))
    rotated = fake_quantize(x, hadamard=Hadamard.from_seed(0))
    assert relative(rotated, x) < 0.13
    assert fake_quantize(x[0]).shape == (48,)
    assert fake_quantize(x.bfloat16()).dtype is torch.bfloat16


def test_fake_quantize_passes_gradients_through() -> None:
    x = normal(16, 40).requires_grad_()
    weights = normal(16, 40, seed=1)
    (fake_quantize(x, "mxfp4") * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    with pytest.raises(OperandError, match="scale_layout"):
        fake_quantize(x, scale_layout="blocked")


def test_products_are_exact_where_quantization_is() -> None:
    """Nothing rounds: all three products and the bias are float32's, which here are exact."""
    x, w, dy, bias = exact(48, 64, seed=1), exact(32, 64, seed=2), exact(48, 32, seed=3), exact(32, 16, seed=4)[:, 0]
    for got, want in zip(gradients(PLAIN, x, w, bias, dy), gradients(None, x, w, bias, dy)):
        # the global scale is 6 / 2688, which rounds
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "recipe", [PLAIN, LinearRecipe(), LinearRecipe("four_six_mse", "four_six_mse", "four_six_mse")]
)
@pytest.mark.parametrize("sizes", [(128, 256, 96), (37, 50, 19)])
def test_gradients_against_float32(recipe: LinearRecipe, sizes: tuple[int, int, int]) -> None:
    """Within the noise of 4-bit operands: two of them, 0.095 (nearest) to 0.14 (stochastic, tiles) each."""
    m, k, n = sizes
    torch.manual_seed(0)
    arguments = normal(m, k, seed=1), normal(n, k, seed=2), normal(n, seed=3), normal(m, n, seed=4)
    for name, got, want in zip(("y", "dx", "dw", "db"), gradients(recipe, *arguments), gradients(None, *arguments)):
        assert got.shape == want.shape
        assert relative(got, want) < (0.22 if name != "db" else 1e-6), name
        # and quantized they are
        assert name == "db" or relative(got, want) > 0.03, name


def test_each_product_quantizes_along_its_own_contraction() -> None:
    """The definition, written out with dequantized operands."""
    x, w, dy = normal(48, 64, seed=1), normal(32, 64, seed=2), normal(48, 32, seed=3)
    y, dx, dw, _ = gradients(PLAIN, x, w, torch.zeros(32), dy)
    tiles = dequantize(quantize(w, block_2d=True))
    torch.testing.assert_close(y, dequantize(quantize(x)) @ tiles.T)
    torch.testing.assert_close(dx, dequantize(quantize(dy)) @ tiles)
    columns = dequantize(quantize(dy, transpose=True)) @ dequantize(quantize(x, transpose=True)).T
    torch.testing.assert_close(dw, columns)


def test_a_product_along_the_wrong_dimension_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Must fail: gradients quantized along the other dimension, then transposed."""
    original = training.quantize

    def wrong(x: torch.Tensor, *rest: object, transpose: bool = False, **options: object):
        if not transpose or options.get("block_2d"):
            return original(x, *rest, transpose=transpose, **options)
        return original(dequantize(original(x, *rest, **options)).t().contiguous(), *rest, **options)

    monkeypatch.setattr(training, "quantize", wrong)
    with pytest.raises(AssertionError):
        test_each_product_quantizes_along_its_own_contraction()


def test_stochastic_gradients_are_unbiased() -> None:
    """The mean of many backward passes approaches the gradient of unrounded dy."""
    x, w, dy = exact(32, 32, seed=1), exact(16, 32, seed=2), normal(32, 16, seed=3).clamp(-2, 2)
    dy[::16] = dy[:, ::16] = 2.0
    recipe = LinearRecipe(hadamard=None, generator=torch.Generator().manual_seed(5))
    total, number = torch.zeros_like(w), 100
    for _ in range(number):
        total += recipe.wgrad(dy, x)
    nearest = LinearRecipe(hadamard=None, gradient_rounding="nearest").wgrad(dy, x)
    want = dy.T @ x
    assert relative(total / number, want) < 0.4 * relative(nearest, want)


def test_only_the_gradients_that_are_asked_for() -> None:
    x, w = normal(16, 32), normal(16, 32, seed=1).requires_grad_()
    quantized_linear(x, w).sum().backward()
    assert x.grad is None and w.grad is not None
    empty = quantized_linear(x[:0], w)
    assert empty.shape == (0, 16)
    cube = quantized_linear(normal(2, 3, 32), w)
    assert cube.shape == (2, 3, 16)
    with pytest.raises(OperandError, match="x and weight"):
        quantized_linear(normal(2, 16), w)


def test_a_layer_trains() -> None:
    """A step of gradient descent at a time, a quantized layer fits a linear map nearly as well as float32 allows."""
    torch.manual_seed(0)
    truth, w = normal(16, 32, seed=1), torch.nn.Parameter(torch.zeros(16, 32) + 0.01)
    optimizer = torch.optim.Adam([w], lr=0.05)
    for step in range(60):
        x = normal(64, 32, seed=100 + step)
        optimizer.zero_grad()
        (quantized_linear(x, w) - x @ truth.T).square().mean().backward()
        optimizer.step()
    assert relative(w.detach(), truth) < 0.15


def test_observer() -> None:
    batches = [normal(8, 32, seed=seed) * scale for seed, scale in enumerate((1, 5, 2))]
    maxima = [float(batch.abs().max()) for batch in batches]
    observer, average = AmaxObserver(), AmaxObserver(momentum=0.5)
    for batch in batches:
        assert observer.observe(batch) is batch
        average.observe(batch)
    assert float(observer.amax) == max(maxima) and observer.batches == 3
    assert float(average.amax) == pytest.approx((0.5 * (maxima[0] + maxima[1]) + maxima[2]) / 2, rel=1e-6)
    joined = torch.cat(batches)
    assert torch.equal(observer.global_scale("four_six_mse"), quantize(joined, rule="four_six_mse").global_scale)
    rotation = Hadamard.from_seed(1)
    turned = AmaxObserver(hadamard=rotation)
    turned.observe(joined.reshape(2, 12, 32))
    assert torch.equal(turned.global_scale(), quantize(joined, hadamard=rotation).global_scale)
    with pytest.raises(OperandError, match="observer"):
        AmaxObserver().global_scale()
    with pytest.raises(OperandError, match="momentum"):
        AmaxObserver(momentum=2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("k", [64, 50])
def test_linear_is_the_product_of_quantized_operands(bias: bool, k: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(k, 24, bias=bias)
    layer = NVFP4Linear.from_linear(linear, "four_six_mse", input_rule="four_six_mse")
    x = normal(2, 5, k)
    a = dequantize(quantize(x.reshape(-1, k), rule="four_six_mse", pad=True), torch.float64, k=k)
    b = dequantize(quantize(linear.weight, rule="four_six_mse", pad=True), torch.float64, k=k)
    want = (a @ b.T).float().reshape(2, 5, 24) + (linear.bias if bias else 0)
    torch.testing.assert_close(layer(x), want)
    assert relative(layer(x).detach(), linear(x).detach()) < 0.15
    assert layer(x.bfloat16()).dtype is torch.bfloat16
    assert layer(x[:, :0]).shape == (2, 0, 24)
    assert f"in_features={k}" in repr(layer)


def test_linear_with_calibrated_or_unquantized_inputs() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 24)
    x = normal(8, 64)
    observer = AmaxObserver()
    observer.observe(normal(100, 64, seed=9))
    calibrated = NVFP4Linear.from_linear(linear, input_global_scale=observer.global_scale())
    a = dequantize(quantize(x, global_scale=observer.global_scale()))
    torch.testing.assert_close(calibrated(x), a @ dequantize(calibrated.weight).T + linear.bias)
    weights_only = NVFP4Linear.from_linear(linear, input_rule=None)
    torch.testing.assert_close(weights_only(x), x @ dequantize(weights_only.weight).T + linear.bias)
    scaled = NVFP4Linear(weights_only.weight, input_rule=None, input_scale=torch.linspace(1, 2, 64))
    torch.testing.assert_close(scaled(x), (x * torch.linspace(1, 2, 64)) @ dequantize(scaled.weight).T)


def test_linear_passes_gradients_to_its_input() -> None:
    linear = torch.nn.Linear(50, 24)
    layer = NVFP4Linear.from_linear(linear)
    x = normal(4, 50).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 24) @ dequantize(layer.weight, k=50))
    assert torch.equal(layer.bias.grad, torch.full((24,), 4.0))
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_linear_saves_and_loads() -> None:
    layer = NVFP4Linear.from_linear(torch.nn.Linear(64, 24))
    other = NVFP4Linear.from_linear(torch.nn.Linear(64, 24))
    x = normal(3, 64)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))


def test_linear_arguments() -> None:
    linear = torch.nn.Linear(64, 24)
    with pytest.raises(OperandTypeError, match="linear"):
        NVFP4Linear.from_linear(torch.nn.Conv1d(1, 1, 1))
    with pytest.raises(OperandError, match="transpose"):
        NVFP4Linear.from_linear(linear, transpose=True)
    with pytest.raises(OperandError, match="weight"):
        NVFP4Linear(quantize(linear.weight, "mxfp4"))
    with pytest.raises(OperandError, match="input_rule"):
        NVFP4Linear.from_linear(linear, input_rule="hessian")
    with pytest.raises(OperandError, match="bias"):
        NVFP4Linear(quantize(linear.weight), torch.zeros(3))
    with pytest.raises(OperandError, match="in_features"):
        NVFP4Linear(quantize(linear.weight), in_features=48)
    with pytest.raises(OperandError, match="x:"):
        NVFP4Linear.from_linear(linear)(normal(2, 32))


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference by name, and by default on a CPU; the name reaches ``gemm``."""
    layer = NVFP4Linear.from_linear(torch.nn.Linear(32, 16))
    x, calls = normal(2, 32), []
    default = layer(x)
    layer.backend = "reference"
    assert torch.equal(layer(x), default)

    def gemm(a: object, b: object, *, out_dtype: torch.dtype, backend: str) -> torch.Tensor:
        calls.append((out_dtype, backend))
        return torch.zeros(2, 16)

    layer.backend = "sim"
    monkeypatch.setattr(linear, "gemm", gemm)
    assert torch.equal(layer(x), layer.bias.expand(2, 16)) and calls == [(torch.float32, "sim")]


def test_a_simulated_layer() -> None:
    """Within ``simulating`` the kernels quantize x and multiply: the reference's result, to the order of sums."""
    layer = NVFP4Linear.from_linear(torch.nn.Linear(64, 16))
    x = normal(2, 64)
    want = layer(x)
    with cute_nvfp4.simulating() as runs:
        got = layer(x)
    assert [run.name for run in runs] == ["quantize", "gemm"]
    torch.testing.assert_close(got, want)

"""``quantize_model``: which layers, how well, and what it says of them."""

from __future__ import annotations

import json

import pytest
import torch

from cute_nvfp4 import NVFP4Linear, quantize, quantize_model, simulating
from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.awq import column_factors
from cute_nvfp4.nn.divergence import Judged
from cute_nvfp4.nn.gptq_rounding import gptq, output_error
from cute_nvfp4.nn.selection import select_linears

WIDTH, BLOCKS = 64, 3


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(WIDTH, 96, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(96, WIDTH)

    def forward(self, x: torch.Tensor, shift: float, scale: float = 1.0) -> tuple[torch.Tensor]:
        x = x + shift
        return (x + scale * self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x)),)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = torch.nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, 0.1, scale=0.5)[0]
        return self.head(x)


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def tokens(seed: int, count: int = 400) -> torch.Tensor:
    return torch.randint(40, (1, count), generator=torch.Generator().manual_seed(seed))


NAMES = [f"layers.{i}.{name}" for i in range(BLOCKS) for name in ("gate", "up", "down")]


def test_nearest_is_that_of_each_layer() -> None:
    exact, (made, report) = model(), quantize_model(model(), "four_six_mse", ignore=["layers.1"], input_rule="max")
    assert [layer.name for layer in report.layers] == [name for name in NAMES if ".1." not in name]
    assert report.skipped["head"] == "its weight is that of embed, too"
    assert report.skipped["layers.1.up"] == "ignored: layers.1" and type(made.layers[1].up) is torch.nn.Linear
    for layer in report.layers:
        linear, quantized = exact.get_submodule(layer.name), made.get_submodule(layer.name)
        want = NVFP4Linear.from_linear(linear, "four_six_mse", input_rule="max")
        assert all(want.state_dict()[name].equal(x) for name, x in quantized.state_dict().items())
        decoded = quantize(linear.weight, rule="four_six_mse").dequantize()
        assert layer.error == pytest.approx(((decoded - linear.weight).norm() / linear.weight.norm()).item())
        assert layer.bytes_before == 4 * linear.weight.numel() and layer.output_error is None
    assert report.bytes < report.bytes_before / 6
    assert json.loads(json.dumps(report.as_dict()))["layers"][0]["kernel"] == "exact torch"
    assert str(report).count("\n") == len(NAMES) + 1


@pytest.mark.parametrize("input_rule", [None, "max"])
def test_gptq_is_closer(input_rule: str | None) -> None:
    """On other tokens than those it was fitted to; W4A4's input scales are those of the calibration."""
    exact, held_out = model(), tokens(1)
    distances = {}
    with torch.no_grad():
        want = exact(held_out)
        for method in ("nearest", "gptq"):
            calibration = [tokens(seed) for seed in (2, 3, 4)]
            made, report = quantize_model(model(), method=method, input_rule=input_rule, calibration=calibration)
            distances[method] = float((made(held_out) - want).norm() / want.norm())
            assert all(0 < layer.output_error < 0.3 for layer in report.layers)
            assert len(report.layers) == len(NAMES)
    # of activations GPTQ makes up nothing
    assert distances["gptq"] < (0.8 if input_rule is None else 0.9) * distances["nearest"]
    first = made.layers[0].gate
    if input_rule is not None:
        amax = (exact.embed(torch.cat(calibration)) + 0.1).abs().max()
        torch.testing.assert_close(first.input_global_scale, amax / 2688)
        assert made.layers[0].up.input_global_scale.equal(first.input_global_scale)


@pytest.mark.parametrize("input_rule", [None, "max"])
def test_awq_where_columns_differ(input_rule: str | None) -> None:
    """Activations with a few large columns: their weights are scaled up, layers with one input share the factors, and
    products of other tokens are closer."""
    loud = torch.ones(WIDTH)
    loud[[3, 17, 40]] = 30.0

    def given() -> Model:
        made = model()
        made.embed.weight.data *= loud
        for layer in made.layers:
            # so that what counts is the small columns' share, too
            layer.gate.weight.data /= loud.sqrt()
            layer.up.weight.data /= loud.sqrt()
        return made

    held_out, distances = tokens(1), {}
    calibration = [tokens(seed) for seed in (2, 3, 4)]
    want = given()(held_out)
    for awq in (False, True):
        options = {"ignore": ["head"], "input_rule": input_rule, "calibration": calibration}
        made, report = quantize_model(given(), awq=awq, **options)
        distances[awq] = float(((made(held_out) - want).norm() / want.norm()).detach())
        assert all(0 < layer.output_error < 0.5 for layer in report.layers)
    assert distances[True] < 0.8 * distances[False]
    first = made.layers[0]
    assert first.gate.input_scale.equal(first.up.input_scale) and report.layers[0].method == "awq, nearest"
    # the values that a layer multiplies are near the weight's
    decoded = first.gate.weight.dequantize() * first.gate.input_scale
    assert (decoded - given().layers[0].gate.weight).norm() < 0.2 * given().layers[0].gate.weight.norm()


def test_modes_of_a_model_that_is_not_run_stay() -> None:
    made = model()
    made.layers[1].eval()
    quantize_model(made)
    assert made.training and not made.layers[1].training and made.layers[0].gate.training


def test_factors_of_alike_columns_are_none() -> None:
    w, x = (torch.randn(40, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    exact = x.sign()
    assert column_factors([w], exact) is None
    assert column_factors([w], exact * torch.linspace(0.1, 30, 64)) is not None


def test_divergence_of_predictions() -> None:
    """That of torch's distributions on the judged batches; none of a model that stays what it is."""

    def given() -> Model:
        made = model()
        # with the head's weights, predictions that are not sure, and that layers change
        made.embed.weight.data *= 0.3
        for layer in made.layers:
            layer.down.weight.data *= 20
        return made

    judge = [tokens(1, 30), tokens(5, 50)]
    before = torch.cat([given()(x).detach()[0] for x in judge])
    made, report = quantize_model(given(), judge=judge)
    after = torch.cat([made(x).detach()[0] for x in judge])
    p, q = (torch.distributions.Categorical(logits=x) for x in (before, after))
    exact = torch.distributions.kl_divergence(p, q).mean()
    found = report.divergence
    assert found.mean == pytest.approx(float(exact), rel=1e-3) and found.rows == 80 and 0 < found.error < found.mean
    assert found.agreement == pytest.approx(float((p.logits.argmax(-1) == q.logits.argmax(-1)).float().mean()))
    assert "nats a row" in str(report) and report.as_dict()["divergence"]["rows"] == 80
    assert Judged(made, judge).divergence(made) == (0.0, 0.0, 1.0, 80)
    with pytest.raises(OperandError, match="judge: got no batch"):
        quantize_model(model(), judge=[])


def test_a_head_that_is_untied() -> None:
    made, report = quantize_model(model(), ignore=["layers"], untie=True)
    assert [layer.name for layer in report.layers] == ["head"] and type(made.head) is NVFP4Linear
    assert made.embed.weight.equal(model().embed.weight)


def one_by_one(w: torch.Tensor, hessian: torch.Tensor, global_scale: torch.Tensor, damping: float) -> torch.Tensor:
    """Values of GPTQ by its definition: the inverse Hessian of the columns that are left, for each column anew."""
    w, k = w.double().clone(), w.shape[1]
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(k).double()
    values = torch.empty_like(w)
    for i in range(k):
        if i % 16 == 0:
            block = quantize(w[:, i : i + 16].float().contiguous(), global_scale=global_scale, scale_layout="rowmajor")
            scale = block.scale.view(torch.float8_e4m3fn).double() * global_scale.double()
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
        y = w[:, i : i + 1] / scale
        values[:, i] = (torch.sign(y) * grid[(y.abs() - grid).abs().argmin(-1, keepdim=True)] * scale)[:, 0]
        inverse = torch.linalg.inv(h[i:, i:])
        w[:, i:] -= (w[:, i] - values[:, i])[:, None] * inverse[0] / inverse[0, 0]
    return values


def test_gptq_by_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(24, 160, generator=generator)
    x = torch.randn(500, 160, generator=generator) @ torch.randn(160, 160, generator=generator)
    hessian = x.T @ x
    found = gptq(w, hessian, damping=0.01, neighbours=(0,))
    want = one_by_one(w, hessian, found.global_scale, 0.01)
    # a rounding that goes the other way changes what follows in its row
    rows = (found.dequantize(torch.float64) - want).abs().amax(1) < 1e-6
    assert rows.float().mean() > 0.9
    nearest = quantize(w).dequantize()
    assert output_error(w, found.dequantize(), hessian) < 0.7 * output_error(w, nearest, hessian)
    exact = (x.double() @ (w - nearest).double().T).norm() / (x.double() @ w.double().T).norm()
    assert output_error(w, nearest, hessian) == pytest.approx(float(exact), rel=1e-3)


def test_gptq_of_independent_columns_rounds_to_nearest() -> None:
    w = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    assert gptq(w, torch.eye(64), neighbours=(0,)).dequantize().equal(quantize(w).dequantize())
    found = gptq(w, torch.zeros(64, 64), "four_six_mse", neighbours=(0,))
    assert found.dequantize().equal(quantize(w, rule="four_six_mse").dequantize())


def test_a_searched_scale_is_closer() -> None:
    """With columns that matter alike the error is between that of the rule and that of the best of all scales."""
    w = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    found = gptq(w, torch.eye(64), "four_six_mse").dequantize()
    best, rule = (quantize(w, rule=name).dequantize() for name in ("optimal", "four_six_mse"))
    assert (best - w).norm() <= (found - w).norm() < 0.98 * (rule - w).norm()


def test_patterns() -> None:
    assert list(select_linears(model(), ["re:.*gate$", "layers.2", "*.1.*"])) == ["layers.0.up", "layers.0.down"]
    with pytest.raises(OperandError, match=r"ignore: got \['lm_head'\]"):
        select_linears(model(), ["lm_head", "layers.0"])
    with pytest.raises(OperandError, match="no linear layer"):
        select_linears(model(), ["layers"])
    # nothing holds it: it would stay as it is, and the report would say otherwise
    with pytest.raises(OperandError, match="model: got a linear layer, expected a module that holds some"):
        quantize_model(torch.nn.Linear(32, 32))


BAD = {
    "method": ({"method": "awq"}, "method: got 'awq'"),
    "rule": ({"rule": "nearest"}, "rule for nvfp4"),
    "hessian": ({"rule": "hessian"}, "a rule that needs only values"),
    "no calibration": ({"method": "gptq"}, "calibration: got None"),
    "no calibration of awq": ({"awq": True}, "calibration: got None, expected batches: AWQ"),
    "no batch": ({"method": "gptq", "calibration": []}, "calibration: got no batch"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests(case: str) -> None:
    options, message = BAD[case]
    given = model()
    with pytest.raises(OperandError, match=message):
        quantize_model(given, **options)
    assert not any(isinstance(module, NVFP4Linear) for module in given.modules())


def test_a_layer_that_no_batch_reaches() -> None:
    class Branch(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    torch.manual_seed(0)
    with pytest.raises(OperandError, match=r"no row for layers\.0\.gate"):
        quantize_model(Branch(), method="gptq", calibration=[tokens(0)])


KERNELS = {"packed streaming gemm": "stream", "gemv": "gemv", "gemm": "gemm"}
KERNELS |= {f"packed {name} gemm": "wgmma_gemm" for name in ("WGMMA", "tcgen05", "mma.sync")}
CHOICES = [("sm_90a", None, 1), ("sm_90a", "max", 0), ("sm_100a", "max", 0), ("sm_100a", None, 1), ("sm_120a", None, 1)]


@pytest.mark.kernels("sm_90a", "sm_100a", "sm_120a")
@pytest.mark.sim_only("looks at the simulator's launches")
@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize("arch, rule, released", CHOICES)
def test_what_is_explained_is_what_runs(arch: str, rule: str | None, released: bool, rows: int) -> None:
    torch.manual_seed(0)
    layer = NVFP4Linear.from_linear(torch.nn.Linear(128, 64), input_rule=rule, input_global_scale=torch.tensor(0.002))
    x = torch.randn(rows, 128).bfloat16()
    with simulating(arch) as runs:
        layer.prepare(release=bool(released))
        before, choice = len(runs), layer.explain_backend(rows)
        layer(x)
        names = [run.kernel.name for run in runs[before:]]
    assert choice.backend == "sim" and choice.reason and KERNELS[choice.kernel] in names[-1], names

"""benchmarks/moe.py without a GPU: what others' products are given."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cute_nvfp4 import BlockScaledTensor
from cute_nvfp4.formats import FORMATS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import moe as benchmark
from moe_contestants import HummingProducts, NotAvailableError

LAYER = benchmark.Layer("small", experts=5, top=2, hidden=96, inner=64)


class StubLayer:
    """What of Humming's layer the benchmark calls, by torch. ``wrong``: what is added to each product."""

    wrong = 0.0

    def __init__(self, n: int, k: int, rule: dict, rows: dict | None, num_experts: int, torch_dtype: object) -> None:
        self.form = FORMATS["nvfp4" if rule["quant_method"] == "modelopt" else "mxfp4"]
        self.shape, self.rows, self.weight_scale_2 = (num_experts, n, k // 2), rows, torch.zeros(num_experts, 1)

    def to(self, device: object) -> StubLayer:
        return self

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        assert tensors["weight"].shape == self.shape
        scale = tensors["weight_scale"].view(torch.uint8)
        self.weight = BlockScaledTensor(tensors["weight"], scale, None, self.form).dequantize()

    def transform(self) -> None:
        pass

    def __call__(self, x: torch.Tensor, expert_layout: torch.Tensor, compute_config: dict) -> torch.Tensor:
        assert compute_config == {"gemm_type": "grouped_contiguous"}
        parts = x.float().split(expert_layout.diff().tolist())
        return torch.cat([part @ w.t() for part, w in zip(parts, self.weight, strict=True)]) + self.wrong


@pytest.fixture
def humming(monkeypatch: pytest.MonkeyPatch) -> type[StubLayer]:
    module = ModuleType("humming.layer")
    module.HummingLayer = StubLayer
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    return StubLayer


@pytest.mark.parametrize("name, form", [("humming", "nvfp4"), ("humming", "mxfp4"), ("humming-w4a8", "mxfp4")])
def test_products_of_humming(name: str, form: str, humming: type[StubLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = benchmark.Weights(LAYER, "cpu", True)
    stacks = weights.stacks_in(form, torch.Generator().manual_seed(1), "cpu")
    r = benchmark.Routing.random(LAYER, 7, False, "cpu")
    run = HummingProducts(name, stacks, LAYER.top)
    assert run.rows(r) is run.rows(r) and [x.rows is not None for x in run.products] == [name == "humming-w4a8"] * 2
    assert run(r).shape == (14, LAYER.hidden)
    # rows of the first expert that has some are its tokens' rows
    expert = int(r.ids.min())
    tokens = (r.ids == expert).nonzero()[:, 0]
    assert torch.equal(run.rows(r).x[: len(tokens)], r.x[tokens])
    run.check(r)
    monkeypatch.setattr(humming, "wrong", 40.0)
    with pytest.raises(NotAvailableError, match="off by"):
        run.check(r)


def test_humming_is_not_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    assert benchmark.by_others(LAYER, benchmark.Weights(LAYER, "cpu", True), ("humming",)) == {}
    assert "no humming: humming-kernels" in capsys.readouterr().out

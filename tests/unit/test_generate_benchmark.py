"""What ``benchmarks/generate.py`` does without a GPU: its model in every contestant's form, its step, its table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import generate as benchmark
from between_torch import Between
from generate_model import TINY, TINY_MIXTURE, Decoder, Layer, Shape, empty_cache, models
from slots import Slots

from cute_nvfp4 import moe

TOKENS = torch.randint(TINY.vocabulary, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module", params=[TINY, TINY_MIXTURE], ids=lambda shape: shape.name)
def made(request: pytest.FixtureRequest) -> dict[str, Decoder]:
    with torch.inference_mode():
        return models(request.param, [*benchmark.NAMES, *benchmark.ROUTERS], "cpu", Between())


def weight(module: torch.nn.Module) -> torch.Tensor:
    return module.weight.double()


def fed(layer: Layer, shape: Shape, x: torch.Tensor) -> torch.Tensor:
    """What follows attention, expert by expert."""

    def mlp(x: torch.Tensor, both: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ both.T).chunk(2, -1)
        return (gate * gate.sigmoid() * up) @ down.T

    if not shape.experts:
        return mlp(x, weight(layer.feed.gated), weight(layer.feed.down))
    chances = (x @ layer.feed.router.double().T).softmax(-1)
    least = chances.topk(shape.top).values[..., -1:]
    chances = torch.where(chances >= least, chances, 0)
    chances = chances / chances.sum(-1, keepdim=True)
    stacks = zip(layer.feed.gate_up.double(), layer.feed.down.double(), chances.unbind(-1))
    return sum(mlp(x, both, down) * chance[..., None] for both, down, chance in stacks)


def exact(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens in float64, by formulas and nothing of the model but its weights."""
    shape, length = model.shape, tokens.shape[1]

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double()

    def turned(x: torch.Tensor) -> torch.Tensor:
        rates = shape.theta ** (-torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
        turn = torch.polar(torch.ones(()).double(), torch.arange(length).double()[:, None] * rates)[:, None]
        half = shape.head_dim // 2
        y = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((y.real, y.imag), -1)

    x = model.embedding[tokens].double()
    for layer in model.layers:
        h = normed(x, layer.norms.attention) @ weight(layer.qkv).T
        sizes = shape.heads, shape.kv_heads, shape.kv_heads
        q, k, v = h.unflatten(-1, (-1, shape.head_dim)).split(sizes, dim=2)
        if shape.head_norms:
            q, k = (normed(y, w) for y, w in zip((q, k), layer.norms.heads.split(sizes)))
        k, v = (y.repeat_interleave(shape.heads // shape.kv_heads, dim=2) for y in (turned(k), v))
        weights = torch.einsum("bqhd,bkhd->bhqk", turned(q), k) * shape.head_dim**-0.5
        weights = weights.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2) @ weight(layer.output).T
        x = x + fed(layer, shape, normed(x, layer.norms.feed))
    return normed(x, model.norm) @ weight(model.head).T


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y).norm() / y.norm())


@torch.inference_mode()
def test_the_model_is_what_it_is_called(made: dict[str, Decoder]) -> None:
    """Prompts, and steps after them with the cache, beside float64."""
    want = exact(made["bf16"], TOKENS)
    for name in ("bf16", "w4a16", "w4a16, head too", *benchmark.ROUTERS):
        cache = empty_cache(made["bf16"].shape, 2, 9, "cpu")
        assert distance(made[name](TOKENS[:, :8], cache), want[:, 7]) < 0.03, name
        step = made[name](TOKENS[:, 8:], cache, torch.tensor([8]))
        assert distance(step, want[:, 8]) < 0.03, name
        # the cache, the positions and the mask matter
        wrong = made[name](TOKENS[:, 8:], cache, torch.tensor([7]))
        assert distance(wrong, want[:, 8]) > 0.1, name


@torch.inference_mode()
def test_a_step_writes_the_next_tokens(made: dict[str, Decoder]) -> None:
    cache, tokens = empty_cache(TINY, 2, 4, "cpu"), TOKENS[:, :1].clone()
    logits = benchmark.step(made["w4a4"], tokens, cache, torch.tensor([3]))
    assert tokens.equal(logits.argmax(-1, keepdim=True)) and logits.isfinite().all()
    benchmark.products(made["w4a16"], 2, "cpu")()


@torch.inference_mode()
def test_distances_show_other_weights(made: dict[str, Decoder]) -> None:
    found = benchmark.distances(made, "cpu")
    assert found["bf16"] == 0 and found["w4a16"] < benchmark.CLOSE
    assert 0 < found["w4a8"] < 0.2 and found["w4a4"] > 0
    other = models(made["bf16"].shape, ["w4a16"], "cpu", Between(), seed=1)
    assert benchmark.distances({"bf16": made["bf16"], **other}, "cpu")["w4a16"] > benchmark.CLOSE


def test_weights_take_the_bytes_of_four_bits(made: dict[str, Decoder]) -> None:
    plain, packed = (benchmark.weight_bytes(made[name]) for name in ("bf16", "w4a16, head too"))
    # tiles of 128 × 128 are larger than these matrices
    elements = made["bf16"].shape.linear_weights
    assert 2 * elements < plain and 9 / 16 * elements < packed < plain


def test_table() -> None:
    row = {"what": "decode", "batch": 16, "us": 4000.0, "products_us": 3000.0, "contestant": "bf16"}
    rows = [row, row | {"contestant": "w4a16", "us": 2000.0, "products_us": 1000.0}]
    rows += [{"what": "prefill", "tokens": 2048, "contestant": name, "us": 5e4} for name in ("bf16", "w4a16")]
    lines = benchmark.table(rows, ["bf16", "w4a16"]).splitlines()
    assert lines[2:] == [
        "| decode, batch 16 | 4.00 ms | 2.00 ms (2.00 ×) |",
        "| … its products | 3.00 ms | 1.00 ms (3.00 ×) |",
        "| prefill, 2048 tokens | 50.00 ms | 50.00 ms (1.00 ×) |",
    ]
    assert benchmark.parse(["--quick", "--batches", "1", "--prompts"]).prompts == []


def test_kernels_of_a_step() -> None:
    seen = [("norm", 2.0), ("gemm", 30.0), ("norm", 4.0), ("gemm", 34.0), ("norm", 3.0), ("norm", 3.0)]
    assert benchmark.by_kernel(seen, 2) == [
        {"kernel": "gemm", "count": 1.0, "us": 32.0},
        {"kernel": "norm", "count": 2.0, "us": 6.0},
    ]


def test_what_kernels_of_a_step_do() -> None:
    """Names that torch's profiler gave on an H200."""
    names = {"nvjet_sm90_tst_128x8": 5.0, "cublasLt::splitKreduce_kernel<32>": 1.0, "triton_red_fused_add_rsqrt_0": 2.0}
    names |= {"kernel_cute_nvfp4kernelsgemmpackedstream": 7.0, "cudnn_generated_sdpa_sm90_flash": 3.0, "Memset": 0.5}
    found = benchmark.by_work([{"kernel": name, "count": 1, "us": us} for name, us in names.items()])
    some = {name: us for name, us in found.items() if us}
    assert some == {"products": 13.0, "attention": 3.0, "norms": 2.0, "other": 0.5}


@torch.inference_mode()
def test_parts_of_rows_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have scales of their own, so that parts of them give the same."""
    monkeypatch.setattr("generate_contestants.PART", 4)
    made = models(TINY, ["w4a8", *benchmark.PARTS], "cpu", Between())
    logits = [model(TOKENS, empty_cache(TINY, 2, 9, "cpu")) for model in made.values()]
    assert [model.layers[0].feed.rows for model in made.values()] == [None, 4]
    torch.testing.assert_close(*logits, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(logits[0], logits[1].roll(1, 0), rtol=1e-2, atol=1e-2)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["bf16", "w4a16", "bf16, our router"])
def test_slots_are_added_up_with_the_norm(name: str) -> None:
    """One token's step with a norm that routes, and experts whose rows the next norm adds up, gives the same logits."""
    plain, calls = Between(), []

    def norm_route(x, residual, weight, router, top):
        calls.append(top)
        total, normed = plain.add_norm(x, residual, weight)
        return total, normed, *plain.route(normed.view(1, -1), router, top)

    found = []
    for between in (plain, plain._replace(norm_route=norm_route)):
        model = models(TINY_MIXTURE, [name], "cpu", between)[name]
        if model.layers[0].feed.experts is not None and between is not plain:
            # its kernel asks for a GPU: the rows by exact torch
            for layer in model.layers:
                layer.feed.slots = lambda x, ids, weights, e=layer.feed.experts: Slots(moe(x, ids, weights, e), None)
        cache = empty_cache(TINY_MIXTURE, 1, 8, "cpu")
        found.append(model(TOKENS[:1, :1], cache, torch.tensor([3])))
    assert distance(found[1], found[0].double()) < 0.02
    assert len(calls) == (0 if name == "bf16" else TINY_MIXTURE.layers)

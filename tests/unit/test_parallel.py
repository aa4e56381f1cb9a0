"""Tensor and expert parallelism: two processes over gloo give what one process gives, and shards keep every byte.

Values of x are small integers, those of weights have few bits, so that every sum is exact whatever its order: results
of a column-parallel layer have the bits of one process on any processor.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.parallel_benchmark import measured
from support.ranks import ranks

from cute_nvfp4 import (
    BlockScaledTensor,
    NVFP4Linear,
    moe,
    prepare_experts,
    prepare_weight,
    quantize,
    simulating,
    to_blocked,
)
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.nn import PeerSums
from cute_nvfp4.nn.expert_parallel import ExpertParallel, shard_experts
from cute_nvfp4.ops.moe.experts import Experts
from cute_nvfp4.scale_layout import blocked_flat
from cute_nvfp4.weight_shards import shard_columns, shard_rows, shard_stack

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def weight(n: int, k: int, seed: int = 0, layout: str = "blocked") -> BlockScaledTensor:
    """Every code under every positive scale from 2**-2 to 2, with a global scale that is a power of two."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x28, 0x41, (n, k // 16), dtype=torch.uint8, generator=generator)
    made = BlockScaledTensor(data, scale, torch.tensor(0.25))
    if layout == "rowmajor":
        return made
    return BlockScaledTensor(data, to_blocked(scale), torch.tensor(0.25))


def integers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


# --- shards of weights


@pytest.mark.parametrize("layout", ["blocked", "rowmajor"])
def test_shards_of_block_scaled_weights_are_its_values(layout: str) -> None:
    w = weight(160, 96, layout=layout)
    whole = w.dequantize()
    for count in (2, 3):
        if count == 2:
            rows = torch.cat([shard_rows(w, r, count).dequantize() for r in range(count)])
            assert rows.equal(whole)
        columns = torch.cat([shard_columns(w, r, count).dequantize() for r in range(count)], dim=1)
        assert columns.equal(whole)
    fused = shard_rows(w, 1, 2, parts=(96, 32, 32)).dequantize()
    assert fused.equal(torch.cat([whole[48:96], whole[112:128], whole[144:160]]))
    assert shard_columns(w, 0, 2).scale_layout == layout


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_shards_of_prepared_weights_are_prepared_shards(dtype: torch.dtype) -> None:
    """Byte for byte: cutting before packing and after it give the same."""
    w, up = weight(512, 512), weight(512, 512, seed=3)
    cut, packed = [shard_rows, shard_columns], prepare_weight(w, dtype=dtype)
    for cutting in cut:
        for rank in range(2):
            one, other = cutting(packed, rank, 2), prepare_weight(cutting(w, rank, 2), dtype=dtype)
            assert one.packed.equal(other.packed) and one.key is other.key
    fused = shard_rows(packed, 1, 2, parts=(256, 256))
    assert fused.packed.equal(prepare_weight(shard_rows(w, 1, 2, parts=(256, 256)), dtype=dtype).packed)
    gated = prepare_weight(w, up, dtype=dtype)
    for cutting in cut:
        other = prepare_weight(cutting(w, 1, 2), cutting(up, 1, 2), dtype=dtype)
        assert cutting(gated, 1, 2).packed.equal(other.packed)


def test_shards_of_fp8_weights_keep_the_factors_of_rows() -> None:
    """A row whose columns are unequal: a shard's own factor would round other elements."""
    w = weight(256, 256)
    scale = w.rowmajor_scale()[0].clone()
    scale[::3, :8] -= 0x20
    w = BlockScaledTensor(w.data, scale, w.global_scale)
    packed = prepare_weight(w, dtype=E4M3)
    whole = packed.dequantize()
    for cutting, dim in ((shard_rows, 0), (shard_columns, 1)):
        parts = [cutting(packed, r, 2) for r in range(2)]
        assert torch.cat([x.dequantize() for x in parts], dim=dim).equal(whole)
    # the check can fail: factors of a shard alone are others
    alone = torch.cat([prepare_weight(shard_columns(w, r, 2), dtype=E4M3).row_factor for r in range(2)])
    assert not alone.equal(packed.row_factor.repeat(2))


def test_shards_of_stacks_are_views() -> None:
    values = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))
    for layout in ("blocked", "rowmajor"):
        stack = quantize(values, scale_layout=layout)
        mine = shard_stack(stack, 1, 2)
        assert mine.data.data_ptr() == stack.data[2].data_ptr() and mine.dequantize().equal(stack.dequantize()[2:])
    packed = prepare_weight(stack)
    assert shard_stack(packed, 1, 2).dequantize().equal(packed.dequantize()[2:])


@pytest.mark.parametrize(
    "cut, words",
    [
        (lambda: shard_rows(weight(100, 64), 0, 3), r"rows \(N\) over 3 ranks: got 100, expected a multiple of 3 "),
        (lambda: shard_columns(weight(16, 80), 0, 2), r"columns \(K\) over 2 ranks: got 80.*multiple of 32 .*16"),
        (lambda: shard_rows(prepare_weight(weight(192, 128)), 0, 2), "got 192, expected a multiple of 256 .*tile"),
        (lambda: shard_columns(prepare_weight(weight(128, 128)), 0, 2), "got 128, expected a multiple of 256 .*tile"),
        (lambda: shard_rows(weight(64, 64), 2, 2), "rank: got 2 of 2"),
        (lambda: shard_rows(weight(64, 64), 0, 2, parts=(32, 16)), r"got \[32, 16\], expected .*sum 64"),
        (lambda: shard_stack(weight(64, 64), 0, 2), "got a matrix, expected a stack"),
    ],
)
def test_what_cannot_be_cut(cut: Callable[[], object], words: str) -> None:
    with pytest.raises(OperandError, match=words):
        cut()


@pytest.mark.parametrize("release", [True, False])
def test_a_prepared_layer_stays_prepared(release: bool) -> None:
    """Its bytes are those of the prepared shard, and its state_dict those of the shard."""
    w = weight(256, 256)
    with simulating("sm_90a"):
        layer = NVFP4Linear(w, input_rule=None).prepare(release=release)
        layer.replace_weight(shard_columns(layer.weight, 1, 2), 128)
        packed = layer.weight_prepared_bfloat16
        mine = shard_columns(w, 1, 2)
        assert packed.equal(prepare_weight(mine, backend="reference").packed)
        assert packed.equal(shard_columns(prepare_weight(w, backend="reference"), 1, 2).packed)
    assert (layer.in_features, layer.out_features, layer.weight_data is None) == (128, 256, release)
    state = layer.state_dict()
    assert state["weight_data"].equal(mine.data)
    assert state["weight_scale"].equal(blocked_flat(mine.blocked_scale()))


# --- layers over processes


PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "use_two_gpus.md"
RULES = (None, "max")


def layers(input_rule: str | None = None) -> dict[str, NVFP4Linear]:
    """qkv (q 64, k 32, v 32) of 96, and o of q's 64 columns; with biases."""
    sizes = {"qkv": (128, 96), "o": (96, 64)}
    options = {"input_rule": input_rule, "backend": "reference"}
    return {
        name: NVFP4Linear(weight(n, k, seed=n), torch.nn.Parameter(integers(n, seed=n)), **options)
        for name, (n, k) in sizes.items()
    }


def attention(qkv: torch.Tensor, q: int) -> torch.Tensor:
    """What stands between: columns of q, kept small and whole."""
    return (qkv[..., :q] / 64).round().clamp(-3, 3)


def followed(qkv: torch.Tensor, q: int) -> torch.Tensor:
    """The values of ``attention``, with the gradient of q itself."""
    return attention(qkv, q).detach() + (qkv[..., :q] - qkv[..., :q].detach())


def _everything(rank: int, folder: Path) -> None:
    """What the process of a rank does for the tests below; what it finds is saved."""
    found = {str(rule): _two_layers(rule, 2) for rule in RULES}
    found |= {rows: _experts(rank, rows) for rows in ("16 bits", "nvfp4")}
    # its asserts are what it promises
    exec(compile(page_program(), str(PAGE), "exec"), {"__name__": "page"})
    torch.save(found, folder / f"{rank}.pt")
    measured(rank, folder / "record.json")


def page_program() -> str:
    """The blocks of code of the page, which are one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, torch.Tensor]]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks(_everything, folder)
    every = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    return [x | {"record": json.loads((folder / "record.json").read_text())} for x in every]


def _four(rank: int, folder: Path) -> None:
    """The layers of a rank of four."""
    torch.save(_two_layers(None, 4), folder / f"{rank}.pt")


def _two_layers(input_rule: str | None, count: int) -> dict[str, torch.Tensor]:
    """Results of the layers of a rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from cute_nvfp4.nn import NVFP4ColwiseParallel, NVFP4RowwiseParallel

    mesh = init_device_mesh("cpu", (count,))
    model = torch.nn.ModuleDict(layers(input_rule))
    plan = {"qkv": NVFP4ColwiseParallel(parts=(64, 32, 32)), "o": NVFP4RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    x = integers(5, 96).requires_grad_()
    qkv = model["qkv"](x)
    y = model["o"](followed(qkv, 64 // count))
    (y * integers(5, 96, seed=9)).sum().backward()
    whole = layers(input_rule)["qkv"]
    gathered = NVFP4ColwiseParallel(gather_output=True)._apply(whole, mesh)(x)
    found = {"qkv": qkv, "y": y, "dx": x.grad, "gathered": gathered}
    with torch.no_grad():
        found["without gradients"] = model["o"](attention(qkv, 64 // count))
        if count == 2 and input_rule is None:
            traced = torch.compile(
                lambda x: model["o"](attention(model["qkv"](x), 32)), backend="eager", fullgraph=True
            )
            assert traced(x.detach()).equal(found["without gradients"])
    for wrong in (model["o"], torch.nn.Linear(4, 4)):
        with pytest.raises((OperandError, OperandTypeError), match=r"a shard already|expected NVFP4Linear"):
            NVFP4RowwiseParallel()._apply(wrong, mesh)
    with pytest.raises(OperandError, match=rf"columns \(K\) over {count} ranks: got 48"):
        NVFP4RowwiseParallel()._apply(NVFP4Linear(weight(16, 48)), mesh)
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.parametrize("input_rule", RULES)
def test_two_processes_are_one(found: list[dict], input_rule: str | None) -> None:
    """Column-parallel with fused parts, then row-parallel: results, and the gradient of x."""
    check_layers([f[str(input_rule)] for f in found], input_rule)


def test_four_processes_are_one(tmp_path: Path) -> None:
    """A shard of o's K is one block."""
    ranks(_four, tmp_path, count=4)
    check_layers([torch.load(tmp_path / f"{rank}.pt") for rank in range(4)], None)


def check_layers(mine: list[dict[str, torch.Tensor]], input_rule: str | None) -> None:
    """What the ranks found, beside one process."""
    model, count = layers(input_rule), len(mine)
    x = integers(5, 96).requires_grad_()
    qkv = model["qkv"](x)
    (o := model["o"](followed(qkv, 64))).backward(integers(5, 96, seed=9))
    sizes = [size // count for size in (64, 32, 32)]
    q, k, v = ([f["qkv"].split(sizes, dim=1)[i] for f in mine] for i in range(3))
    # exact: the same sums of columns of one process
    assert torch.cat(q + k + v, dim=1).equal(qkv)
    for f in mine:
        assert f["gathered"].equal(qkv)
        torch.testing.assert_close(f["y"], o, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(f["without gradients"], o, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(f["dx"], x.grad, rtol=1e-5, atol=1e-3)
    assert x.grad.abs().max() > 1
    # the check can fail: a rank's part alone is not the result
    half = attention(qkv, 64)[:, :32] @ model["o"].weight.dequantize()[:, :32].T
    assert not torch.allclose(half, o, rtol=1e-2)


# --- experts over two processes

EXPERTS, TOP, HIDDEN, INNER, TOKENS = 6, 3, 128, 64, (7, 4)


def mixture(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of a rank, the router's choice among all experts (-1 is none) and weights: multiples of 1/8."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(TOKENS[rank])])
    ids[0], ids[1, 0] = ids[0] % (EXPERTS // 2), -1  # a token that only one rank is asked for; a choice that is none
    return x, ids, torch.randint(1, 8, ids.shape, generator=generator) / 8


def every_expert() -> Experts:
    generator = torch.Generator().manual_seed(5)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    return prepare_experts(*(quantize(torch.randn(*s, generator=generator) / s[-1] ** 0.5) for s in shapes))


def _experts(rank: int, rows: str) -> dict[str, torch.Tensor]:
    """Results of the experts of a rank."""
    layer = ExpertParallel(shard_experts(every_expert(), rank, 2), rows=rows)
    x, ids, weights = mixture(rank)
    found = {"y": layer(x, ids, weights)}
    found["sent"] = torch.tensor(layer.exchange(ids).sent)
    # as many rows on both ranks
    found["gathered"] = layer.all_gathered(x[:4], ids[:4], weights[:4])
    # nobody asks for one of the ranks
    found["one rank"] = layer(x, ids.clamp(max=0), weights)
    return found


@pytest.mark.parametrize("rows", ["16 bits", "nvfp4"])
def test_experts_of_two_processes(found: list[dict], rows: str) -> None:
    """Rows as they are, or through NVFP4 as one process quantizes all of them."""
    experts, inputs = every_expert(), [mixture(rank) for rank in range(2)]
    if rows == "nvfp4":
        both = quantize(torch.cat([x for x, _, _ in inputs])).dequantize(BF16).split(TOKENS)
        # of the four rows that are gathered the largest magnitude is another
        four = quantize(torch.cat([x[:4] for x, _, _ in inputs])).dequantize(BF16).split(4)
        mixed = [(a, b, ids, w) for a, b, (_, ids, w) in zip(both, four, inputs)]
    else:
        mixed = [(x, x[:4], ids, w) for x, ids, w in inputs]
    for rank, (x, four, ids, weights) in enumerate(mixed):
        mine = found[rank][rows]
        wants = {
            "y": moe(x, ids, weights, experts, backend="reference"),
            "gathered": moe(four, ids[:4], weights[:4], experts, backend="reference"),
            "one rank": moe(x, ids.clamp(max=0), weights, experts, backend="reference"),
        }
        for name, want in wants.items():
            assert distance(mine[name], want) < 0.01, name
        # a token without experts of a rank is not sent there
        need = [(ids // 3 == r).any(1).sum().item() for r in range(2)]
        assert mine["sent"].tolist() == need and min(need) < len(ids)
        # the check can fail: without the experts of the other rank
        alone = moe(x, ids, weights, shard_experts(experts, rank, 2), offset=3 * rank, backend="reference")
        assert distance(alone, wants["y"]) > 0.2


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def test_the_page_is_run() -> None:
    """It is part of what ``found`` needs."""
    assert page_program().count("assert") >= 3


def test_the_benchmark_writes_tables(found: list[dict]) -> None:
    """All of its steps on small layers, with times of stand-ins: rows of every form, and why one is missing."""
    import parallel_tables

    record = found[0]["record"]
    assert [row["rows"] for row in record["dense"]] == [2, 5] * 3 and [x["differing"] for x in record["replays"]] == [0]
    assert "expected 16-bit floats on a GPU" in record["failed"]["peer"]
    # a tenth of a microsecond, and the one GPU's time over it
    row = "| small | w4a16 | 5 | 10.0 | 11.0 (0.91 ×) |  |  |  |  |  | 12.0 (0.83 ×) | 13.0 |  |  |  |"
    assert row in parallel_tables.dense(record)
    assert "| small | 5 | 10.0 → 10.0 (1.00 ×) | 11.0 → 11.0 (1.00 ×) |" in parallel_tables.parts(record)
    assert "| small | 3 | 10.0 | 11.0 (0.91 ×) | 15.0 (0.67 ×) |" in parallel_tables.experts(record)
    peers = [row | {"us": {"peer": 5.0, "pushed_all_reduce": 2.0}} for row in record["dense"]]
    rows = parallel_tables.dense(record | {"peer": peers})
    assert "| 5.0 (2.00 ×) |  |  |  | 12.0 (0.83 ×) | 13.0 |  | 2.0 |  |" in rows


def test_what_an_exchange_refuses() -> None:
    with pytest.raises(OperandError, match="rows of an exchange: got 'fp8'"):
        ExpertParallel(every_expert(), rows="fp8")
    with pytest.raises(OperandError, match=r"sums by peers: got torch\.bfloat16 on cpu"):
        PeerSums(64, device="cpu")

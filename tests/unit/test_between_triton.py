"""The Triton kernels of ``benchmarks/generate.py``, run by Triton's interpreter: what torch's operations give."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GROUP, KV, SIZE, LENGTH = 3, 2, 32, 200
EPS = 1e-5


def near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether bf16 results are the same but for sums' order, and for the interpreter's rounding, which cuts off."""
    return float((x.double() - y.double()).norm()) < 0.03 * float(y.double().norm())


def interpreted() -> None:
    """Triton interprets kernels in this process, which has not imported it yet. Its interpreter multiplies the bits of
    matrices in bf16: their values here."""
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def of_values(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32) for x in (a, b)]
        return dot(builder, *(interpreter.TensorHandle(x, tl.float32) for x in wide), *rest)

    interpreter.InterpreterBuilder.create_dot = of_values


def compare(rank: int) -> None:
    """What the test below asserts, in a process of its own."""
    interpreted()
    sys.path.insert(0, str(BENCHMARKS))
    import between_triton
    from between_torch import add_norm, attention, rotate

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    heads = (GROUP + 2) * KV
    rates = 1e4 ** -(torch.arange(0, SIZE, 2) / SIZE)
    weights, cases = 1 + 0.1 * drawn(heads, SIZE), ((1, 1, 130), (2, 1, 0), (33, 1, 199), (2, 21, None))
    for norms, given in ((None, cases[:1] + cases[3:]), (weights, cases)):
        for batch, tokens, position in given:
            x, cache = drawn(batch, tokens, heads, SIZE), drawn(batch, 2 * KV, LENGTH, SIZE)
            at = None if position is None else torch.tensor([position])
            angles = (torch.arange(tokens) if at is None else at)[:, None, None] * rates
            turn, mine = (angles.cos(), angles.sin()), cache.clone()
            want = attention(rotate(x, *turn, KV, norms), cache, at)
            splits = between_triton.splits_of(batch * KV, LENGTH)
            counters = between_triton.scratch(batch * KV, splits, GROUP, SIZE, x.device).counter
            # a launch leaves its counters as it found them; the second of one CTA for a group would use none
            for _ in range(1 if splits == 1 else 2):
                got = between_triton.attention(x, turn, norms, mine, at, EPS)
                assert near(got, want), (batch, tokens, norms is None)
                assert near(mine, cache) and not counters.any()
            assert not near(got, want.roll(1, -1))
    assert [between_triton.splits_of(batch * KV, LENGTH) for batch in (1, 33)] == [4, 1]
    x, residual, weight = drawn(3, 100), drawn(3, 100), drawn(100)
    for got, want in zip(between_triton.add_norm(x, residual, weight, EPS), add_norm(x, residual, weight)):
        assert near(got, want) and not near(got, want.roll(1, 0))
    compare_one_token(drawn)


def compare_one_token(drawn: Any) -> None:
    """Sums of experts' rows with their norm, and a norm with a router's choice: of equal logits the lower expert."""
    import between_triton
    from between_torch import add_norm
    from slots import Slots

    residual, weight, rows = drawn(1, 1, 100), drawn(100), drawn(6, 100)
    for slots in (Slots(rows, None), Slots(rows, torch.rand(6))):
        got, want = (f(slots, residual, weight) for f in (lambda *x: between_triton.add_norm(*x, EPS), add_norm))
        assert all(near(x, y) and not near(x, y.roll(1)) and x.shape == y.shape for x, y in zip(got, want))
    router = drawn(64, 100)
    router[40] = router[3]
    for _ in range(3):
        x = drawn(1, 1, 100)
        *sums, ids, weights = between_triton.norm_route(x, residual, weight, router, 6, EPS)
        total, normed = add_norm(x, residual, weight)
        assert near(sums[0], total) and near(sums[1], normed)
        logits = (sums[1].float().view(1, -1) @ router.float().T).bfloat16()
        want = logits.float().softmax(-1).gather(1, ids.long())
        assert len({*ids[0].tolist()}) == 6 and near(weights, want / want.sum())
        # the interpreter cuts off where torch rounds: neighbours may change places
        assert (logits.gather(1, ids.long()).float() >= 0.97 * logits.float().topk(6).values[:, -1:] - 0.01).all()
    ids, weights = between_triton.norm_route(x, residual, weight * 0, router, 6, EPS)[2:]
    assert ids[0].tolist() == [0, 1, 2, 3, 4, 5] and near(weights, torch.full((1, 6), 1 / 6))


def test_kernels_give_what_torch_gives() -> None:
    """With four CTAs for a group of heads, and with one: a batch of 33."""
    ranks(compare, count=1, seconds=300)


def compile_all(rank: int) -> None:
    """Compiles each kernel, with and without norms, for a GPU that need not be there."""
    sys.path.insert(0, str(BENCHMARKS))
    import between_triton as module
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(("heads", "weight", "cache", "out", "x", "residual", "total"), "*bf16")
    types |= dict.fromkeys(("rows", "router"), "*bf16") | dict.fromkeys(("counter", "ids"), "*i32")
    types |= dict.fromkeys(("cosine", "sine", "partial", "stats", "weights", "logits"), "*fp32") | {"position": "*i64"}
    types |= {"scale": "fp32"} | dict.fromkeys(("length", "tokens", "columns"), "i32")
    sizes = {
        "kv": 4,
        "size": 64,
        "block": 64,
        "group": 8,
        "lines": 8,
        "rows": 16,
        "splits": 4,
        "each": 8,
        "queries": 32,
        "top": 6,
        "experts": 128,
    }
    kernels = [module.attend_kernel, module.turn_kernel, module.add_norm_kernel]
    kernels += [module.slots_add_norm_kernel, module.norm_route_kernel]
    for kernel, norm in [(kernel, norm) for kernel in kernels for norm in (False, True)]:
        given = sizes | {"norm": norm, "weighted": norm, "eps": EPS}
        # `rows` is a number of one kernel, and an address of another
        given = {
            n: x for n, x in given.items() if n in kernel.arg_names and (n != "rows" or "partial" in kernel.arg_names)
        }
        signature = {n: "constexpr" if n in given else types[n] for n in kernel.arg_names}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): x for n, x in given.items()})
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_kernels_compile_for_hopper() -> None:
    """Also where there is no GPU: the interpreter takes types that the compiler refuses."""
    ranks(compile_all, count=1, seconds=300)

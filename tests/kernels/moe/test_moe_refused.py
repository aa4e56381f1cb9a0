"""moe's operator of torch, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from support.moe_problems import Layer, Problem
from support.roads import Roads

from cute_nvfp4 import moe, prepare_experts, quantize, simulating
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.ops.moe.layer import MOE

pytestmark = pytest.mark.kernels

SMALL = Problem(Layer(3, 2, 4, 32, 32))
BIASED = Problem(Layer(3, 2, 4, 32, 32, "mxfp4", "clamped_swiglu", biases=True, interleaved=True, quantized=True))
X, IDS, WEIGHTS, EXPERTS = SMALL.x, SMALL.ids, SMALL.topk_weights, SMALL.experts


@pytest.mark.sim_only("of CPU tensors")
@pytest.mark.parametrize("problem", [SMALL, BIASED], ids=["prepared", "block-scaled"])
def test_operator(problem: Problem) -> None:
    """opcheck, the operator's results and those of its out variant, and a graph without breaks."""
    given = problem.x, problem.ids, problem.topk_weights, problem.experts
    operator, request = torch.ops.cute_nvfp4.moe, MOE.request(*given, 0, problem.x.flip(0), True, None, "reference")
    flat = MOE.operator(request).adapted(request)
    names = [x.name for x in operator.default._schema.arguments]
    tensors = [getattr(flat, name) for name in names[:15]]
    options = {name: getattr(flat, name) for name in names[15:] if getattr(flat, name) is not None}
    torch.library.opcheck(operator.default, tensors, options)
    torch.library.opcheck(operator.out, tensors, options | {"out": torch.empty_like(problem.x)})
    want = moe(*given, shared=problem.x.flip(0), backend="reference")
    assert torch.equal(operator.default(*tensors, **options), want)
    out = torch.empty_like(want)
    operator.out(*tensors, **options, out=out)
    assert torch.equal(out, want)
    compiled = torch.compile(lambda x: moe(x, *given[1:], backend="reference"), backend="eager", fullgraph=True)
    assert torch.equal(compiled(problem.x), moe(*given, backend="reference"))


G, D = SMALL.gate_up, SMALL.down
LISTED = [quantize(torch.ones(32, 32) * scale) for scale in (1.0, 2.0)]
BAD = (
    (lambda: moe(X, IDS, WEIGHTS, SMALL), OperandTypeError, "experts: got Problem"),
    (lambda: moe(X.float(), IDS, WEIGHTS, EXPERTS), OperandTypeError, "dtype of x: got torch.float32"),
    (lambda: moe(X[:, :16], IDS, WEIGHTS, EXPERTS), OperandError, "shape of x"),
    (lambda: moe(X[:0], IDS[:0], WEIGHTS[:0], EXPERTS), OperandError, "shape of x"),
    (lambda: moe(X, IDS.short(), WEIGHTS, EXPERTS), OperandTypeError, "dtype of topk_ids"),
    (lambda: moe(X, IDS[:2], WEIGHTS, EXPERTS), OperandError, "shapes of topk_ids and topk_weights"),
    (lambda: moe(X, IDS, WEIGHTS[:, :1], EXPERTS), OperandError, "shapes of topk_ids and topk_weights"),
    (lambda: moe(X, IDS, WEIGHTS.double(), EXPERTS), OperandTypeError, "dtype of topk_weights"),
    (
        lambda: moe(X, IDS, WEIGHTS, EXPERTS, shared=X[:1]),
        OperandError,
        r"shape of shared: got \(1, 32\), expected \(3, 32\)",
    ),
    (lambda: moe(X, IDS, WEIGHTS, EXPERTS, deterministic=1), OperandTypeError, "deterministic: got int"),
    (lambda: moe(X, IDS, WEIGHTS, EXPERTS, offset=-1), OperandError, "offset: got -1"),
    (lambda: moe(X, IDS, WEIGHTS, EXPERTS, offset=True), OperandTypeError, "offset: got bool"),
    (lambda: moe(X, IDS, WEIGHTS, EXPERTS, out=X), OperandError, "overlap x"),
    (lambda: moe(X, IDS, WEIGHTS, EXPERTS, out=torch.empty(32, 3).bfloat16().t()), OperandError, "stride of out"),
    (lambda: moe(X, IDS, WEIGHTS, EXPERTS, out=torch.empty(3, 32)), OperandTypeError, "out_dtype"),
    (lambda: moe(X.clone().requires_grad_(), IDS, WEIGHTS, EXPERTS), OperandError, "x: got a tensor that requires"),
    (lambda: moe(X, IDS, WEIGHTS, BIASED.experts, backend="sim"), OperandError, "expected prepared ones on sm90"),
    (lambda: prepare_experts(G, D, activation="gelu"), OperandError, "activation of experts"),
    (lambda: prepare_experts(G, D, activation="relu2"), OperandError, "shapes of gate_up and down"),
    (lambda: prepare_experts(D, G), OperandError, "shapes of gate_up and down"),
    (lambda: prepare_experts(G, D, dtype=torch.float32), OperandTypeError, "dtype of experts"),
    (
        lambda: prepare_experts(G, D, gate_up_bias=torch.ones(4, 32)),
        OperandError,
        r"shape of gate_up_bias: got \(4, 32\), expected \(4, 64\)",
    ),
    (lambda: prepare_experts(G, D, limit=0.0, activation="clamped_swiglu"), OperandError, "limit of an activation"),
    (
        lambda: prepare_experts([LISTED], LISTED[:1], activation="clamped_swiglu"),
        OperandError,
        r"global scales of gate and up of gate_up\[0\]",
    ),
    (lambda: prepare_experts([LISTED, LISTED[:1]], [D]), OperandError, r"gate_up\[1\]"),
    (lambda: prepare_experts(3, D), OperandTypeError, "gate_up: got int"),
    (lambda: prepare_experts(quantize(torch.ones(32, 32)), D), OperandError, "a stack"),
    (lambda: prepare_experts(quantize(torch.ones(4, 64, 32), "mxfp8"), D), OperandError, "format of gate_up"),
    (lambda: prepare_experts(G, quantize(torch.ones(4, 32, 32), "mxfp4")), OperandError, "formats of gate_up and down"),
)


@pytest.fixture(scope="module")
def roads() -> Roads:
    with simulating("sm_90a"):
        return Roads(MOE.calls, [lambda: moe(X, IDS, WEIGHTS, EXPERTS)])


@pytest.mark.sim_only("refuses CPU tensors")
@pytest.mark.parametrize("call, error, message", BAD, ids=[f"{i} {message}" for i, (_, _, message) in enumerate(BAD)])
def test_refused(call: Any, error: type[Exception], message: str, roads: Roads) -> None:
    """On both roads, in the same words."""
    with simulating("sm_90a"):
        assert re.search(message, roads.refused(call))
        with pytest.raises(error):
            call()


@pytest.mark.sim_only("asks for another architecture")
def test_block_scaled_only_where_it_runs() -> None:
    """Weights that are not prepared are refused where no kernel takes them, in words that say what to do."""
    experts = Problem(dataclasses.replace(SMALL.layer, quantized=True)).experts
    with simulating("sm_90a"), pytest.raises(OperandError, match=r"dtype=torch.bfloat16\) makes experts for it"):
        moe(X, IDS, WEIGHTS, experts)

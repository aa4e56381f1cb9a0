"""route in the simulator and on a GPU: choices of torch's stable sort, weights beside float64, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import backends
from support.mutants import Mutant, Source, at, drop, instead, is_noticed, operand, outcome
from support.roads import Roads

from cute_nvfp4 import moe, prepare_experts, quantize, route, simulating
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.kernels.moe import route as kernel
from cute_nvfp4.kernels.moe.config import SCORINGS
from cute_nvfp4.ops.moe.route import ROUTE, Routes
from cute_nvfp4.sim import adversarial

pytestmark = pytest.mark.kernels
ARCHS = ("sm_90a", "sm_100a", "sm_120a")
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative distances of weights from float64: a sum of 1024 terms and an approximated exponential, or one rounding."""


def logits_of(tokens: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits on the device: without a bias as they come, so that some are equal in 16 bits."""
    generator = torch.Generator().manual_seed(tokens * experts)
    return (torch.randn(tokens, experts, generator=generator) * 4).to(dtype).to(backends.device())


def right(logits: torch.Tensor, found: Routes, top: int, **options: Any) -> bool:
    """Whether ids are those of a stable sort and weights close to float64."""
    exact = route(logits, top, **options | {"dtype": torch.float32, "ids_dtype": torch.int64}, backend="reference")
    if not torch.equal(found.topk_ids.long(), exact.topk_ids):
        return False
    return torch.allclose(found.topk_weights.float(), exact.topk_weights, rtol=CLOSE[found.topk_weights.dtype], atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS, indirect=True)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(
    "tokens, experts, top", [(1, 128, 8), (5, 128, 8), (3, 60, 4), (9, 8, 2), (2, 1024, 32), (4, 1, 1)]
)
def test_choices(
    tokens: int, experts: int, top: int, dtype: torch.dtype, renormalize: bool, scoring: str, arch: str, poisoned: None
) -> None:
    logits = logits_of(tokens, experts, dtype)
    options = {"scoring": scoring, "renormalize": renormalize, "scale": 2.5}
    found = route(logits, top, **options, backend=backends.backend())
    assert (found.topk_ids.dtype, found.topk_weights.dtype) == (torch.int32, torch.float32)
    assert right(logits, found, top, **options)
    assert all(x.equal(y) for x, y in zip(route(logits, top, **options, backend=backends.backend()), found))


@pytest.mark.parametrize("arch", ARCHS, indirect=True)
def test_of_equal_logits_the_lower_expert(arch: str, poisoned: None) -> None:
    """Also of both zeros; −∞ is chosen last, NaN first, and ids are experts in any case."""
    nan, inf = float("nan"), float("inf")
    rows = [[0.0] * 40, [-inf] * 40, [nan] * 40, [-0.0, 0.0] * 20, [1.0] * 35 + [2.0] * 5, [-inf] * 39 + [-1e38]]
    rows += [[-nan if i == 37 else float(i) for i in range(40)]]
    logits = torch.tensor(rows).to(backends.device())
    ids, weights = route(logits, 6, backend=backends.backend())
    assert ids.tolist() == [
        [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5],
        [35, 36, 37, 38, 39, 0], [39, 0, 1, 2, 3, 4], [37, 39, 38, 36, 35, 34],
    ]  # fmt: skip
    assert weights[5].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert weights[[1, 2, 6]].isnan().all() and torch.allclose(
        weights[[0, 3]], torch.full((2, 6), 1 / 6, device=weights.device)
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"], indirect=True)
def test_correction(arch: str, poisoned: None) -> None:
    """It chooses, and is in no weight: DeepSeek's, with one group of experts."""
    logits = logits_of(7, 256, torch.float32)
    correction = torch.linspace(-1, 1, 256).to(backends.device())
    options = {"scoring": "sigmoid", "correction": correction, "scale": 2.5}
    found = route(logits, 8, **options, backend=backends.backend())
    assert right(logits, found, 8, **options)
    assert not right(logits, route(logits, 8, scoring="sigmoid", backend=backends.backend()), 8, **options)
    torch.testing.assert_close(found.topk_weights.sum(-1), torch.full_like(found.topk_weights[:, 0], 2.5))


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
def test_rows_and_outputs_of_the_caller(arch: str, poisoned: None) -> None:
    """Rows apart, dtypes that were asked for, outputs, and a prepared call."""
    wide = logits_of(6, 80, torch.bfloat16)
    logits = wide[:, 7:47]
    out = Routes(torch.empty(6, 3, dtype=torch.int64), torch.empty(6, 3, dtype=torch.float16))
    out = Routes(*(x.to(backends.device()) for x in out))
    assert route(logits, 3, out=tuple(out), backend=backends.backend()) == out
    assert right(logits, out, 3)
    found = route(logits, 3, dtype=torch.bfloat16, ids_dtype=torch.int64, backend=backends.backend())
    assert (found.topk_ids.dtype, found.topk_weights.dtype) == (torch.int64, torch.bfloat16)
    assert right(logits, found, 3)


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
def test_before_moe(arch: str, poisoned: None) -> None:
    gate_up, down = (quantize(torch.randn(4, n, 32, device=backends.device()), backend="reference") for n in (64, 32))
    experts = prepare_experts(gate_up, down)
    x, logits = torch.randn(3, 32, device=backends.device()).bfloat16(), logits_of(3, 4, torch.bfloat16)
    y = moe(x, *route(logits, 2, backend=backends.backend()), experts, backend=backends.backend())
    exact = moe(x, *route(logits, 2, backend="reference"), experts, backend="reference")
    torch.testing.assert_close(y, exact, rtol=0.02, atol=0.02)


@pytest.mark.sim_only("runs schedules")
@pytest.mark.parametrize("index", range(20))
def test_any_schedule_gives_the_same_bits(index: int) -> None:
    logits = logits_of(5, 70, torch.bfloat16)
    with simulating("sm_90a"):
        want = route(logits, 4)
    with simulating("sm_90a", schedule=adversarial(20)[index], checks=True):
        assert all(x.equal(y) for x, y in zip(route(logits, 4), want))


MUTANTS = (
    Mutant("of equal logits the higher expert", Source(kernel.Choice, "or_better", lambda a, b: _not_less(a, b))),
    Mutant("an expert chosen twice", Source(kernel, "NO_KEY", 0xFFFFFFFE)),
    Mutant("zeros told apart", at("add.rn.f32", instead("mov.f32 {0}, {1};"), slice(0, 1))),
    Mutant("NaN like a number", Source(kernel, "NAN_KEY", 1)),
    Mutant("weights not divided", at("div.rn.f32", instead("mov.f32 {0}, {1};"))),
    Mutant("another lane's logit", at("shfl.sync.idx", operand(2, "0"))),
    Mutant("half of the sum", at("shfl.sync.bfly", operand(2, "0"), slice(0, 1))),
    Mutant("ids that nobody writes", at("st.global", drop(), slice(0, 1)), noticed=""),
)


def _not_less(a: kernel.Choice, b: kernel.Choice) -> kernel.Choice:
    more = b.key >= a.key
    return kernel.Choice(*(kernel.cutlass.select_(more, theirs, own) for own, theirs in zip(a, b)))


def _hard() -> tuple[torch.Tensor, Routes]:
    rows = [
        [float(i * 7 % 40) for i in range(40)],
        [-0.0, 0.0] * 20,
        [float("nan") if i == 37 else 0.0 for i in range(40)],
    ]
    return torch.tensor(rows), Routes(torch.full((3, 6), 99, dtype=torch.int32), torch.full((3, 6), 9.0))


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_noticed(mutant: Mutant) -> None:
    def run() -> bool:
        logits, out = _hard()
        route(logits, 6, out=out)
        exact = route(logits, 6, backend="reference")
        close = torch.allclose(out.topk_weights, exact.topk_weights, rtol=1e-5, equal_nan=True)
        return torch.equal(out.topk_ids, exact.topk_ids) and close

    assert outcome(None, run, "sm_90a") == ""
    assert is_noticed(outcome(mutant.change, run, "sm_90a", "moe_route"), mutant)


@pytest.mark.sim_only("of CPU tensors")
def test_compiled() -> None:
    other = logits_of(3, 9, torch.float32)
    compiled = torch.compile(lambda x: route(x, 2, backend="reference"), backend="eager", fullgraph=True)
    assert all(x.equal(y) for x, y in zip(compiled(other), route(other, 2, backend="reference")))


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
IDS, WEIGHTS, BIAS = torch.empty(3, 2, dtype=torch.int32), torch.empty(3, 2), torch.zeros(8)
BAD = (
    (lambda: route([1.0], 2), OperandTypeError, "logits: got list"),
    (lambda: route(X.double(), 2), OperandTypeError, "dtype of logits: got torch.float64"),
    (lambda: route(X[0], 2), OperandError, "shape of logits"),
    (lambda: route(X[:0], 2), OperandError, "shape of logits"),
    (lambda: route(torch.zeros(1, 1025), 2), OperandError, "expected .*up to 1024"),
    (lambda: route(X.t().contiguous().t(), 2), OperandError, "strides of logits"),
    (lambda: route(X, 0), OperandError, "top_k: got 0, expected 1 to 8"),
    (lambda: route(X, 9), OperandError, "top_k: got 9, expected 1 to 8"),
    (lambda: route(torch.zeros(1, 64), 33), OperandError, "top_k: got 33, expected 1 to 32"),
    (lambda: route(X, 2.0), OperandTypeError, "top_k: got float"),
    (lambda: route(X, True), OperandTypeError, "top_k: got bool"),
    (lambda: route(X, 2, scoring="relu"), OperandError, "scoring: got 'relu'"),
    (lambda: route(X, 2, renormalize=1), OperandTypeError, "renormalize: got int"),
    (lambda: route(X, 2, scale="x"), OperandTypeError, "scale: got str"),
    (lambda: route(X, 2, dtype=torch.float64), OperandTypeError, "dtype of topk_weights: got torch.float64"),
    (lambda: route(X, 2, ids_dtype=torch.int16), OperandTypeError, "dtype of topk_ids: got torch.int16"),
    (lambda: route(X, 2, correction=BIAS), OperandError, "correction: got one with scoring 'softmax'"),
    (lambda: route(X, 2, scoring="sigmoid", correction=BIAS[:3]), OperandError, "shape of correction"),
    (lambda: route(X, 2, scoring="sigmoid", correction=BIAS.half()), OperandTypeError, "dtype of correction"),
    (lambda: route(X, 2, out=3), OperandTypeError, "out: got int"),
    (lambda: route(X, 2, out=(IDS, WEIGHTS.double())), OperandTypeError, "dtype of topk_weights"),
    (lambda: route(X, 2, dtype=torch.float16, out=(IDS, WEIGHTS)), OperandTypeError, "torch.float16, as asked for"),
    (lambda: route(X, 2, out=(IDS[:2], WEIGHTS)), OperandError, "out.topk_ids: got"),
    (lambda: route(X, 2, out=(IDS, IDS.view(torch.float32))), OperandError, "overlap out.topk_ids"),
    (lambda: route(X, 2, out=(IDS, X.view(-1)[:6].view(3, 2))), OperandError, "overlap logits"),
    (lambda: route(X.clone().requires_grad_(), 2), OperandError, "logits: got a tensor that requires"),
)


@pytest.fixture(scope="module")
def roads() -> Roads:
    with simulating("sm_90a"):
        good = [lambda: route(X, 2), lambda: route(X, 2, out=(IDS, WEIGHTS))]
        return Roads(ROUTE.calls, [*good, lambda: route(X, 2, scoring="sigmoid", correction=BIAS)])


@pytest.mark.sim_only("refuses CPU tensors")
@pytest.mark.parametrize("call, error, message", BAD, ids=[f"{i} {message}" for i, (_, _, message) in enumerate(BAD)])
def test_refused(call: Any, error: type[Exception], message: str, roads: Roads) -> None:
    """On both roads, in the same words."""
    with simulating("sm_90a"):
        with pytest.raises(error, match=message):
            call()
        roads.refused(call)

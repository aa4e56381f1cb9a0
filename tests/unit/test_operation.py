"""An operation of a test's own: one declaration, and every road of an operation; and how many files a call visits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.mutants import plan_anew

import cute_nvfp4 as nv
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.kernels.probe import ProbeArguments, ProbeConfig, host
from cute_nvfp4.ops import fused
from cute_nvfp4.ops import quantize as quantize_module
from cute_nvfp4.ops.arguments import TENSOR
from cute_nvfp4.ops.checks import checked_output, reads
from cute_nvfp4.ops.operation import OPERATIONS, PREPARED, Operation
from cute_nvfp4.ops.operator import Operator
from cute_nvfp4.ops.planned import PlannedCall
from cute_nvfp4.ops.quantize_request import checked_request
from cute_nvfp4.runtime.kernel import Kernel
from cute_nvfp4.runtime.launch import SimLauncher
from cute_nvfp4.target import Target

# --- what one file of ``ops`` holds


def odd(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """2 x + 1 of contiguous float32 x."""
    return ODD.call(x, out, backend)


def _check(r: Any) -> torch.Tensor:
    if not isinstance(r.x, torch.Tensor) or r.x.dtype is not torch.float32:
        raise OperandTypeError.of("x", got=type(r.x).__name__, expected="torch.Tensor of torch.float32")
    if not r.x.is_contiguous():
        raise OperandError.of("strides of x", got=r.x.stride(), expected="contiguous")
    return checked_output(reads(r), r.x.device, tuple(r.x.shape), r.out, torch.float32)


def _plan(r: Any, target: Target) -> PlannedCall:
    return ODD.planned(KERNEL, ProbeConfig(target.arch), target, ProbeArguments("x", "out", r.x.numel()), r)


KERNEL = Kernel("odd", ProbeArguments, lambda config: host)
ODD = Operation(
    odd,
    {"x": TENSOR},
    check=_check,
    reference=lambda r: r.x * 2.0 + 1.0,
    plan=_plan,
    vary=("x", "out"),
    preparable=True,
)

# --- the line of the table of ``library``

TABLE = {"odd": Operator("odd", ODD, 'Tensor x, *, str backend="auto"')}
TABLE["odd"].serve()


# importing this file must not change what other tests find
KNOWN = [(registry, registry.pop(odd)) for registry in (OPERATIONS, PREPARED)]


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    """``odd`` is an operation like the others while its tests run."""
    for registry, entry in KNOWN:
        registry[odd] = entry
    yield
    for registry, _ in KNOWN:
        registry.pop(odd)


X = torch.arange(12.0).view(3, 4)
WANT = X * 2 + 1


@pytest.mark.parametrize("backend", ["sim", "reference"])
def test_numbers(backend: str) -> None:
    assert odd(X, backend=backend).equal(WANT)
    out = torch.zeros(3, 4)
    assert odd(X, out=out, backend=backend) is out and out.equal(WANT)
    other = X.flip(0).contiguous()
    assert odd(other, backend=backend).equal(other * 2 + 1)


def test_the_same_kind_is_planned_once() -> None:
    ODD.calls.clear()
    with nv.simulating() as runs:
        odd(X), odd(X + 1)
        assert len(ODD.calls) == 1 and len(runs) == 2
        odd(torch.zeros(5))
        assert len(ODD.calls) == 2


def test_a_tensor_that_may_be_left_out_has_a_key() -> None:
    def scaled(x, weight=None, out=None, backend="auto"): ...

    def never(*given): ...

    made = Operation(scaled, {"x": TENSOR, "weight": TENSOR}, check=never, reference=never, plan=never)
    OPERATIONS.pop(scaled)
    left_out = made.key(X, None, None, "auto")
    assert left_out == made.key(X + 1, None, None, "auto") != made.key(X, X, None, "auto")


def test_mutants_are_planned_anew() -> None:
    """Within it no call is found that was planned before, and afterwards none that was planned within it."""
    ODD.calls.clear()
    odd(X, backend="sim")
    (planned,) = ODD.calls.values()
    with pytest.MonkeyPatch.context() as patch:
        plan_anew(patch)
        assert not ODD.calls
        odd(X, backend="sim")
        odd(torch.zeros(5), backend="sim")
        assert len(ODD.calls) == 2 and planned not in ODD.calls.values()
    assert list(ODD.calls.values()) == [planned]


@pytest.mark.parametrize("backend", ["sim", "reference"])
def test_overlap_is_refused_by_both_roads(backend: str) -> None:
    room = torch.arange(24.0)
    odd(room[:12], out=torch.zeros(12), backend=backend)
    for _ in range(2):
        with pytest.raises(OperandError, match="overlap x at"):
            odd(room[:12], out=room[8:20], backend=backend)
        ODD.calls.clear()


def test_bad_input() -> None:
    for bad, message in ((None, "x: got NoneType"), (X.double(), "torch.float32"), (X.t(), "strides of x")):
        with pytest.raises((OperandError, OperandTypeError), match=message):
            odd(bad, backend="sim")


def test_prepared() -> None:
    with nv.simulating():
        run = nv.prepare(odd, X, vary=("x",))
        assert run(X + 1).equal(X * 2 + 3) and run(X).equal(WANT)


def test_operator() -> None:
    operator = torch.ops.cute_nvfp4.odd
    torch.library.opcheck(operator.default, (X,), {"backend": "reference"})
    torch.library.opcheck(operator.out, (X,), {"out": torch.zeros(3, 4)})
    assert operator(X, backend="sim").equal(WANT)
    graph = torch.export.export(_Odd(), (X,))
    assert operator.default in [node.target for node in graph.graph.nodes] and graph.module()(X).equal(WANT)
    with pytest.raises(OperandError, match="x: got a tensor that requires a gradient"):
        odd(X.clone().requires_grad_(), backend="sim")


class _Odd(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return odd(x)


# --- how far it is to a launch

ROOT = f"{Path(nv.__file__).parent}/"
MOST = 12


def visited(call: Callable[[], object]) -> set[str]:
    """The files of the package of which ``call`` runs a function, until a launcher is called; that one's included."""
    found: set[str] = set()
    running = True

    def note(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if running and event == "call" and path.startswith(ROOT):
            found.add(path.removeprefix(ROOT))

    def launched(self: SimLauncher, *given: Any) -> None:
        nonlocal running
        running = False

    with mock.patch.object(SimLauncher, "__call__", launched):
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(before)
    assert not running, "nothing was launched"
    return {*found, "runtime/launch.py"}


def _calls() -> dict[str, tuple[str, Callable[[], object]]]:
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    a = nv.quantize(x, backend="reference")
    weight = nv.prepare_weight(a, backend="reference")
    out, product = nv.quantize(x, backend="reference"), torch.empty(16, 16, dtype=torch.bfloat16)
    return {
        "gemm(a, b)": ("sm_100a", lambda given: nv.gemm(a, a, out=product if given else None)),
        "gemm(x, weight)": ("sm_90a", lambda given: nv.gemm(x.bfloat16(), weight, out=product if given else None)),
        "quantize(x)": ("sm_100a", lambda given: nv.quantize(x, out=out if given else None)),
    }


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("name", ["gemm(a, b)", "gemm(x, weight)", "quantize(x)"])
def test_a_call_visits_few_files(name: str, given: bool) -> None:
    """From the public function to the launcher, both included, a planned call runs functions of at most twelve files.

    That is what every call but the first of a kind does, and what a profiler shows. The nouns that it asks
    (``operand``, ``formats``) count. A first call visits the checks, the planning and the compiler besides: of it only
    the files of ``ops`` are held to twelve; what a trace records is not on this road, and generated code is in no file.
    """
    arch, call = _calls()[name]
    with nv.simulating(arch):
        first = visited(lambda: call(given))
        planned = visited(lambda: call(given))
    assert len(planned) <= MOST, sorted(planned)
    own = [x for x in first if x.startswith("ops/")]
    assert len(own) <= MOST, sorted(own)


def test_a_long_road_is_noticed() -> None:
    x = nv.quantize(torch.zeros(16, 64), backend="reference")

    def roundabout() -> None:
        nv.to_blocked(torch.zeros(4, 4, dtype=torch.uint8)), nv.dequantize(x, backend="reference"), nv.gemv(x, x)

    with nv.simulating():
        nv.gemv(x, x)
        assert len(visited(roundabout)) > len(visited(lambda: nv.gemv(x, x)))


# --- what a first call asks


def _described(call: Callable[[], object]) -> int:
    """How often ``call`` checks what is to be quantized, and how."""
    with mock.patch.object(fused, "checked_request", wraps=checked_request) as of_fused:
        with mock.patch.object(quantize_module, "checked_request", wraps=checked_request) as of_quantize:
            call()
    return of_fused.call_count + of_quantize.call_count


@pytest.mark.parametrize("name", ["quantize", "rmsnorm_quantize", "silu_mul_quantize"])
def test_a_first_call_describes_its_request_once(name: str) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    call = {
        "quantize": lambda: nv.quantize(x),
        "rmsnorm_quantize": lambda: nv.rmsnorm_quantize(x, None, global_scale=1.0),
        "silu_mul_quantize": lambda: nv.silu_mul_quantize(x, x, global_scale=1.0),
    }[name]
    with nv.simulating():
        OPERATIONS[getattr(nv, name)].calls.clear()
        assert (_described(call), _described(call)) == (1, 0)


def test_a_simulated_launch_prints_as_a_line() -> None:
    """What is counted is in it, and neither the PTX nor a dictionary of opcodes."""
    a, b = nv.quantize(torch.ones(128, 256)), nv.quantize(torch.ones(1, 256))
    # the tables of test_pages.py leave plans that launch nothing
    OPERATIONS[nv.gemv].calls.clear()
    with nv.simulating("sm_90a", counters=True) as runs:
        nv.gemv(a, b)
    text, result = str(runs), runs[0].result
    assert text.startswith("[<gemv, grid (") and f"{result.instructions:,} warp instructions" in text
    assert "sectors a load request" in text and "opcodes" not in text and len(text.splitlines()) == 1

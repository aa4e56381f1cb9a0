"""Launches on a GPU: what a warm call allocates and waits for, and calls within CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import cute_nvfp4 as nv
from cute_nvfp4 import BlockScaledTensor
from cute_nvfp4.errors import CompileError
from cute_nvfp4.ops.gemv import GEMV
from cute_nvfp4.ops.quantize import QUANTIZE

pytestmark = pytest.mark.gpu

M, K = 512, 1024


class Tensors:
    """Operands and outputs on the GPU, always the same."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16().cuda()

        self.weight, self.vector, self.other = (nv.quantize(random(rows, K)) for rows in (M, 1, 1))
        self.y = torch.empty(M, device="cuda", dtype=torch.bfloat16)
        self.x, self.new = random(16, K), random(16, K)
        self.out = nv.quantize(self.x)
        self.scale = self.out.global_scale.clone()


@pytest.fixture
def given() -> Tensors:
    return Tensors()


def calls(t: Tensors) -> dict[str, tuple[Callable[[], object], int]]:
    """Calls, and how many allocations each may make."""
    vary = nv.prepare(nv.gemv, t.weight, t.vector, out=t.y, vary=("b", "out"))
    codes = nv.prepare(nv.quantize, t.x, global_scale=t.out.global_scale, out=t.out, vary=("x",))
    return {
        "gemv out=": (lambda: nv.gemv(t.weight, t.vector, out=t.y), 0),
        "gemv": (lambda: nv.gemv(t.weight, t.vector), 1),
        "quantize out=, scale given": (lambda: nv.quantize(t.x, global_scale=t.out.global_scale, out=t.out), 0),
        "quantize, scale given": (lambda: nv.quantize(t.x, global_scale=t.scale), 2),
        "gemv prepared": (nv.prepare(nv.gemv, t.weight, t.vector, out=t.y), 0),
        "gemv prepared, b and out vary": (lambda: vary(t.other, t.y), 0),
        "quantize prepared, x varies": (lambda: codes(t.x), 0),
    }


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within this block a wait for the device raises an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_warm_call_allocates_its_result_and_waits_for_nothing(given: Tensors) -> None:
    for name, (call, allocations) in calls(given).items():
        kept = [call()]
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_waiting():
            kept.append(call())
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == allocations, name
    # a kernel computes the scale: the host waits for nothing
    nv.quantize(given.x, out=given.out)
    with no_waiting():
        nv.quantize(given.x, out=given.out)


def captured(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of ``call``, captured after a warm call, and what ``call`` returned in the capture."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def codes_of(x: BlockScaledTensor) -> list[torch.Tensor]:
    return [y.clone() for y in (x.data, x.scale, x.global_scale)]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, want))


def replayed(graph: torch.cuda.CUDAGraph) -> None:
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["out", "new", "prepared", "prepared, b varies"])
def test_gemv_in_a_graph(given: Tensors, kind: str) -> None:
    t = given
    vary = nv.prepare(nv.gemv, t.weight, t.other, out=t.y, vary=("b",))
    run: Callable[[], object] = {
        "out": lambda: nv.gemv(t.weight, t.vector, out=t.y),
        "new": lambda: nv.gemv(t.weight, t.vector, out_dtype=torch.bfloat16),
        "prepared": nv.prepare(nv.gemv, t.weight, t.vector, out=t.y),
        "prepared, b varies": lambda: vary(t.vector),
    }[kind]
    graph, result = captured(run)
    before = nv.gemv(t.weight, t.vector, out_dtype=torch.bfloat16)
    for part in ("data", "scale", "global_scale"):
        getattr(t.vector, part).copy_(getattr(t.other, part))
    result.fill_(torch.nan)
    replayed(graph)
    want = nv.gemv(t.weight, t.other, out_dtype=torch.bfloat16)
    assert result.equal(want) and not want.equal(before)


@pytest.mark.parametrize(
    ("kind", "scale"), [("out", "given"), ("new", "given"), ("prepared", "given"), ("out", "auto"), ("new", "auto")]
)
def test_quantize_in_a_graph(given: Tensors, kind: str, scale: str) -> None:
    """Each replay computes the result anew, including the global scale."""
    t = given
    factor = t.out.global_scale if scale == "given" else "auto"
    out = t.out if kind == "out" else None
    run: Callable[[], BlockScaledTensor] = {
        "prepared": lambda: nv.prepare(nv.quantize, t.x, global_scale=factor, out=t.out)(),
        "out": lambda: nv.quantize(t.x, global_scale=factor, out=out),
        "new": lambda: nv.quantize(t.x, global_scale=factor, out=out),
    }[kind]
    graph, result = captured(run)
    before = codes_of(nv.quantize(t.x, global_scale=t.scale if scale == "given" else "auto"))
    t.x.copy_(t.new * 3)
    result.data.fill_(0xEE)
    result.scale.fill_(0xEE)
    replayed(graph)
    got = codes_of(result)
    want = codes_of(nv.quantize(t.x, global_scale=t.scale if scale == "given" else "auto"))
    assert same(got, want) and not want[0].equal(before[0])
    assert want[2].equal(before[2]) == (scale == "given")


def test_a_large_matrix_in_a_graph() -> None:
    """A separate launch computes the global scale of a large matrix."""
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    graph, result = captured(lambda: nv.quantize(x))
    x.copy_(x.flip(-1) * 3)
    replayed(graph)
    assert same(codes_of(result), codes_of(nv.quantize(x)))


@pytest.mark.parametrize("operation", ["gemv", "quantize"])
def test_a_first_call_within_a_capture_is_refused(given: Tensors, operation: str) -> None:
    """The message says to warm up; the capture ends cleanly, and the next one holds the call."""
    t = given
    run = {
        "gemv": lambda: nv.gemv(t.weight, t.vector, out=t.y),
        "quantize": lambda: nv.quantize(t.x, global_scale=t.out.global_scale, out=t.out),
    }[operation]
    plans = {"gemv": GEMV.calls, "quantize": QUANTIZE.calls}[operation]
    plans.clear()
    run()
    (call,) = plans.values()
    torch.cuda.synchronize()
    # as in a process that has not made this call yet
    plans.clear()
    call.owner.launch.kernel.loaded.clear()
    mark, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(CompileError, match=rf"kernel {operation} is not loaded on cuda:\d+ yet.*\(warm up\)"):
        with torch.cuda.graph(graph):
            mark.add_(1)
            run()
    assert not plans
    # the graph holds what was captured before the error
    replayed(graph)
    assert (mark == 1).all()
    again, _ = captured(run)
    replayed(again)


# --- gemm with a prepared weight

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="of sm_90a",
)


@HOPPER
@pytest.mark.parametrize("rows", [1, 16, 48])
def test_prepared_weight(given: Tensors, rows: int) -> None:
    """A warm call allocates its result and waits for nothing; a graph of it replays with new contents."""
    weight = nv.prepare_weight(given.weight)
    x = torch.randn(rows, K, device="cuda").bfloat16()
    out = nv.gemm(x, weight)
    for call, allocations in ((lambda: nv.gemm(x, weight, out=out), 0), (lambda: nv.gemm(x, weight), 1)):
        kept = [call()]
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_waiting():
            kept.append(call())
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == allocations
    graph, result = captured(lambda: nv.gemm(x, weight, out=out))
    x.copy_(torch.randn_like(x))
    result.fill_(torch.nan)
    replayed(graph)
    assert result.equal(nv.gemm(x, weight))


@HOPPER
def test_prepared_weight_under_inductor(given: Tensors) -> None:
    weight = nv.prepare_weight(given.weight)

    def function(x: torch.Tensor) -> torch.Tensor:
        return nv.gemm(x * 2, weight, bias=x[0, :M].float()) + 1

    torch._dynamo.reset()
    assert torch.compile(function, fullgraph=True)(given.x).equal(function(given.x))


@HOPPER
@pytest.mark.parametrize("rows", [1, 16])
def test_partial_sums_in_the_graphs_of_torch_compile(rows: int) -> None:
    """Scratch memory outlasts a call, so it must not come from a graph's pool: torch refuses graphs that leave memory
    allocated."""
    wide = 16 * M
    weight = nv.prepare_weight(nv.quantize(torch.randn(M, wide).bfloat16().cuda()))

    def function(x: torch.Tensor) -> torch.Tensor:
        return nv.gemm(x * 2, weight) + 1

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # torch runs it, records it, and replays it
        x = torch.randn(rows, wide).bfloat16().cuda()
        torch.compiler.cudagraph_mark_step_begin()
        assert compiled(x).equal(function(x))
    assert not counters["cudagraph_skips"]
    torch._dynamo.reset()

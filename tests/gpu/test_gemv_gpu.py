"""gemv() and what only a GPU has: streams, graphs, allocations, devices, and problems too large for the simulator.

``tests/kernels/gemv/test_gemv.py`` checks its results; ``--backend cuda`` runs that on the GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from support import gemv_problems
from support.gemv_problems import Case, make, random_cases

from cute_nvfp4 import gemv
from cute_nvfp4.errors import OperandError, TargetError
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.runtime.kernel import Kernel

pytestmark = pytest.mark.gpu

COUNT, CHUNK = 1000, 50


def check(case: Case) -> None:
    problem = make(case)
    gemv_problems.check(problem, problem.run())


@pytest.mark.parametrize("shape", [(7168, 16384, 1), (4096, 7168, 8), (7168, 2048, 4)], ids=str)
def test_benchmark_shapes(shape: tuple[int, int, int]) -> None:
    check(Case(*shape, b_rows=128))


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_random(first: int) -> None:
    """Random cases of the simulator's generator, with more rows."""
    for case in random_cases(CHUNK, 1000 + first, max_m=3000):
        check(case)


@pytest.mark.parametrize("case", [Case(2432, 4608, 2), Case(71, 16400, 1, "rowmajor", alignment=8)], ids=str)
def test_repeats_bit_for_bit(case: Case) -> None:
    """A repeated call gives the same bits, whatever the GPU does first."""
    problem = make(case)
    first = problem.run()
    for _ in range(20):
        assert problem.run().view(torch.int32).equal(first.view(torch.int32))


def test_current_stream() -> None:
    """The kernel runs after the work that the current stream already has."""
    problem = make(Case(512, 2048))
    expected = problem.run()
    data = problem.a.data.clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    problem.a.data.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        problem.a.data.copy_(data)
        c = gemv(problem.a, problem.b, out_dtype=torch.float32)
    stream.synchronize()
    assert c.equal(expected)


def test_a_second_call_only_allocates_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call compiles nothing, waits for nothing, and allocates once."""
    problem = make(Case(512, 2048))
    expected = problem.run()
    monkeypatch.setattr(Kernel, "build", lambda *_: pytest.fail("compiled again"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        c = problem.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    assert c.equal(expected)


def test_in_a_cuda_graph() -> None:
    """A call only launches, so that a graph can hold it; a replay reads new data."""
    problem = make(Case(256, 1024, out="contiguous"))
    problem.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemv(problem.a, problem.b, out=problem.out)
    problem.a.data.copy_(problem.a.data.flip(-1))
    problem.out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    gemv_problems.check(problem, problem.out)


def test_devices_that_do_not_fit_together() -> None:
    gpu, cpu = (make(Case(20, 64), device) for device in ("cuda", "cpu"))
    with pytest.raises(OperandError, match=r"device of a and b: got cuda:0 and cpu, expected the same"):
        gemv(gpu.a, cpu.b)
    with pytest.raises(OperandError, match=r"device of scale: got cpu, expected cuda:0"):
        BlockScaledTensor(gpu.a.data, cpu.a.scale)
    with pytest.raises(OperandError, match=r"device of global scale: got cpu"):
        BlockScaledTensor(gpu.a.data, gpu.a.scale, torch.ones(1))
    with pytest.raises(OperandError, match=r"device of out: got cpu, expected cuda:0"):
        gemv(gpu.a, gpu.b, out=torch.empty(1, 20))
    with pytest.raises(TargetError, match=r"backend='sim': got cuda:0, expected cpu"):
        gemv(gpu.a, gpu.b, backend="sim")
    with pytest.raises(TargetError, match=r"backend='cuda': got cpu, expected a CUDA device"):
        gemv(cpu.a, cpu.b, backend="cuda")


def test_reference_on_the_gpu() -> None:
    problem = make(Case(33, 512, 2))
    gemv_problems.check(problem, problem.run("reference"))


def test_second_device() -> None:
    """A call runs where the operands are, whatever device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = make(Case(512, 512), "cuda:1")
    with torch.cuda.device(0):
        c = problem.run()
    assert c.device == torch.device("cuda:1")
    gemv_problems.check(problem, c)

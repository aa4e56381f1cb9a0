"""Programmatic dependent launches: before griddepcontrol.wait, the launches before them may still run."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.sim import Race


@cute.kernel
def first(a: cute.Tensor, b: cute.Tensor, lets_begin: cutlass.Constexpr[bool] = True):
    thread, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(lets_begin):
        cute.arch.griddepcontrol_launch_dependents()
    b[thread] = a[thread] + a[thread]


@cute.kernel
def second(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, wait: cutlass.Constexpr[str]):
    """c = a + b, where b is what the launch before it writes."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    own = a[thread]
    if cutlass.const_expr(wait == "all"):
        cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(wait in ("one warp", "one warp, met")):
        if warp == 1:
            cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(wait in ("one warp, met", "barrier only")):
        cute.arch.sync_threads()
    c[thread] = own + b[thread]
    if cutlass.const_expr(wait == "after"):
        cute.arch.griddepcontrol_wait()


@cute.jit
def both(
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    wait: cutlass.Constexpr[str],
    programmatic: cutlass.Constexpr[bool],
    stream: cuda.CUstream,
):
    first(a, b).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)
    second(a, b, c, wait).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream, use_pdl=programmatic)


def outcome(wait: str, programmatic: bool = True, **options) -> torch.Tensor:
    with simulated_gpu("sm_90a", **options):
        a, b, c = (torch.ones(64, device="cuda") for _ in range(3))
        tensors = [from_dlpack(x) for x in (a, b, c)]
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        both(*tensors, wait, programmatic, stream)
        return c.cpu()


@pytest.mark.parametrize("wait", ["all", "one warp, met"])
def test_what_comes_after_the_wait_is_ordered(wait: str) -> None:
    assert (outcome(wait) == 3).all()


@pytest.mark.parametrize("wait", ["none", "after", "one warp", "barrier only"])
def test_what_comes_before_it_is_a_race(wait: str) -> None:
    words = ("is written by launch 0", "may still run", "read by CTA", "griddepcontrol.wait", r"\[programmatic-order\]")
    with pytest.raises(Race, match="(?s)" + ".*".join(words)):
        outcome(wait)


@cute.kernel
def between(d: cute.Tensor, waits: cutlass.Constexpr[bool]):
    thread, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(waits):
        cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    d[thread] = d[thread]


@cute.jit
def three(
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    d: cute.Tensor,
    lets_begin: cutlass.Constexpr[bool],
    waits: cutlass.Constexpr[int],
    stream: cuda.CUstream,
):
    """``first`` writes b, which ``second`` reads without a wait; ``waits``: 0 or 1 of one between, 2: none is."""
    first(a, b, lets_begin).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)
    if cutlass.const_expr(waits < 2):
        between(d, waits == 1).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream, use_pdl=True)
    second(a, b, c, "none").launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream, use_pdl=True)


def chained(lets_begin: bool, waits: int) -> torch.Tensor:
    with simulated_gpu("sm_90a"):
        a, b, c, d = (torch.ones(64, device="cuda") for _ in range(4))
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        three(*[from_dlpack(x) for x in (a, b, c, d)], lets_begin, waits, stream)
        return c.cpu()


@pytest.mark.parametrize("lets_begin,waits", [(False, 2), (True, 1)])
def test_what_has_ended_is_ordered_without_a_wait(lets_begin: bool, waits: int) -> None:
    """A launch that lets no dependents begin; one that the launch between has waited for."""
    assert (chained(lets_begin, waits) == 3).all()


def test_a_launch_that_nobody_has_waited_for_may_still_run() -> None:
    with pytest.raises(Race, match="is written by launch 0"):
        chained(True, 0)


def test_launches_that_are_not_programmatic_follow_one_another() -> None:
    assert (outcome("none", programmatic=False) == 3).all()


def test_the_class_may_be_allowed() -> None:
    assert (outcome("none", allow=("programmatic-order",)) == 3).all()

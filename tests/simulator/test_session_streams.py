"""Streams of a simulated session: what a program orders between them, and the hazards where it orders nothing."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cuda.bindings.runtime as cudart
import cutlass.cute as cute
import pytest
import session_kernels as kernels
import torch
from cutlass.cute.runtime import from_dlpack

from cute_nvfp4.errors import TargetError
from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.sim.errors import Race


@pytest.fixture
def session():
    with simulated_gpu("sm_100a") as opened:
        yield opened


@pytest.fixture
def double(session):
    """Launches a kernel that doubles a (32,) on a stream into b, which it returns."""
    compiled = None

    def launch(a: torch.Tensor, stream, out: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal compiled
        b = torch.empty_like(a) if out is None else out
        handle = cuda.CUstream(getattr(stream, "cuda_stream", stream))
        compiled = compiled or cute.compile(kernels.launch_double, from_dlpack(a), from_dlpack(b), handle)
        compiled(from_dlpack(a), from_dlpack(b), handle)
        return b

    return launch


def device_vector() -> torch.Tensor:
    """(32,) float32, which the host has waited for."""
    x = torch.arange(32, device="cuda", dtype=torch.float32)
    torch.cuda.synchronize()
    return x


def handle_of(result: tuple) -> int:
    status, stream = result
    assert int(status) == 0
    return int(stream)


def unordered(*words: str) -> pytest.RaisesExc:
    """A hazard between streams whose message has the words in this order."""
    return pytest.raises(Race, match=r"(?s)" + ".*".join((*words, r"\[stream-order\]")))


ORDERS = {
    "wait_stream": lambda first, second: second.wait_stream(first),
    "wait_event": lambda first, second: second.wait_event(first.record_event()),
    "event.wait": lambda first, second: first.record_event().wait(second),
    "event.synchronize": lambda first, second: first.record_event().synchronize(),
    "event.query": lambda first, second: first.record_event().query(),
    "stream.synchronize": lambda first, second: first.synchronize(),
    "device synchronize": lambda first, second: torch.cuda.synchronize(),
    "bindings": lambda first, second: cuda.cuStreamSynchronize(cuda.CUstream(first.cuda_stream)),
    "through a third": lambda first, second: (
        (third := torch.cuda.Stream()).wait_stream(first) or second.wait_stream(third)
    ),
}


@pytest.mark.parametrize("how", ORDERS)
def test_what_orders_two_streams(how, session, double) -> None:
    x, first, second = device_vector(), torch.cuda.Stream(), torch.cuda.Stream()
    y = double(x, first)
    ORDERS[how](first, second)
    z = double(y, second)
    second.synchronize()
    assert torch.equal(z, 4 * x) and session.failure is None


@pytest.mark.parametrize(
    "order",
    [
        lambda first, second: None,
        lambda first, second: first.wait_stream(second),  # the wrong way round
        lambda first, second: second.wait_event(torch.cuda.Event()),  # never recorded
        lambda first, second: second.synchronize(),
    ],
)
def test_kernels_on_streams_that_nothing_orders(order, session, double) -> None:
    x, first, second = device_vector(), torch.cuda.Stream(), torch.cuda.Stream()
    y = double(x, first)
    order(first, second)
    with unordered(
        r"byte 0 of tensor '.*float32\[32\]", "is written by launch 0", "and read by launch 1", "nothing orders"
    ):
        double(y, second)
    assert session.failure[0].number == 1


def test_an_event_covers_what_came_before_it_only(session, double) -> None:
    x, first, second = device_vector(), torch.cuda.Stream(), torch.cuda.Stream()
    y, event = double(x, first), first.record_event()
    z = double(x, first)
    second.wait_event(event)
    double(y, second)
    with unordered("written by launch 1", "read by launch 3"):
        double(z, second)


def test_reads_may_overlap_and_writes_may_not(session, double) -> None:
    x, first, second = device_vector(), torch.cuda.Stream(), torch.cuda.Stream()
    other = device_vector()
    double(x, first)
    double(x, second)
    with unordered("is read by launch 0", "and written by launch 2"):
        double(other, second, out=x)


def test_work_of_torch_counts_and_names_the_program(session, double) -> None:
    x, side = torch.ones(32, device="cuda"), torch.cuda.Stream()
    with unordered(
        "written by torch's ones on the default stream, .*test_session_streams.py", "read by torch's mul on stream"
    ):
        with torch.cuda.stream(side):
            x * 2
    assert session.failure[0] is None
    torch.cuda.synchronize()
    y = double(x, side)
    with unordered("written by launch 0", "read by torch's add"):
        y + 1
    with unordered("written by launch 0", "read by a copy of torch's on the default stream"):
        y.cpu()
    side.synchronize()
    assert y.sum().item() == 64


def test_a_launch_that_failed_is_not_blamed_for_later_work_of_torch(session, double) -> None:
    x, first, second = device_vector(), torch.cuda.Stream(), torch.cuda.Stream()
    y = double(x, first)
    with unordered("read by launch 1"):
        double(y, second)
    with unordered("read by torch's add"):
        y + 1
    assert [f.kernel for f in session.findings()] == [session.launches[1].launch.kernel, ""]


def test_only_bytes_that_both_touch_matter(session, double) -> None:
    both, side = torch.zeros(4, 64, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    both[:, :32] = 1  # rows of 256 bytes, the first half of each
    with torch.cuda.stream(side):
        both[:, 32:] = 2
    double(both[0, 32:], side, out=both[1, 32:])
    with unordered("byte 128 of", "written by torch's fill_", "read by torch's add"):
        both[0, 31:33] + 1
    torch.cuda.synchronize()
    assert both.sum() == 4 * 32 * 3 + 32 * 2


def test_a_tensor_that_repeats_elements_has_gaps_all_the_same(session) -> None:
    x, side = torch.zeros(6, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x[1:5] = 1
    with torch.cuda.stream(side):
        x.as_strided((3, 2), (0, 5)) + 1  # as many elements as its span, but only the first and the last
    with unordered("byte 4 of", "written by torch's fill_", "read by torch's add"):
        with torch.cuda.stream(side):
            x.as_strided((2, 3), (3, 1)) + 1


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it(session, double) -> None:
    x = torch.ones(32, device="cuda")
    blocking = handle_of(cuda.cuStreamCreate(int(cuda.CUstream_flags.CU_STREAM_DEFAULT)))
    y = double(x, blocking)
    assert (y + 1).sum().item() == 96
    free = handle_of(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking))
    z = torch.ones(32, device="cuda")
    with unordered("written by torch's ones", "read by launch"):
        double(z, free)


@pytest.mark.parametrize("waits", [True, False])
def test_copies_to_pinned_memory_end_when_the_host_has_waited(waits, session) -> None:
    x = torch.ones(32, device="cuda")
    copy = x.to("cpu", non_blocking=True)
    assert copy.is_pinned()
    if waits:
        torch.cuda.current_stream().synchronize()
        assert copy.sum() == 32
    else:
        with unordered("written by a copy of torch's on the default stream", "read by torch's sum on the host"):
            copy.sum()


@pytest.mark.parametrize("asked,waits", [(False, True), (True, False)])
def test_copies_into_pinned_memory_wait_unless_asked_not_to(asked, waits, session) -> None:
    x, pinned = torch.ones(32, device="cuda"), torch.zeros(32).pin_memory()
    pinned.copy_(x, non_blocking=asked)
    if waits:
        assert pinned.sum() == 32
        return
    with unordered("written by torch's copy_ on the default stream", "and written by torch's zero_ on the host"):
        pinned.zero_()


def test_copies_of_the_bindings(session, double) -> None:
    x, y, side = device_vector(), torch.empty(32, device="cuda"), torch.cuda.Stream()
    stream = cuda.CUstream(side.cuda_stream)
    assert cuda.cuMemcpyAsync(y.data_ptr(), x.data_ptr(), 128, stream) == (cuda.CUresult.CUDA_SUCCESS,)
    with unordered("written by a memcpy on stream", "read by torch's add"):
        y + 1
    side.synchronize()
    assert torch.equal(x, y)


@pytest.mark.parametrize("joins", [True, False])
def test_streams_that_a_capture_forks(joins, session, double) -> None:
    x, y, z = device_vector(), torch.empty(32, device="cuda"), torch.empty(32, device="cuda")
    main, side, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        side.wait_stream(main)
        double(x, side, out=y)
        if joins:
            main.wait_stream(side)
        double(y, main, out=z)
    assert not session.launches
    if joins:
        graph.replay()
        graph.replay()
        assert torch.equal(z, 4 * x)
    else:
        with unordered("written by launch 0", "in a graph captured on stream", "read by launch 1"):
            graph.replay()


def test_a_capture_records_the_replay_of_another_graph(session, double) -> None:
    x, y, z = device_vector(), torch.zeros(32, device="cuda"), torch.zeros(32, device="cuda")
    stream, inner, outer = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(inner, stream=stream):
        double(x, stream, out=y)
    with torch.cuda.graph(outer, stream=stream):
        inner.replay()
        double(y, stream, out=z)
    assert not session.launches and not y.any()
    outer.replay()
    assert torch.equal(z, 4 * x) and len(session.launches) == 2


WORK = {
    "resize_": lambda x: x.resize_(64),
    "index by a tensor": lambda x: x[torch.tensor([1, 0])],
    "index by a mask": lambda x: x[[True] * 32],
    "reshape that copies": lambda x: x.view(4, 8).t().reshape(32),
    "in place": lambda x: x.add_(1),
    "empty": lambda x: torch.empty(4, device="cuda"),
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: torch.ones(4).cuda(),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0].item(),
}


@pytest.mark.parametrize("bindings", [False, True])
@pytest.mark.parametrize("work", WORK)
def test_work_of_torch_is_refused_in_a_capture(work, bindings, session) -> None:
    x, stream = device_vector(), torch.cuda.Stream()
    with pytest.raises(TargetError, match=r"torch's .*cannot be captured"):
        if bindings:
            cuda.cuStreamBeginCapture(stream.cuda_stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
            with torch.cuda.stream(stream):
                WORK[work](x)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            WORK[work](x)
    session.runtime.captures.clear()
    assert x.tolist() == list(range(32))


def test_what_needs_no_gpu_is_allowed_in_a_capture(session) -> None:
    x = device_vector()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert x.view(4, 8).t()[1:, None].size() == (7, 1, 4) and x.contiguous().data_ptr() == x.data_ptr()
        assert x.reshape(8, 4).expand(2, 8, 4).detach().stride() == (0, 4, 1) and torch.zeros(2).sum() == 0


def test_backward_passes_are_in_order(session) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        w = torch.ones(8, device="cuda", requires_grad=True)
        loss = (w * w).sum()
    loss.backward()
    assert w.grad.sum().item() == 16


def test_the_class_can_be_allowed_and_collected() -> None:
    for options, severity in (({"allow": ("stream-order",)}, "warning"), ({"on_hazard": "collect"}, "hazard")):
        with simulated_gpu(**options) as session:
            x = torch.ones(32, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                assert (x + 1).is_cuda
            (finding,) = session.findings()
            assert (finding.rule, finding.severity) == ("stream-order", severity)
            assert (session.failure is None) == (severity == "warning")
    with simulated_gpu(checks=False) as session:
        x = torch.ones(32, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            x + 1
        assert not session.findings()

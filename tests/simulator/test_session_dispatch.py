"""Torch below its Python API in a simulated session: backward passes, operators of one's own, threads, compilation."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
import torch

from cute_nvfp4.sim.session import simulated_gpu


@pytest.fixture
def session():
    with simulated_gpu("sm_100a") as opened:
        yield opened


class Doubled(torch.autograd.Function):
    """2 x, which notes where what backward is given and makes lies."""

    places: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        made = gradient * x, torch.zeros(2), torch.zeros(2, device="cuda"), torch.empty_like(x)
        Doubled.places = [str(t.device) for t in (gradient, x, *made)]
        return 2 * gradient


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_backward_passes_see_the_device(session, how):
    x = torch.arange(8.0, device="cuda", requires_grad=True)
    total = Doubled.apply(x)[2:4].exp().sum()  # the gradient of the slice is made in C++
    if how == "backward":
        total.backward()
        found = x.grad
    else:
        (found,) = torch.autograd.grad(total, x)
    assert Doubled.places == ["cuda:0", "cuda:0", "cuda:0", "cpu", "cuda:0", "cuda:0"]
    expected = torch.zeros(8)
    expected[2:4] = 2 * torch.exp(2 * torch.arange(2.0, 4.0))
    assert found.is_cuda and torch.allclose(found.cpu(), expected)


def test_operators_of_ones_own_are_found_by_device(session):
    seen = []

    @torch.library.custom_op("session_test::only_cuda", mutates_args=(), device_types="cuda")
    def only_cuda(x: torch.Tensor) -> torch.Tensor:
        seen.append((str(x.device), str(torch.empty(1, device=x.device).device)))
        return x + 1

    @torch.library.custom_op("session_test::both", mutates_args=(), device_types="cpu")
    def both(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    both.register_kernel("cuda")(lambda x: x + 1)

    @torch.library.custom_op("session_test::anywhere", mutates_args=())
    def anywhere(x: torch.Tensor) -> torch.Tensor:
        seen.append((str(x.device),))
        return x.clone()

    x = torch.zeros(3, device="cuda")
    assert only_cuda(x).is_cuda and torch.equal(only_cuda(x.requires_grad_()).cpu(), torch.ones(3))
    assert seen == [("cuda:0", "cuda:0")] * 2
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        only_cuda(torch.zeros(3))
    assert both(x.detach()).tolist() == [1, 1, 1] and both(torch.zeros(3)).tolist() == [-1, -1, -1]
    seen.clear()
    assert anywhere(x).is_cuda and not anywhere(torch.zeros(3)).is_cuda and seen == [("cuda:0",), ("cpu",)]


def test_kernels_that_a_library_registers_for_cuda(session):
    library = torch.library.Library("session_test_library", "DEF")
    library.define("copy(Tensor x, Tensor(a!) out) -> ()")

    def copy(x, out):
        out.copy_(x if x.is_cuda and out.is_cuda else -x)

    library.impl("copy", copy, "CUDA")
    x, out = torch.arange(4.0, device="cuda"), torch.zeros(4, device="cuda")
    torch.ops.session_test_library.copy(x, out)
    assert torch.equal(x, out)


def test_torch_compile_runs_eagerly(session, capsys):
    @torch.compile(mode="max-autotune")
    def clipped(x):
        return x.relu()

    layer = torch.compile(torch.nn.Linear(2, 2).cuda())
    assert layer(clipped(torch.ones(2, device="cuda"))).is_cuda
    assert capsys.readouterr().err.count("torch runs eagerly") == 1


def test_threads_are_in_the_session(session):
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.zeros(2, device="cuda").is_cuda))
    thread.start()
    thread.join()
    assert found == [True]


def test_products_that_only_a_gpu_has(session):
    generator = torch.Generator().manual_seed(1)

    def integers(*shape, dtype=torch.bfloat16):
        return torch.randint(-4, 5, shape, generator=generator).to(dtype).cuda()

    a, b = integers(10, 16), integers(16, 8)
    assert torch.equal(torch.mm(a, b, out_dtype=torch.float32), a.float() @ b.float())
    c = integers(10, 8, dtype=torch.float32)
    assert torch.equal(torch.addmm(c, a, b, out_dtype=torch.float32), c + a.float() @ b.float())
    weights, ends = integers(2, 16, 8), torch.tensor([4, 10], device="cuda", dtype=torch.int32)
    expected = torch.cat([a[:4].float() @ weights[0].float(), a[4:].float() @ weights[1].float()])
    found = torch._grouped_mm(a, weights, offs=ends)
    assert found.is_cuda and torch.equal(found.float(), expected)
    by_k = torch._grouped_mm(a.t(), c.bfloat16(), offs=ends)  # K is what the groups share out
    parts = [a[g].t().float() @ c[g] for g in (slice(0, 4), slice(4, 10))]
    assert torch.equal(by_k.float(), torch.stack(parts))
    rows, columns = torch.full((10,), 0.5, device="cuda"), torch.full((2, 8), 2.0, device="cuda")
    e4m3 = a.to(torch.float8_e4m3fn), weights.transpose(1, 2).contiguous().to(torch.float8_e4m3fn).transpose(1, 2)
    scaled = torch._scaled_grouped_mm(*e4m3, rows, columns, offs=ends, out_dtype=torch.bfloat16)
    assert torch.equal(scaled.float(), expected)


def test_sums_of_16_bit_products_are_wide_in_every_spelling(session):
    a = torch.full((1, 4096), 1.0, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    b = torch.full((4096, 1), 1.0, dtype=torch.bfloat16, device="cuda")
    b[0] = 2.0**-7
    exact = torch.tensor(4095 + 2.0**-7).bfloat16()
    out = torch.empty(1, 1, dtype=torch.bfloat16, device="cuda")
    products = [
        a @ b,
        torch.mm(a, b),
        torch.einsum("ik,kj->ij", a, b),
        torch.mm(a.detach(), b, out=out),
        (b.t() @ a.t()),
    ]
    assert all(torch.equal(p.cpu(), exact.reshape(1, 1)) for p in products)
    torch.mm(a, b).sum().backward()
    assert torch.equal(a.grad, b.t())


def test_tensors_of_two_devices_do_not_meet(session):
    x, host = torch.ones(8, 8, device="cuda"), torch.ones(8, 8)
    for product in (lambda: x + host, lambda: host @ x, lambda: torch.where(x > 0, x, host), lambda: x.add_(host)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            product()
    assert (x + torch.tensor(2.0)).is_cuda and x[torch.tensor([1])].is_cuda and x.copy_(host).is_cuda


def test_where_things_go_and_what_is_known(session):
    x = torch.ones(4, 4, device="cuda")
    assert not x[0].cpu().is_cuda and not x.to("cpu", torch.float16).is_cuda and x.to(torch.float16).is_cuda
    assert x.float().data_ptr() == x.data_ptr() == x.cuda().data_ptr()
    x.record_stream(torch.cuda.current_stream())
    assert torch.version.cuda and not torch.cuda.is_current_stream_capturing()
    assert isinstance(torch.cuda.stream(None), torch.cuda.StreamContext)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert torch.cuda.is_current_stream_capturing()
    assert "device='cuda:0'" in repr(x)


def test_everything_is_as_before_afterwards():
    before = torch.compile, torch.version.cuda, threading.Thread._bootstrap_inner, torch.autograd._engine_run_backward
    with simulated_gpu("sm_100a"):
        x = torch.ones(2, device="cuda", requires_grad=True)
    after = torch.compile, torch.version.cuda, threading.Thread._bootstrap_inner, torch.autograd._engine_run_backward
    assert before == after
    (x * 2).sum().backward()
    assert x.grad.device.type == "cpu"

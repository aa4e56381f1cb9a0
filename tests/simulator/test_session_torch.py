"""Device "cuda" of torch in a simulated session: where tensors are, copies, alignment, streams, and no trace after."""

from __future__ import annotations

import copy

import pytest
import torch

from cute_nvfp4.errors import TargetError
from cute_nvfp4.formats import decode_e2m1, unpack_e2m1
from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.scale_layout import to_blocked
from cute_nvfp4.sim.session import current_session


@pytest.fixture
def session():
    with simulated_gpu("sm_100a") as opened:
        yield opened


def test_factories_put_tensors_where_the_device_says(session) -> None:
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0):
        assert torch.empty(3, device=device).device == torch.device("cuda", 0)
    assert torch.zeros(3).device.type == "cpu" and torch.zeros(3, device="cpu").device.type == "cpu"
    x = torch.randn(4, 5, device="cuda", dtype=torch.float16)
    assert torch.empty_like(x).is_cuda and not torch.empty_like(x, device="cpu").is_cuda
    assert x.new_zeros(2).is_cuda and torch.zeros_like(x, dtype=torch.float32).is_cuda
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.arange(3).is_cuda and torch.tensor([1.0]).is_cuda and not torch.ones(2, device="cpu").is_cuda
    finally:
        torch.set_default_device(None)
    assert torch.ones(2).is_cpu
    with pytest.raises(TargetError, match="invalid device ordinal 1"):
        torch.empty(1, device="cuda:1")


def test_results_are_where_their_inputs_are(session) -> None:
    x = torch.randn(4, 6, device="cuda")
    results = [x + 1, x @ x.t(), x.float(), x.half(), x.sum(), torch.cat([x, x]), torch.stack([x, x]), x.clone()]
    assert all(r.is_cuda and r.get_device() == 0 for r in [*results, *x.split(2), *torch.sort(x), copy.deepcopy(x)])
    assert all(v.is_cuda for v in (x.t(), x[1:], x.view(-1), x.permute(1, 0), x.view(torch.int32), x.detach()))
    host = torch.zeros(4, 6)
    assert not host.copy_(x).is_cuda and torch.equal(host, x.cpu())
    assert x.zero_().is_cuda and not host.is_cuda
    torch.add(host, 1, out=host)
    assert host.is_cpu and host.get_device() == -1


def test_moves_copy_and_conversions_in_place_do_not(session) -> None:
    host = torch.arange(6.0)
    for device in (host.cuda(), host.to("cuda"), host.to(torch.device("cuda")), host.to("cuda", torch.float32)):
        assert device.is_cuda
        device.zero_()
        assert host[5] == 5
    device = host.cuda()
    back = device.cpu()
    back.zero_()
    assert device.tolist() == list(range(6))
    assert device.to("cuda") is device and device.cuda() is device and device.to(torch.float32) is device
    assert host.to(device).is_cuda and device.to(host).is_cpu and host.to(device.half()).dtype == torch.float16
    assert device.to(torch.int32).is_cuda and device.to("cpu", torch.int32).is_cpu
    assert not device.cpu().is_cuda and host.cpu() is host


def test_addresses_are_aligned_as_cuda_does(session) -> None:
    tensors = [torch.randn(n, device="cuda") for n in (1, 7, 1000, 100_000)]
    tensors += [t * 2 for t in tensors] + [t.cpu().cuda() for t in tensors]
    assert {t.data_ptr() % 512 for t in tensors} == {0}
    x = tensors[3]
    assert x[10:].data_ptr() == x.data_ptr() + 40


def test_what_torch_refuses_for_cuda_tensors_is_refused(session) -> None:
    x = torch.ones(3, device="cuda")
    for convert in (lambda: x.numpy(), lambda: __import__("numpy").asarray(x)):
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            convert()
    assert x.cpu().numpy().sum() == 3
    assert repr(x) == "tensor([1., 1., 1.], device='cuda:0')"


def test_dlpack_says_cuda(session) -> None:
    x = torch.arange(4, device="cuda")
    assert x.__dlpack_device__() == (2, 0) and torch.zeros(1).__dlpack_device__()[0] == 1
    y = torch.from_dlpack(x)
    assert y.is_cuda and y.data_ptr() == x.data_ptr()


def test_modules_and_gradients(session) -> None:
    layer = torch.nn.Linear(4, 3).cuda()
    assert {p.device.type for p in layer.parameters()} == {"cuda"}
    x = torch.randn(2, 4, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.is_cuda and layer.weight.grad.is_cuda
    assert torch.allclose(x.grad.cpu(), layer.weight.detach().cpu().sum(0).expand(2, 4))
    assert layer.cpu().weight.is_cpu


def test_properties_are_those_of_the_chosen_gpu() -> None:
    for arch, capability, count in (("sm_90a", (9, 0), 132), ("sm_100a", (10, 0), 148), ("sm_103a", (10, 3), 148)):
        with simulated_gpu(arch):
            assert torch.cuda.is_available() and torch.cuda.device_count() == 1
            assert torch.cuda.get_device_capability() == capability
            properties = torch.cuda.get_device_properties("cuda")
            assert (properties.major, properties.minor) == capability
            assert properties.multi_processor_count == count and properties.shared_memory_per_block_optin == 232448
            assert "simulated" in torch.cuda.get_device_name()


def test_memory_is_counted_and_given_back(session) -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == before + (1 << 20)
    free, total = torch.cuda.mem_get_info()
    assert total - free == before + (1 << 20)
    del x
    assert torch.cuda.memory_allocated() == before


def test_streams_and_events(session, capfd) -> None:
    assert torch.cuda.current_stream().cuda_stream == 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream and stream.cuda_stream != 0
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record(stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    end.synchronize()
    assert start.elapsed_time(end) == start.elapsed_time(end) == 1.0  # nothing was done between them
    torch.zeros(3, device="cuda").add_(1).view(3, 1)
    end.record()
    assert start.elapsed_time(end) == 2.0 and 50 // start.elapsed_time(end) == 25
    assert capfd.readouterr().err.count("are counted work, not times") == 1
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(torch.cuda.Event(enable_timing=True))


def test_random_numbers_and_pinned_memory(session) -> None:
    torch.cuda.manual_seed(3)
    first = torch.randn(4, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert torch.equal(torch.randn(4, device="cuda", generator=generator), first)
    assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned() and pinned.is_cpu and not torch.ones(3).is_pinned()


def test_block_scaled_reference_of_torch(session) -> None:
    """``torch._scaled_mm`` on NVFP4, which torch has on CUDA only, against the definition in a loop."""
    m, n, k = 5, 6, 64
    codes = torch.randint(0, 256, (m + n, k // 2), dtype=torch.uint8)
    scales = (torch.rand(m + n, k // 16) * 4).to(torch.float8_e4m3fn)
    a, b = (c.cuda().view(torch.float4_e2m1fn_x2) for c in (codes[:m], codes[m:]))
    blocked = [to_blocked(s).permute(5, 2, 4, 0, 1, 3).contiguous().flatten().cuda() for s in (scales[:m], scales[m:])]
    got = torch._scaled_mm(a, b.t(), *blocked, out_dtype=torch.float32)
    assert got.is_cuda and got.shape == (m, n)
    values = decode_e2m1(unpack_e2m1(codes)).double()
    for i in range(m):
        for j in range(n):
            want = sum(
                values[i, c] * scales[i, c // 16].double() * values[m + j, c] * scales[m + j, c // 16].double()
                for c in range(k)
            )
            assert got[i, j].item() == pytest.approx(want.item(), rel=1e-6)


def test_products_of_halves_are_rounded_once(session) -> None:
    """As by cuBLAS: sums in binary32. The reference is exact, and so are the sums."""
    torch.manual_seed(1)
    a, b = (torch.randint(-8, 8, (n, 700)).double() for n in (9, 11))
    want = (a @ b.t()).half()
    x, y = a.half().cuda(), b.half().cuda()
    results = [x @ y.t(), torch.mm(x, y.t()), torch.einsum("mk,nk->mn", x, y), torch.einsum("mk,nk->mn", [x, y])]
    results += [torch.nn.functional.linear(x, y), torch.bmm(x[None], y.t()[None])[0], x.matmul(y.t())]
    assert all(r.is_cuda and torch.equal(r.cpu(), want) for r in results)


def test_unknown_functions_say_their_name(session) -> None:
    with pytest.raises(TargetError, match=r"torch\.cuda\.\w+ is not modelled"):
        torch.cuda.get_sync_debug_mode()
    with pytest.raises(TargetError, match="make_graphed_callables"):
        torch.cuda.make_graphed_callables(None, ())


def test_nothing_remains_after_a_session() -> None:
    names = ("is_available", "Stream", "Event", "current_stream", "synchronize", "_lazy_init", "nvtx", "CUDAGraph")
    before = [getattr(torch.cuda, n) for n in names] + [torch.Generator, torch.from_dlpack]
    with simulated_gpu() as session:
        x = torch.ones(3, device="cuda")
        assert torch.cuda.is_available() and current_session() is session
        with pytest.raises(TargetError, match="already active"), simulated_gpu():
            pass
    assert [getattr(torch.cuda, n) for n in names] + [torch.Generator, torch.from_dlpack] == before
    assert current_session() is None and x.device.type == "cpu"
    with pytest.raises(ZeroDivisionError), simulated_gpu():
        raise ZeroDivisionError
    assert current_session() is None and [getattr(torch.cuda, n) for n in names] == before[: len(names)]


def test_bad_options_are_refused() -> None:
    with pytest.raises(TargetError, match="sm_12"), simulated_gpu("sm_12"):
        pass
    with pytest.raises(TargetError, match="benchmarks"), simulated_gpu(benchmarks="twice"):
        pass
    assert current_session() is None

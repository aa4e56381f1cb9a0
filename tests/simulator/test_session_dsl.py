"""Compiled DSL functions in a simulated session: launches, arguments, streams, the CUDA bindings, prints and errors."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import session_kernels as kernels
import torch
from cuda.bindings import runtime
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_ptr

from cute_nvfp4 import NVFP4, BlockScaledTensor, gemv
from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim import OutOfBounds
from cute_nvfp4.sim.session import simulated_gpu


@pytest.fixture
def session():
    with simulated_gpu("sm_100a") as opened:
        yield opened


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(32, device="cuda", dtype=torch.float32), torch.zeros(32, device="cuda")


def stream() -> cuda.CUstream:
    return cuda.CUstream(torch.cuda.current_stream().cuda_stream)


def test_a_compiled_function_runs_and_is_recorded(session) -> None:
    a, b = vectors()
    compiled = cute.compile(kernels.launch_double, from_dlpack(a), from_dlpack(b), stream())
    assert not session.launches
    compiled(from_dlpack(a), from_dlpack(b), stream())
    assert torch.equal(b, 2 * a)
    c = torch.full((32,), 3.0, device="cuda")
    compiled.to(0)(from_dlpack(c), from_dlpack(b), stream())
    assert torch.equal(b, 2 * c)
    assert [(r.launch.grid, r.launch.block, r.ended) for r in session.launches] == [((1, 1, 1), (32, 1, 1), True)] * 2
    assert session.launches[0].instructions == session.launches[1].instructions > 0
    assert session.instructions == 2 * session.launches[0].instructions


def test_plain_calls_and_several_launches_in_their_order(session) -> None:
    a, b = vectors()
    want = a.clone()
    for _ in range(2):
        kernels.launch_both(from_dlpack(a), from_dlpack(b))
        want = 4 * want + 2
        assert torch.equal(a, want)
    assert len(session.launches) == 6 and len({r.launch.kernel for r in session.launches}) >= 2


def test_a_function_without_kernels(session, capfd) -> None:
    kernels.host_only(5)
    cute.compile(kernels.host_only, 5)(7)
    assert capfd.readouterr().out.split("\n")[:2] == ["n is 5", "n is 7"] and not session.launches


def test_pointers_and_numbers(session) -> None:
    a, _ = vectors()
    pointer = make_ptr(cutlass.Float32, a.data_ptr(), cute.AddressSpace.gmem, assumed_align=128)
    compiled = cute.compile(kernels.launch_scale_pointer, pointer, 2.0)
    compiled(pointer, 2.5)
    assert torch.equal(a, torch.arange(32, device="cuda") * 2.5)


def test_an_access_outside_names_the_variable(session) -> None:
    size = cute.sym_int32()
    example = make_fake_compact_tensor(cutlass.Float32, (size,))
    compiled = cute.compile(kernels.launch_double, example, example, make_fake_stream(), options="--enable-tvm-ffi")
    little, result = torch.zeros(20, device="cuda"), torch.zeros(20, device="cuda")
    with pytest.raises(OutOfBounds, match=r"0 bytes past the end of tensor 'little \(float32\[20\]\)'"):
        compiled(little, result, 0)
    assert session.failure[0].number == 0 and isinstance(session.failure[1], OutOfBounds)


def test_host_memory_is_not_device_memory(session) -> None:
    host = torch.ones(64)
    pointer = make_ptr(cutlass.Float32, -(-host.data_ptr() // 128) * 128, cute.AddressSpace.gmem, assumed_align=128)
    with pytest.raises(OutOfBounds, match="no tensor is registered"):
        kernels.launch_scale_pointer(pointer, 2.0)
    pinned = host.pin_memory()
    pointer = make_ptr(cutlass.Float32, pinned.data_ptr(), cute.AddressSpace.gmem, assumed_align=128)
    kernels.launch_scale_pointer(pointer, 2.0)
    torch.cuda.synchronize()
    assert pinned[31] == 2 and pinned[32] == 1 and host[0] == 1


def test_arguments_of_functions_compiled_for_tvm_ffi(session) -> None:
    """They take tensors and numbers as they are, checked against the examples."""
    size = cute.sym_int32(divisibility=4)
    examples = [make_fake_compact_tensor(cutlass.Float32, (size,)) for _ in range(2)]
    ambient = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cute.compile(kernels.launch_double, *examples, ambient, options="--enable-tvm-ffi")
    a, b = vectors()
    assert compiled(a, b) is None and torch.equal(b, 2 * a)
    chosen = torch.cuda.Stream()
    with torch.cuda.stream(chosen):
        compiled(b, a)
    chosen.synchronize()
    assert torch.equal(a, 2 * b) and session.launches[-1].launch.stream == chosen.cuda_stream
    wrapped = [from_dlpack(t, enable_tvm_ffi=True).mark_layout_dynamic() for t in (a, b)]
    again = cute.compile(kernels.launch_double, *wrapped, ambient, options="--enable-tvm-ffi")
    again(*wrapped)
    again(b[:32], a)
    assert torch.equal(a, 2 * b)
    for wrong, error, text in (
        ((a, b[:28]), ValueError, "expected shape.0. == 32, as elsewhere"),
        ((a[:30], b[:30]), ValueError, "divisible by 4, got 30"),
        ((a.view(4, 8), b), ValueError, "expected 1 dimensions, got 2"),
        ((a.half(), b), TypeError, "elements of Float32"),
        ((a.cpu(), b), ValueError, "expected a tensor on cuda"),
        ((a[::2], b[::2]), ValueError, r"expected stride\[0\] == 1, got 2"),
        ((3, b), TypeError, "expected a tensor, got int"),
        ((a,), TypeError, "missing"),
    ):
        with pytest.raises(error, match=text):
            compiled(*wrong)


def test_prints_of_a_kernel(session, capfd) -> None:
    a, _ = vectors()
    kernels.launch_speak(from_dlpack(a), 7)
    lines = capfd.readouterr().out.split("\n")
    assert [line for line in lines if line] == [f"t{t} {t:5.2f}|7   |ff|%|{-(1 << 40)}|A" for t in (3, 5)]


def test_benchmarks_run_once_and_give_counted_work(session, capfd) -> None:
    from cutlass.testing import JitArguments, benchmark

    a, b = vectors()
    compiled = cute.compile(kernels.launch_double, from_dlpack(a), from_dlpack(b), stream())
    time = benchmark(compiled, kernel_arguments=JitArguments(from_dlpack(a), from_dlpack(b), stream()), iterations=50)
    assert len(session.launches) == 1 and time == 100 + session.instructions / 1000
    assert "counted work, not times" in capfd.readouterr().err


@pytest.mark.slow
def test_full_benchmarks_run_as_often_as_asked() -> None:
    from cutlass.testing import JitArguments, benchmark

    with simulated_gpu(benchmarks="full") as session:
        a, b = vectors()
        chosen = cuda.CUstream(torch.cuda.Stream().cuda_stream)
        compiled = cute.compile(kernels.launch_double, from_dlpack(a), from_dlpack(b), chosen)
        arguments = JitArguments(from_dlpack(a), from_dlpack(b), chosen)
        for graphs in (False, True):
            before = len(session.launches)
            time = benchmark(
                compiled,
                kernel_arguments=arguments,
                warmup_iterations=2,
                iterations=3,
                stream=chosen,
                use_cuda_graphs=graphs,
            )
            each = 100 + session.launches[-1].instructions / 1000
            assert time == pytest.approx(1000 * each)  # microseconds of one of three
            assert len(session.launches) == before + 5 and torch.equal(b, 2 * a)


def test_a_graph_of_torch_records_and_replays_launches(session) -> None:
    a, b = vectors()
    chosen, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    handle = cuda.CUstream(chosen.cuda_stream)
    compiled = cute.compile(kernels.launch_double, from_dlpack(a), from_dlpack(b), handle)
    with torch.cuda.graph(graph, stream=chosen):
        compiled(from_dlpack(a), from_dlpack(b), handle)
    assert not session.launches and not b.any()
    graph.replay()
    graph.replay()
    assert len(session.launches) == 2 and torch.equal(b, 2 * a)
    with pytest.raises(TargetError, match=r"torch's \w+ on CUDA tensors cannot be captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            a + 1
    assert (a + 1).is_cuda


def test_hardware_info_is_that_of_the_chosen_gpu() -> None:
    from cutlass.utils import HardwareInfo

    for arch, count in (("sm_90a", 132), ("sm_100a", 148)):
        with simulated_gpu(arch) as session:
            info = HardwareInfo()
            assert info.get_device_multiprocessor_count() == count
            assert [info.get_max_active_clusters(n) for n in (1, 2, 4, 16)] == [count // n for n in (1, 2, 4, 16)]
            assert info.get_max_active_clusters(32) == 0
            assert info.get_l2_cache_size_in_bytes() == session.device.l2_bytes
            assert cutlass.cuda.initialize_cuda_context() is not None


def test_memory_of_the_bindings(session) -> None:
    error, address = cuda.cuMemAlloc(64)
    assert error == cuda.CUresult.CUDA_SUCCESS and int(address) % 512 == 0
    assert cuda.cuMemsetD32(address, 0x40000000, 16) == (cuda.CUresult.CUDA_SUCCESS,)
    out = np.zeros(16, np.float32)
    cuda.cuMemcpyDtoH(out, address, 64)
    assert (out == 2.0).all()
    assert cuda.cuMemFree(address)[0] == cuda.CUresult.CUDA_SUCCESS
    assert cuda.cuMemFree(address)[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    error, pointer = runtime.cudaMalloc(128)
    runtime.cudaMemset(pointer, 1, 128)
    target = make_ptr(cutlass.Int8, pointer, cute.AddressSpace.gmem, assumed_align=16)
    assert session.memory.used() >= 128 and "128 bytes" in session.memory.snapshot().describe(int(target._pointer))
    assert runtime.cudaFree(pointer) == (runtime.cudaError_t.cudaSuccess,)
    with pytest.raises(TargetError, match="cuModuleLoadData is not modelled"):
        cuda.cuModuleLoadData(b"")
    assert runtime.cudaGetDeviceCount() == (runtime.cudaError_t.cudaSuccess, 1)


def test_the_own_api_works_inside(session) -> None:
    """On CPU tensors with ``backend="sim"``, and on the session's CUDA tensors as on a GPU."""

    def operand(rows: int, device: str) -> BlockScaledTensor:
        random = torch.Generator().manual_seed(rows)
        data = torch.randint(0, 256, (rows, 128), dtype=torch.uint8, generator=random)
        scale = torch.randint(0, 120, (rows, 16), dtype=torch.uint8, generator=random)
        return BlockScaledTensor(data.to(device), scale.view(torch.float8_e4m3fn).to(device), format=NVFP4)

    want = gemv(operand(130, "cpu"), operand(1, "cpu"), backend="sim")
    assert want.is_cpu and not session.launches
    got = gemv(operand(130, "cuda"), operand(1, "cuda"))
    assert got.is_cuda and session.launches and torch.equal(got.cpu(), want)


def test_functions_of_an_ended_session_say_so(session) -> None:
    a, b = vectors()
    compiled = cute.compile(kernels.launch_double, from_dlpack(a), from_dlpack(b), stream())
    compiled(from_dlpack(a), from_dlpack(b), stream())
    session.active = False
    with pytest.raises(TargetError, match="session that has ended"):
        compiled(from_dlpack(a), from_dlpack(b), stream())


def test_the_dsl_is_as_before_after_a_session(monkeypatch) -> None:
    from cutlass.base_dsl.compiler import CompileOptions
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Compiled

    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    dsl = CuTeDSL._get_dsl()

    def state() -> list:
        owned = [Compiled.to, Compiled.__call__, Compiled.__init__, CompileOptions.apply_envar_settings]
        return [*owned, cuda.cuInit, runtime.cudaMalloc, cutlass.testing.benchmark, dsl.jit_cache, dsl.envar._arch]

    before = state()
    with simulated_gpu("sm_103a"):
        assert dsl.envar.arch == "sm_103a" and all(x is not y for x, y in zip(state(), before))
    assert state() == before
    import os

    assert os.environ["CUTE_DSL_ARCH"] == "sm_80" and "CUTE_DSL_DISABLE_FILE_CACHING" not in os.environ


def test_launches_can_be_recorded_without_running_them() -> None:
    seen = []
    with simulated_gpu(execute=False, observe=lambda r: seen.append(r.ended)) as session:
        a, b = vectors()
        kernels.launch_both(from_dlpack(a), from_dlpack(b))
        assert len(session.launches) == 3 and session.instructions == 0 and not b.any()
    assert seen == [False, True] * 3

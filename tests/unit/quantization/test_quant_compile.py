"""The torch backend under ``torch.compile``: one graph, and the bits of eager torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from quantize_problems import edges, near_ties

from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.quantization import blocks, explain_backend, fake_quantize, mx, quantize, rules_of
from cute_nvfp4.quantization.rounding import divide, reciprocal, rounded

COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))
needs_compiler = pytest.mark.skipif(not COMPILER, reason="inductor needs a C++ compiler")
ALL_RULES = [
    (fmt, rule) for fmt in ("nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2") for rule in rules_of(fmt) if rule != "hessian"
]
GLOBAL_SCALE = 0.0014142135
# gcc may then make fused multiply-adds, as what Triton makes of a graph always may
CONTRACT = {"cpp.enable_floating_point_contract_flag": "fast"}
OPTIONS = [
    {},
    {"block_2d": True},
    {"transpose": True, "pad": True},
    {"hadamard": 3},
    {"rounding": "stochastic", "generator": 7},
    {"scale_layout": "rowmajor"},
    {"global_scale": GLOBAL_SCALE},
    {"global_scale": None},
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def problem() -> torch.Tensor:
    """(rows, 512) with everything that rounds, overflows or vanishes, near ties, and many random blocks."""
    random = torch.randn(1024, 512, generator=torch.Generator().manual_seed(1))
    return torch.cat((edges(129, 512), near_ties(torch.float32, GLOBAL_SCALE), random))


def differences(x: torch.Tensor, compiled: Callable, plain: Callable) -> list[int]:
    """Bytes of data, of scales, and of the global scale that are not equal."""
    got, want = compiled(x), plain(x)
    assert (got.global_scale is None) == (want.global_scale is None)
    numbers = [] if want.global_scale is None else [int(not torch.equal(got.global_scale, want.global_scale))]
    return [int((got.data != want.data).sum()), int((got.scale != want.scale).sum()), *numbers]


def check(fmt: str, rule: str, device: str = "cpu", compile_options: dict | None = None, **options: object) -> None:
    def plain(x: torch.Tensor) -> BlockScaledTensor:
        return quantize(x, fmt, rule, backend="torch", **options)

    compiled = torch.compile(plain, fullgraph=True, options=compile_options)
    for x in (problem(), problem().bfloat16()):
        assert sum(differences(x.to(device), compiled, plain)) == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_graph(options: dict) -> None:
    """Nothing in it depends on what torch does not know when it traces."""
    for fmt, rule in (("nvfp4", "max"), ("nvfp4", "four_six_mse"), ("nvfp4", "optimal"), ("mxfp4", "optimal")):
        if fmt == "mxfp4" and options.get("global_scale"):
            continue

        def plain(x: torch.Tensor, fmt: str = fmt, rule: str = rule) -> BlockScaledTensor:
            return quantize(x, fmt, rule, backend="torch", **options)

        compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
        assert sum(differences(edges(64, 544), compiled, plain)) == 0


@needs_compiler
@pytest.mark.parametrize(
    ("fmt", "rule"),
    [
        pytest.param(fmt, rule, marks=() if (fmt, rule) in {("nvfp4", "max"), ("mxfp4", "rceil")} else pytest.mark.slow)
        for fmt, rule in ALL_RULES
    ],
)
def test_bits_on_the_cpu(fmt: str, rule: str) -> None:
    check(fmt, rule, compile_options=CONTRACT)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_of_the_options_on_the_cpu(options: dict) -> None:
    check("nvfp4", "four_six_mae", compile_options=CONTRACT, **options)


@needs_compiler
def test_fused_multiply_adds_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``rounded``, a compiler that may fuse does, and blocks change."""

    def plain(x: torch.Tensor) -> BlockScaledTensor:
        return quantize(x, rule="four_six_mae", global_scale=GLOBAL_SCALE, backend="torch")

    x = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(1))
    assert sum(differences(x, torch.compile(plain, options=CONTRACT), plain)) == 0
    monkeypatch.setattr(blocks, "rounded", lambda product: product)
    torch._dynamo.reset()
    assert sum(differences(x, torch.compile(plain, options=CONTRACT), plain)) > 0


@needs_compiler
def test_gradient_of_compiled_fake_quantization() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    compiled = torch.compile(lambda x: fake_quantize(x, rule="max"), fullgraph=True)
    y = compiled(x)
    y.backward(torch.arange(64.0).expand_as(y))
    assert torch.equal(y, fake_quantize(x, rule="max")) and torch.equal(x.grad, torch.arange(64.0).expand_as(y))


def test_quotients_by_float64_are_rounded_once() -> None:
    """What compiled code computes instead of a float32 division: for every divisor there is, and with reciprocals."""
    bits = torch.randint(0, 0x7F800000, (1 << 20,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    x = torch.cat((bits, torch.arange(0x800000, 0x840000, dtype=torch.int32))).view(torch.float32)
    for divisor in (6.0, 4.0, 448.0, 57344.0, 6 * 448.0, 4 * 448.0, 6 * 256.0):
        wide = x.double()
        for quotient in (wide / divisor, wide * (1.0 / divisor)):
            # a subnormal quotient by a reciprocal may be a neighbour: no scale is that small
            normal = x >= divisor * 2.0**-126
            assert torch.equal(quotient.float()[normal], divide(x, divisor)[normal])
    assert torch.equal((1.0 / x.double()).float(), reciprocal(x))
    assert rounded(x) is x


@pytest.mark.parametrize(
    "options",
    [{}, {"rounding": "stochastic", "generator": 7}, {"global_scale": 0.01, "scale_layout": "rowmajor"}],
    ids=str,
)
def test_the_fused_kernels_are_an_operator(options: dict) -> None:
    x = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    compiled = torch.compile(lambda x: quantize(x, backend="sim", **options), fullgraph=True, backend="aot_eager")
    assert sum(differences(x, compiled, lambda x: quantize(x, backend="torch", **options))) == 0


def test_dynamic_sizes() -> None:
    compiled = torch.compile(lambda x: quantize(x), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, k in ((48, 64), (129, 544), (3, 16)):
        assert sum(differences(edges(129, 544)[:rows, :k], compiled, quantize)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "rule"), ALL_RULES)
def test_bits_on_the_gpu(fmt: str, rule: str) -> None:
    check(fmt, rule, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_of_the_options_on_the_gpu(options: dict) -> None:
    check("nvfp4", "four_six_mse", "cuda", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rounded", "reciprocal", "divide"])
def test_what_triton_would_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused multiply-adds and approximate divisions, without what keeps them away."""
    mutations = {"rounded": lambda p: p, "reciprocal": lambda x: 1.0 / x, "divide": lambda x, by: x / by}
    for module in (blocks, mx):
        monkeypatch.setattr(module, name, mutations[name], raising=False)

    def plain(x: torch.Tensor) -> BlockScaledTensor:
        return quantize(x, rule="four_six_mse", global_scale=GLOBAL_SCALE, backend="torch")

    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(1)).cuda()
    compiled = torch.compile(plain)(x)
    monkeypatch.undo()
    assert sum(differences(x, lambda x: compiled, plain)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_the_fused_kernels_in_a_compiled_graph(backend: str) -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).cuda()
    compiled = torch.compile(lambda x: quantize(x, backend=backend), fullgraph=True)
    assert explain_backend(x) == ("cuda", "")
    assert sum(differences(x, compiled, lambda x: quantize(x, backend="torch"))) == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x)
    assert any("quantize" in event.key.lower() for event in profile.key_averages())

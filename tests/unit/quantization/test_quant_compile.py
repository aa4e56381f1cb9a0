"""The reference under ``torch.compile``: one graph, and the bits of eager torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from support.compilers import needs_compiler
from support.quantize_problems import edges, near_ties

from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.nn.training import (
    LinearRecipe,
    fake_quantize,
    quantized_linear,
)
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.quantize import (
    explain_backend,
    quantize,
)
from cute_nvfp4.quantization import block_request, blocks
from cute_nvfp4.quantization.rounding import divide, reciprocal, rounded
from cute_nvfp4.quantization.rules import rules_of

ALL_RULES = [
    (fmt, rule) for fmt in ("nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2") for rule in rules_of(fmt) if rule != "hessian"
]
OFTEN = (("nvfp4", "four_six_mse", torch.float32), ("nvfp4", "max", torch.bfloat16))
"""What the default run compiles for the processor, which takes a compiler of C++ up to half a minute: the longest rule,
and the other dtype."""
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
    # blocked scales may be flat: then their view is the same
    scales = [y.blocked_scale() if y.scale_layout == "blocked" else y.scale for y in (got, want)]
    return [int((got.data != want.data).sum()), int((scales[0] != scales[1]).sum()), *numbers]


DTYPES = (torch.float32, torch.bfloat16)


def check(
    fmt: str,
    rule: str,
    device: str = "cpu",
    compile_options: dict | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    **options: object,
) -> None:
    def plain(x: torch.Tensor) -> BlockScaledTensor:
        return quantize(x, fmt, rule, backend="reference", **options)

    compiled = torch.compile(plain, fullgraph=True, options=compile_options)
    for dtype in dtypes:
        assert sum(differences(problem().to(dtype).to(device), compiled, plain)) == 0


@pytest.mark.sweep
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("fmt", "rule"), [("nvfp4", "four_six_mse"), ("nvfp4", "optimal"), ("mxfp4", "rceil")])
def test_one_graph(fmt: str, rule: str, options: dict) -> None:
    """Nothing in it depends on what torch does not know when it traces."""
    options = {name: value for name, value in options.items() if name != "global_scale" or fmt == "nvfp4"}

    def plain(x: torch.Tensor) -> BlockScaledTensor:
        return quantize(x, fmt, rule, backend="reference", **options)

    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    assert sum(differences(edges(32, 544), compiled, plain)) == 0


@needs_compiler
@pytest.mark.parametrize(
    ("fmt", "rule", "dtype"),
    [
        pytest.param(fmt, rule, dtype, marks=() if (fmt, rule, dtype) in OFTEN else pytest.mark.slow)
        for (fmt, rule), dtype in itertools.product(ALL_RULES, DTYPES)
    ],
    ids=str,
)
def test_bits_on_the_cpu(fmt: str, rule: str, dtype: torch.dtype) -> None:
    check(fmt, rule, compile_options=CONTRACT, dtypes=[dtype])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_of_the_options_on_the_cpu(options: dict) -> None:
    check("nvfp4", "four_six_mae", compile_options=CONTRACT, **options)


@needs_compiler
@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fused_multiply_adds_would_show(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``rounded``, a compiler that may fuse does, and blocks change: some few of a hundred thousand. With it,
    which ``test_bits_on_the_cpu`` tests too, none does."""

    def plain(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = quantize(x, rule="four_six_mae", global_scale=scale, backend="reference")
        return q.data, q.scale

    x = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(1))
    scales = [torch.tensor(value) for value in (0.00141421, 0.0023, 0.003)]
    for module in () if kept else (blocks, block_request):
        monkeypatch.setattr(module, "rounded", lambda product: product)
    compiled = torch.compile(plain, fullgraph=True, options=CONTRACT)
    pairs = [zip(compiled(x, scale), plain(x, scale)) for scale in scales]
    changed = sum(int((got != want).sum()) for pair in pairs for got, want in pair)
    assert (changed == 0) == kept


LINEAR = torch.nn.Linear(64, 32)
DIFFERENTIABLE = {
    "fake_quantize": fake_quantize,
    "fake_quantize, transposed": lambda x: fake_quantize(x, transpose=True),
    "quantized_linear": lambda x: quantized_linear(
        x, LINEAR.weight, LINEAR.bias, LinearRecipe(gradient_rounding="nearest")
    ),
    "NVFP4Linear": NVFP4Linear.from_linear(LINEAR),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    plain = DIFFERENTIABLE[name]
    found = []
    for function in (plain, torch.compile(plain, backend="aot_eager")):
        x = torch.randn(48, 64, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        LINEAR.zero_grad()
        y = function(x)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(dtype))
        found.append([y.detach(), x.grad, *(p.grad for p in LINEAR.parameters() if p.grad is not None)])
    assert all(got.any() and torch.equal(got, want) for got, want in zip(*reversed(found), strict=True))


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
    assert sum(differences(x, compiled, lambda x: quantize(x, backend="reference", **options))) == 0


@pytest.mark.slow
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
@pytest.mark.parametrize(("name", "rule"), [("rounded", "four_six_mae"), ("divide", "four_six_mse")])
def test_what_triton_would_change(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused multiply-adds, and divisions by a constant made products, without what keeps them away.

    A quotient of tensors comes out right without ``reciprocal``, as far as was seen, but Triton does not promise it.
    """
    mutations = {"rounded": lambda product: product, "divide": lambda x, by: x / by}
    scale = torch.tensor(6.1803 / 2688, device="cuda")
    x = torch.randn(8192, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(3))

    def plain(x: torch.Tensor) -> BlockScaledTensor:
        return quantize(x, rule=rule, global_scale=scale, backend="reference")

    assert sum(differences(x, torch.compile(plain, fullgraph=True), plain)) == 0
    for module in (blocks, block_request):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, mutations[name])
    torch._dynamo.reset()
    changed = torch.compile(plain, fullgraph=True)(x)
    monkeypatch.undo()
    assert sum(differences(x, lambda x: changed, plain)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_the_fused_kernels_in_a_compiled_graph(backend: str) -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).cuda()
    compiled = torch.compile(lambda x: quantize(x, backend=backend), fullgraph=True)
    assert explain_backend(x) == ("cuda", "")
    assert sum(differences(x, compiled, lambda x: quantize(x, backend="reference"))) == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x)
    assert any("quantize" in event.key.lower() for event in profile.key_averages())

"""Bad input to gemm(): a clear error that says what was got and what was expected, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import gemm_problems
from support.gemm_problems import Case, make

from cute_nvfp4 import gemm, simulating
from cute_nvfp4.errors import OperandError, OperandTypeError, TargetError
from cute_nvfp4.formats import MXFP4, MXFP8, NVFP4, Format
from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.planning.gemm_problem import Plan
from cute_nvfp4.runtime import kernel
from cute_nvfp4.scale_layout import to_blocked

pytestmark = pytest.mark.usefixtures("simulated")
M, N, K = 20, 24, 64


def u8(*shape: int) -> torch.Tensor:
    return torch.randint(0, 120, shape, dtype=torch.uint8)


def operand(
    rows: int = M, k: int = K, batch: int | None = 2, fmt: Format = NVFP4, device: str = "cpu", blocked: bool = True
) -> BlockScaledTensor:
    lead = () if batch is None else (batch,)
    scale = u8(*lead, rows, fmt.scale_columns(k))
    if blocked:
        scale = to_blocked(scale)
    return BlockScaledTensor(u8(*lead, rows, fmt.data_columns(k)).to(device), scale.to(device), None, fmt)


def out(*shape: int, dtype: torch.dtype = torch.float16, **options) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, **options)


@pytest.fixture
def compiles() -> None:
    """Asked for by the tests that compile a kernel."""


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Input is refused before it costs seconds."""
    if "compiles" in request.fixturenames:
        with simulating():
            yield
        return

    def build(*args: object, **options: object) -> None:
        raise AssertionError(f"{options} was compiled")

    monkeypatch.setattr(kernel, "build", build)
    monkeypatch.setattr(kernel, "compile_cached", lambda key, builder: builder())
    with simulating():
        yield


# --- operands


def test_operands_must_be_operands() -> None:
    message = r"a: got Tensor, expected BlockScaledTensor. quantize\(a\) makes one; .* prepare_weight"
    with pytest.raises(OperandTypeError, match=message):
        gemm(u8(M, K // 2), operand())
    with pytest.raises(OperandTypeError, match=r"b: got NoneType, expected BlockScaledTensor"):
        gemm(operand(), None)


@pytest.mark.parametrize(
    "a,b,message",
    [
        ({}, {"k": 96}, r"K of a and b: got 64 and 96, expected the same"),
        ({}, {"batch": 3}, r"batch of a and b: got 2 and 3, expected the same"),
        ({"batch": None}, {"batch": 1}, r"batch dimension: got a 2-d, b 3-d, expected the same"),
        ({"device": "meta"}, {}, r"device of a and b: got meta and cpu, expected the same"),
        ({"k": 16}, {"k": 16}, r"K of a: got 16, expected a multiple of 32.*Pad K"),
        ({"k": 48}, {"k": 48}, r"K of a: got 48, expected a multiple of 32"),
        ({"fmt": MXFP4}, {}, r"formats of a and b: got mxfp4 and nvfp4, expected mxfp4 and mxfp4 or mxfp8 or"),
        ({"fmt": MXFP8}, {}, r"formats of a and b: got mxfp8 and nvfp4, expected mxfp8 and mxfp4 or"),
        ({"fmt": MXFP8}, {"fmt": MXFP4}, r"K of a: got 64, expected a multiple of 128: TMA unpacks .*Pad K"),
        ({"blocked": False}, {}, r"scales of a: got rowmajor, expected blocked.*scale_layout.to_blocked"),
        ({}, {"blocked": False}, r"scales of b: got rowmajor, expected blocked"),
    ],
)
def test_operands_that_cannot_be_multiplied(a: dict, b: dict, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        gemm(operand(**a), operand(rows=N, **b))


def test_rows_aligned_to_eight_bytes() -> None:
    """An operand may have them, TMA may not."""
    data = u8(M, K // 2 + 8)[:, : K // 2]
    with pytest.raises(OperandError, match=r"alignment of b: got address .*\(40, 1\), expected multiples of 16 bytes"):
        gemm(operand(batch=None), BlockScaledTensor(data, to_blocked(u8(M, K // 16))))


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("code", [0x80, 0xB8, 0xFF])
def test_negative_scales(which: str, code: int) -> None:
    """Also minus zero and the NaN with a sign."""
    operands = {"a": operand(), "b": operand(rows=N)}
    operands[which].scale[3, 0, 0, 1, 0, 1] = code
    with pytest.raises(OperandError, match=rf"scales of {which}: got 1 negative ones, expected none.*unsigned"):
        gemm(**operands)


# --- output


@pytest.mark.parametrize(
    "bad,error,message",
    [
        (lambda: out(2, M, N + 1), OperandError, r"shape of out: got \(2, 20, 25\), expected \(2, 20, 24\)"),
        (lambda: out(2, N, M), OperandError, r"shape of out: got \(2, 24, 20\), expected \(2, 20, 24\)"),
        (lambda: out(M, N), OperandError, r"shape of out: got \(20, 24\), expected \(2, 20, 24\)"),
        (lambda: out(2, M, N, dtype=torch.float64), OperandTypeError, r"dtype of out: got torch.float64, expected"),
        (lambda: out(2, M, N, dtype=torch.int8), OperandTypeError, r"dtype of out: got torch.int8, expected"),
        (lambda: out(2, M, N, device="meta"), OperandError, r"device of out: got meta, expected cpu"),
        (lambda: [0.0], OperandTypeError, r"out: got list, expected torch.Tensor"),
        (lambda: out(1, M, N).expand(2, M, N), OperandError, r"strides of out: got \(0, 24, 1\)"),
        (lambda: out(2, M, 1).expand(2, M, N), OperandError, r"strides of out: got .*expected no element of out"),
        (lambda: out(3 * N).as_strided((2, M, N), (M, 1, 1)), OperandError, r"strides of out: got \(20, 1, 1\)"),
        (lambda: out(2, M, 2 * N)[..., ::2], OperandError, r"strides of out: got .*expected 1 along M or along N"),
        (lambda: out(M, N, 2).permute(2, 0, 1), OperandError, r"strides of out: got \(1, 48, 2\), expected 1 along M"),
    ],
)
def test_bad_outputs(bad, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemm(operand(), operand(rows=N), out=bad())


def test_out_dtype() -> None:
    a, b = operand(), operand(rows=N)
    with pytest.raises(OperandTypeError, match=r"out_dtype: got torch.float64, expected torch.float16 or torch.bfl"):
        gemm(a, b, out_dtype=torch.float64)
    with pytest.raises(OperandTypeError, match=r"out_dtype: got torch.float32, expected None or torch.float16"):
        gemm(a, b, out=out(2, M, N), out_dtype=torch.float32)


@pytest.mark.parametrize("where", ["a.data", "a.scale", "b.data", "b.scale", "bias"])
def test_output_over_an_input(where: str) -> None:
    rows = 128
    a, b = operand(rows=rows, k=512, batch=None), operand(rows=rows, k=512, batch=None)
    bias = torch.zeros(rows * 33)[:rows]
    memory = {"a.data": a.data, "a.scale": a.scale, "b.data": b.data, "b.scale": b.scale, "bias": bias}[where]
    room = torch.tensor([], dtype=torch.float16).set_(memory.untyped_storage(), 0, (1,))
    # as many rows of output as fit there
    a = _first_rows(a, room.untyped_storage().nbytes() // 2 // rows)
    view = room.as_strided((a.rows, rows), (rows, 1))
    with pytest.raises(OperandError, match=rf"memory of out: got bytes .* which overlap {where} at"):
        gemm(a, b, bias=bias, out=view)


def _first_rows(x: BlockScaledTensor, rows: int) -> BlockScaledTensor:
    """``x`` without its last rows, in the same memory (of one block of rows, scales are the same)."""
    return BlockScaledTensor(x.data[: max(1, min(rows, x.rows))], x.scale, x.global_scale, x.format)


# --- alpha, bias


@pytest.mark.parametrize(
    "alpha,error,message",
    [
        ("2", OperandTypeError, r"alpha: got str, expected a Python number"),
        (True, OperandTypeError, r"alpha: got bool"),
        (1j, OperandTypeError, r"alpha: got complex"),
        ([1.0], OperandTypeError, r"alpha: got list"),
        (torch.ones(1, dtype=torch.float64), OperandTypeError, r"alpha: got torch.float64, expected torch.float32"),
        (torch.ones(1, dtype=torch.float16), OperandTypeError, r"alpha: got torch.float16, expected torch.float32"),
        (torch.ones(2), OperandError, r"alpha: got shape \(2,\), expected one element"),
        (torch.ones(0), OperandError, r"alpha: got shape \(0,\), expected one element"),
        (torch.ones(1, device="meta"), OperandError, r"device of alpha: got meta, expected cpu"),
    ],
)
def test_bad_alpha(alpha: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemm(operand(), operand(rows=N), alpha=alpha)


@pytest.mark.parametrize(
    "bias,error,message",
    [
        (1.0, OperandTypeError, r"bias: got float, expected torch.Tensor"),
        (torch.zeros(M), OperandError, r"shape of bias: got \(20,\), expected \(24,\) or \(2, 24\)"),
        (torch.zeros(1, N), OperandError, r"shape of bias: got \(1, 24\), expected \(24,\) or \(2, 24\)"),
        (torch.zeros(2, M, N), OperandError, r"shape of bias: got \(2, 20, 24\), expected"),
        (torch.zeros(N, dtype=torch.float64), OperandTypeError, r"dtype of bias: got torch.float64, expected"),
        (torch.zeros(N, dtype=torch.int32), OperandTypeError, r"dtype of bias: got torch.int32, expected"),
        (torch.zeros(2 * N)[::2], OperandError, r"stride of bias along N: got 2, expected 1"),
        (torch.zeros(1).expand(N), OperandError, r"stride of bias along N: got 0, expected 1"),
        (torch.zeros(N, device="meta"), OperandError, r"device of bias: got meta, expected cpu"),
    ],
)
def test_bad_bias(bias: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemm(operand(), operand(rows=N), bias=bias)


def test_no_bias_for_each_of_a_batch_without_one() -> None:
    with pytest.raises(OperandError, match=r"shape of bias: got \(1, 24\), expected \(24,\)"):
        gemm(operand(batch=None), operand(rows=N, batch=None), bias=torch.zeros(1, N))


# --- plan, backend, architecture


@pytest.mark.parametrize(
    "plan,error,message",
    [
        (GemmConfig(), OperandTypeError, r"config: got GemmConfig, expected a Plan"),
        ("fast", OperandTypeError, r"config: got str, expected a Plan"),
        (["fast"], OperandTypeError, r"config: got list, expected a Plan"),
        (Plan(GemmConfig(), False, 0), OperandError, r"workers: got 0, expected at least 1"),
        (
            Plan(GemmConfig(split_k=2), False, 1),
            OperandError,
            r"split_k: got 2, expected at most 1, the k-tiles of K = 64",
        ),
        (Plan(GemmConfig(scheduler="stream_k"), False, 149), OperandError, r"stream_k launch: got 149, .* 148"),
    ],
)
def test_bad_plans(plan: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemm(operand(), operand(rows=N), config=plan)


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(
    "changes,message",
    [
        ({"tile_n": 96}, r"tile_n: got 96, expected one of 64, 128, 192, 256"),
        ({"pair": True}, r"CTAs of a cluster along M: got 1, expected an even number"),
        ({"stages": 12}, r"shared memory: got 12 stages of 36864 .* too many"),
        ({"tile_n": 256, "acc_stages": 2}, r"tensor memory: got 2 accumulators .* 48 too many"),
    ],
)
def test_plans_no_kernel_can_be_made_of(changes: dict, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        gemm(operand(), operand(rows=N), config=Plan(GemmConfig(**changes), False, 1))


@pytest.mark.usefixtures("compiles")
def test_backends() -> None:
    a, b = operand(), operand(rows=N)
    with pytest.raises(TargetError, match=r"backend='cuda': got cpu, expected a CUDA device"):
        gemm(a, b, backend="cuda")
    with pytest.raises(TargetError, match=r"backend: got 'gpu', expected one of auto, cuda, sim, reference"):
        gemm(a, b, backend="gpu")
    with pytest.raises(TargetError, match=r"device of the operands: got meta, expected cuda or cpu"):
        gemm(operand(device="meta"), operand(rows=N, device="meta"))
    for text in ("out=new", "out=strided columns,bias=batch,batch=2,alpha=1e-4,alpha_tensor=True,dtype=float16"):
        problem = make(Case.parse(f"m=20,n=24,k=64,{text}"))
        gemm_problems.check(problem, problem.run(backend="reference"))
    with pytest.raises(OperandError, match=r"config: got a Plan with backend 'reference', .* expected None"):
        gemm(a, b, config=Plan(GemmConfig(), False, 1), backend="reference")


# --- what is accepted


@pytest.mark.usefixtures("compiles")
def test_views_and_torch_dtypes_are_as_their_copies() -> None:
    """Every other row, the middle of longer rows, torch's dtypes, flat scales."""
    data, scale = u8(2 * M, K), u8(M, K // 16)
    b = operand(rows=N, batch=None)
    for view in (data[::2, : K // 2], data[M:, 16 : 16 + K // 2]):
        expected = gemm(BlockScaledTensor(view.contiguous(), to_blocked(scale)), b, out_dtype=torch.float32)
        blocked = to_blocked(scale)
        flat = blocked.permute(5, 2, 4, 0, 1, 3).reshape(-1)
        typed = view.view(torch.float4_e2m1fn_x2), blocked.view(torch.float8_e4m3fn)
        for operands in ((view, blocked), (view, flat), typed):
            assert gemm(BlockScaledTensor(*operands), b, out_dtype=torch.float32).equal(expected)
        assert expected.isfinite().all() and (expected != 0).any()


@pytest.mark.usefixtures("compiles")
def test_out_is_what_is_returned() -> None:
    a, b, c = operand(batch=None), operand(rows=N, batch=None), out(M, N)
    assert gemm(a, b, out=c) is c
    assert gemm(a, b).dtype is torch.float16 and gemm(a, b).equal(c)

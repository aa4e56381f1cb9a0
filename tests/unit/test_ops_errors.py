"""Bad input to gemv(): a clear error that says what was got and what was expected, or the right answer."""

from __future__ import annotations

import pytest
import torch
from support import gemv_problems
from support.gemv_problems import Case, make

from cute_nvfp4 import gemv
from cute_nvfp4.errors import OperandError, OperandTypeError, TargetError
from cute_nvfp4.formats import MXFP4, MXFP8
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.gemv import compile_gemv
from cute_nvfp4.runtime.simulating import SimulatedLaunch
from cute_nvfp4.scale_layout import to_blocked

pytestmark = pytest.mark.usefixtures("simulated")
M, K = 20, 64


def u8(*shape: int) -> torch.Tensor:
    return torch.randint(0, 120, shape, dtype=torch.uint8)


def operand(rows: int = M, k: int = K, batch: int | None = 2, device: str = "cpu") -> BlockScaledTensor:
    lead = () if batch is None else (batch,)
    return BlockScaledTensor(u8(*lead, rows, k // 2).to(device), u8(*lead, rows, k // 16).to(device))


def out(*shape: int, dtype: torch.dtype = torch.float16, **options) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, **options)


# --- operands that do not fit together


def test_operands_must_be_operands() -> None:
    with pytest.raises(OperandTypeError, match=r"a: got Tensor, expected BlockScaledTensor"):
        gemv(u8(M, K // 2), operand())
    with pytest.raises(OperandTypeError, match=r"b: got NoneType, expected BlockScaledTensor"):
        gemv(operand(), None)


@pytest.mark.parametrize(
    "a,b,message",
    [
        ({}, {"k": 80}, r"K of a and b: got 64 and 80, expected the same"),
        ({}, {"batch": 3}, r"batch of a and b: got 2 and 3, expected the same"),
        ({"batch": None}, {"batch": 1}, r"batch dimension: got a 2-d, b 3-d, expected the same"),
        ({"batch": 1}, {"batch": None}, r"batch dimension: got a 3-d, b 2-d, expected the same"),
        ({"device": "meta"}, {}, r"device of a and b: got meta and cpu, expected the same"),
    ],
)
def test_operands_must_match(a: dict, b: dict, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        gemv(operand(**a), operand(rows=1, **b))


@pytest.mark.parametrize("which", ["a", "b"])
def test_other_formats_are_refused(which: str) -> None:
    mx4 = BlockScaledTensor(u8(2, M, 32), u8(2, M, 2), format=MXFP4)
    mx8 = BlockScaledTensor(u8(2, M, 64), u8(2, M, 2), format=MXFP8)
    for mx in (mx4, mx8):
        pair = (mx, operand()) if which == "a" else (operand(), mx)
        with pytest.raises(OperandError, match=rf"format of {which}: got {mx.format.name}, expected nvfp4"):
            gemv(*pair)


# --- operands that cannot be


@pytest.mark.parametrize("k", [8, 24, 72])
def test_k_must_be_a_multiple_of_16(k: int) -> None:
    with pytest.raises(OperandError, match=rf"K of nvfp4: got {k} .*expected a multiple of 16"):
        BlockScaledTensor(u8(M, k // 2), u8(M, -(-k // 16)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float8_e4m3fn])
def test_dtype_of_data(dtype: torch.dtype) -> None:
    with pytest.raises(OperandTypeError, match=rf"data of nvfp4: got {dtype}, expected torch.float4_e2m1fn_x2"):
        BlockScaledTensor(u8(M, K // 2).to(dtype), u8(M, K // 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu])
def test_dtype_of_scales(dtype: torch.dtype) -> None:
    scale = u8(M, K // 16).to(dtype) if dtype is torch.float32 else u8(M, K // 16).view(dtype)
    with pytest.raises(OperandTypeError, match=rf"scale of nvfp4: got {dtype}, expected torch.float8_e4m3fn"):
        BlockScaledTensor(u8(M, K // 2), scale)


@pytest.mark.parametrize("shape", [(M, K // 16 + 1), (M + 1, K // 16), (2, M, K // 16), (K // 16, M)])
def test_shape_of_scales(shape: tuple) -> None:
    with pytest.raises(OperandError, match=r"scale for data of shape \(20, 32\): got shape .* expected \(20, 4\)"):
        BlockScaledTensor(u8(M, K // 2), u8(*shape))


def test_blocked_scales_of_another_matrix() -> None:
    with pytest.raises(OperandError, match=r"blocked scales of 20 rows, 4 columns, batch 1: got shape"):
        BlockScaledTensor(u8(M, K // 2), to_blocked(u8(M, 5)))
    # the right shape in the wrong order of memory
    with pytest.raises(OperandError, match=r"blocked scales of 150 rows, 8 columns, batch 1: got shape .*strides"):
        BlockScaledTensor(u8(150, 64), to_blocked(u8(150, 8)).contiguous())
    with pytest.raises(OperandError, match=r"one dimension for 20 rows, K 64, batch 1: got shape \(80,\).*\(512,\)"):
        BlockScaledTensor(u8(M, K // 2), u8(80))


def test_views_strided_along_k() -> None:
    with pytest.raises(OperandError, match=r"stride of data along K: got 2 "):
        BlockScaledTensor(u8(M, K)[:, ::2], u8(M, K // 16))
    with pytest.raises(OperandError, match=r"stride of data along K: got 20 "):
        BlockScaledTensor(u8(K // 2, M).t(), u8(M, K // 16))
    with pytest.raises(OperandError, match=r"stride of row-major scales along K: got 2 "):
        BlockScaledTensor(u8(M, K // 2), u8(M, K // 8)[:, ::2])


def test_alignment_of_data() -> None:
    with pytest.raises(OperandError, match=r"alignment of data: got address .* expected multiples of 8 bytes"):
        BlockScaledTensor(u8(M, K // 2 + 8)[:, 4:-4], u8(M, K // 16))


# --- views that are right


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_views_strided_along_rows(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other row, rows backwards through an index, columns out of the middle, batch last: as their copies."""
    monkeypatch.setenv("CUTE_NVFP4_ARCH", arch)
    data, scale, b = u8(2, 2 * M, K), u8(2, 2 * M, K // 8), operand(rows=128)
    views = [
        (data[:, ::2, : K // 2], scale[:, ::2, : K // 16]),
        (data[:, M:, K // 4 : 3 * K // 4], scale[:, M:, 1:5]),
        (data[:1, :M, : K // 2].expand(2, -1, -1), scale[:1, :M, : K // 16].expand(2, -1, -1)),
        (data.transpose(0, 1).contiguous().transpose(0, 1)[:, :M, : K // 2], scale[:, :M, : K // 16]),
    ]
    for x, s in views:
        expected = gemv(BlockScaledTensor(x.contiguous(), s.contiguous()), b, out_dtype=torch.float32)
        assert gemv(BlockScaledTensor(x, s), b, out_dtype=torch.float32).equal(expected)
        assert expected.isfinite().all() and (expected != 0).any()


# --- output


@pytest.mark.parametrize(
    "bad,error,message",
    [
        (lambda: out(2, M + 1), OperandError, r"shape of out: got \(2, 21\), expected \(2, 20\)"),
        (lambda: out(M, 2), OperandError, r"shape of out: got \(20, 2\), expected \(2, 20\)"),
        (lambda: out(2, M, 1), OperandError, r"shape of out: got \(2, 20, 1\), expected \(2, 20\)"),
        (
            lambda: out(2, M, dtype=torch.float64),
            OperandTypeError,
            r"dtype of out: got torch.float64, expected torch.f",
        ),
        (lambda: out(2, M, dtype=torch.int32), OperandTypeError, r"dtype of out: got torch.int32"),
        (lambda: out(2, M, device="meta"), OperandError, r"device of out: got meta, expected cpu"),
        (lambda: [[0.0] * M] * 2, OperandTypeError, r"out: got list, expected torch.Tensor"),
        (lambda: out(1, M).expand(2, M), OperandError, r"strides of out: got \(0, 1\) for shape \(2, 20\)"),
        (lambda: out(2, 1).expand(2, M), OperandError, r"strides of out: got .*expected no element of out"),
        (lambda: out(M + 1).as_strided((2, M), (1, 1)), OperandError, r"strides of out: got \(1, 1\)"),
    ],
)
def test_bad_outputs(bad, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemv(operand(), operand(rows=1), out=bad())


def test_out_dtype() -> None:
    with pytest.raises(
        OperandTypeError, match=r"out_dtype: got torch.float64, expected torch.float16 or torch.bfloat16"
    ):
        gemv(operand(), operand(), out_dtype=torch.float64)
    with pytest.raises(OperandTypeError, match=r"out_dtype: got torch.float32, expected None or torch.float16"):
        gemv(operand(), operand(), out=out(2, M), out_dtype=torch.float32)


@pytest.mark.parametrize("where", ["a.data", "a.scale", "b.data", "b.scale", "b.global_scale"])
def test_output_over_an_operand(where: str) -> None:
    a = operand(rows=64, k=128)
    b = BlockScaledTensor(u8(2, 4, 64), u8(2, 4, 8), torch.ones(1))
    side, part = where.split(".")
    memory = getattr({"a": a, "b": b}[side], part).untyped_storage()
    first = torch.tensor([], dtype=torch.float16).set_(memory, 0, (1,))
    # from two bytes into the operand on: an overlap of any part is one
    room = first.as_strided((2, 64), (64, 1)) if memory.nbytes() >= 256 else first.as_strided((1,), (1,))
    if room.numel() == 1:
        a, b = (BlockScaledTensor(x.data[0, :1], x.scale[0, :1], x.global_scale) for x in (a, b))
    with pytest.raises(OperandError, match=rf"memory of out: got bytes .* which overlap {where} at"):
        gemv(a, b, out=room)


def test_output_beside_an_operand() -> None:
    """In one storage, but not in the same bytes: allowed, and right."""
    room = torch.zeros(2 * M * K // 2 + 4 * M, dtype=torch.uint8)
    data = room[: 2 * M * K // 2].view(2, M, K // 2)
    data.copy_(u8(2, M, K // 2))
    a, b = BlockScaledTensor(data, u8(2, M, K // 16)), operand(rows=1)
    c = room[2 * M * K // 2 :].view(torch.float16).view(2, M)
    assert gemv(a, b, out=c) is c
    assert c.equal(gemv(BlockScaledTensor(data.clone(), a.scale), b))


@pytest.mark.parametrize("form", ["strided", "transposed", "contiguous"])
def test_outputs_of_any_strides(form: str) -> None:
    problem = make(Case(33, 128, 3, out=form))
    gemv_problems.check(problem, problem.run())


def test_out_for_one_matrix() -> None:
    a, b = operand(batch=None), operand(rows=1, batch=None)
    c = out(M)
    assert gemv(a, b, out=c) is c and c.shape == (M,)
    assert c.equal(gemv(a, b, backend="reference"))


# --- alpha, backend, architecture


@pytest.mark.parametrize("alpha", ["2", [1.0], 1j, True, torch.ones(1), None])
def test_alpha(alpha: object) -> None:
    if alpha is None:
        assert gemv(operand(), operand(), alpha=None).shape == (2, M)
        return
    with pytest.raises(OperandTypeError, match=rf"alpha: got {type(alpha).__name__}, expected a Python number"):
        gemv(operand(), operand(), alpha=alpha)


def test_alpha_of_nan_and_integers() -> None:
    a, b = operand(), operand(rows=1)
    assert gemv(a, b, alpha=float("nan")).isnan().all()
    once, twice = (gemv(a, b, alpha=x, out_dtype=torch.float32) for x in (1, 2))
    assert twice.equal(2 * once)


def test_global_scale_must_be_one_float32() -> None:
    with pytest.raises(OperandTypeError, match=r"global scale: got torch.float16, expected torch.float32"):
        BlockScaledTensor(u8(M, K // 2), u8(M, K // 16), torch.ones(1, dtype=torch.float16))
    with pytest.raises(OperandError, match=r"global scale: got shape \(2,\), expected one element"):
        BlockScaledTensor(u8(M, K // 2), u8(M, K // 16), torch.ones(2))


def test_backends(simulated: list[SimulatedLaunch]) -> None:
    a, b = operand(), operand(rows=1)
    with pytest.raises(
        TargetError, match=r"device of the operands for backend='cuda': got cpu, expected a CUDA device"
    ):
        gemv(a, b, backend="cuda")
    with pytest.raises(TargetError, match=r"backend: got 'gpu', expected one of auto, cuda, sim, reference"):
        gemv(a, b, backend="gpu")
    with pytest.raises(TargetError, match=r"device of the operands: got meta, expected cuda or cpu"):
        gemv(operand(device="meta"), operand(rows=1, device="meta"))
    assert gemv(a, b, backend="sim").equal(gemv(a, b)) and len(simulated) == 2
    close = gemv(a, b, backend="reference", out_dtype=torch.float32)
    assert len(simulated) == 2
    assert torch.allclose(gemv(a, b, out_dtype=torch.float32), close, rtol=1e-5, atol=0.05)


def test_unknown_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_NVFP4_ARCH", "sm_80")
    with pytest.raises(TargetError, match=r"architecture: got 'sm_80', expected one of sm_90a, sm_100a, sm_103a"):
        gemv(operand(), operand())


def test_limits() -> None:
    """Beyond the grid's second dimension, and beyond 32-bit offsets of scales: refused before anything is run."""
    wide = BlockScaledTensor(u8(1, 1, 8).expand(65536, 1, 8), u8(1, 1, 1).expand(65536, 1, 1))
    with pytest.raises(OperandError, match=r"batch: got 65536, expected at most 65535"):
        gemv(wide, wide)
    tall = BlockScaledTensor(u8(1, 8).expand(2**29 + 1, 8), u8(1, 1).expand(2**29 + 1, 1))
    with pytest.raises(OperandError, match=r"scales of one matrix of A: got .* bytes, expected at most 2147483647"):
        gemv(tall, operand(rows=1, k=16, batch=None))


@pytest.mark.parametrize(
    "arguments,error,message",
    [
        ({"m": 0, "k": 16}, OperandError, r"m, k, batch: got \(0, 16, 1\), expected positive"),
        ({"m": 1, "k": 24}, OperandError, r"m, k, batch: got \(1, 24, 1\), expected .*multiple of 16"),
        ({"m": 1, "k": 16, "scales": "flat"}, OperandError, r"scales: got 'flat', expected 'blocked' or 'rowmajor'"),
        ({"m": 1, "k": 16, "arch": "sm_80"}, TargetError, r"architecture: got 'sm_80'"),
        ({"m": 1, "k": 16, "out_dtype": torch.float64}, OperandTypeError, r"out_dtype: got torch.float64"),
    ],
)
def test_compile_gemv(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        compile_gemv(**{"arch": "sm_100a", **arguments})

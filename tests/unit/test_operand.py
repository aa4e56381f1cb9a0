"""What an operand accepts, what it refuses and in which words, and the values it stands for."""

from __future__ import annotations

import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.operations import Operations

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import FORMATS, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, Format
from cute_nvfp4.operand import BlockScaledTensor, check_pair
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.row_scaled import by_rows
from cute_nvfp4.scale_layout import to_blocked
from cute_nvfp4.weight_layout import PACKINGS, tiles

ELEMENTS = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
SCALES = {"e4m3": ml_dtypes.float8_e4m3fn, "ue8m0": ml_dtypes.float8_e8m0fnu}


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def parts(fmt: Format, batch: int, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code of elements and scales, NaN and infinities too: (L, rows, bytes of K), (L, rows, K / block)."""
    data = random_bytes(batch, rows, fmt.data_columns(k), seed=1)
    return data.view(fmt.data_dtype), random_bytes(batch, rows, fmt.scale_columns(k), seed=2).view(fmt.scale_dtype)


def values_by_numpy(fmt: Format, data: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """float64 values through ml_dtypes: an independent dequantization."""
    codes = data.view(torch.uint8).numpy()
    if fmt.element == "e2m1":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    elements = codes.view(ELEMENTS[fmt.element]).astype(np.float64)
    scales = np.ascontiguousarray(scale.view(torch.uint8).numpy()).view(SCALES[fmt.scale]).astype(np.float64)
    return elements * np.repeat(scales, fmt.block, axis=-1)


@pytest.fixture
def nvfp4_parts() -> tuple[torch.Tensor, torch.Tensor]:
    return parts(NVFP4, 2, 130, 96)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("layout", ["rowmajor", "blocked", "flat"])
@pytest.mark.parametrize("batched", [True, False])
def test_dequantize(fmt: Format, layout: str, batched: bool) -> None:
    data, scale = parts(fmt, 2 if batched else 1, 130, 160)
    want = values_by_numpy(fmt, data, scale)
    if not batched:
        data, scale, want = data[0], scale[0], want[0]
    if layout != "rowmajor":
        scale = to_blocked(scale)
    if layout == "flat":
        scale = scale.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).reshape(-1).view(fmt.scale_dtype)
    operand = BlockScaledTensor(data, scale, format=fmt)
    assert (operand.rows, operand.k, operand.batch) == (130, 160, 2 if batched else 1)
    assert operand.is_batched is batched
    assert operand.scale_layout == ("rowmajor" if layout == "rowmajor" else "blocked")
    np.testing.assert_array_equal(operand.dequantize(torch.float64).numpy(), want)
    with np.errstate(over="ignore"):
        want32 = want.astype(np.float32)
    got32 = operand.dequantize()
    assert got32.dtype is torch.float32
    np.testing.assert_array_equal(got32.numpy(), want32)
    # float32 is exact where it does not overflow
    finite = np.isfinite(want32)
    np.testing.assert_array_equal(want32[finite].astype(np.float64), want[finite])
    codes = BlockScaledTensor(data.view(torch.uint8), scale.view(torch.uint8), format=fmt)
    np.testing.assert_array_equal(codes.dequantize(torch.float64).numpy(), want)


def test_nvfp4_is_exact_in_sixteen_bits(nvfp4_parts) -> None:
    operand = BlockScaledTensor(*nvfp4_parts)
    for dtype in (torch.float16, torch.bfloat16):
        got = operand.dequantize(dtype)
        assert got.dtype is dtype
        np.testing.assert_array_equal(got.double().numpy(), operand.dequantize(torch.float64).numpy())


def test_nan_scale_makes_its_whole_block_nan() -> None:
    scale = torch.full((3, 2), 0x38, dtype=torch.uint8)
    scale[1, 1] = 0x7F
    values = BlockScaledTensor(torch.zeros(3, 16, dtype=torch.uint8), scale).dequantize()
    assert torch.isnan(values[1, 16:]).all()
    assert torch.isnan(values).sum() == 16


def test_global_scale_rounds_once_in_float32_and_not_in_float64(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    factor = 1 / 3
    want = values_by_numpy(NVFP4, data, scale) * np.float64(np.float32(factor))
    for shape in ((), (1,)):
        operand = BlockScaledTensor(data, scale, torch.full(shape, factor))
        np.testing.assert_array_equal(operand.dequantize(torch.float64).numpy(), want)
        np.testing.assert_array_equal(operand.dequantize().numpy(), want.astype(np.float32))


@pytest.mark.parametrize("blocked", [True, False])
def test_from_problem_is_a_view(nvfp4_parts, blocked: bool) -> None:
    data, scale = (part[:, ::2] for part in nvfp4_parts)  # every other row: only a view keeps these strides
    problem_scale = to_blocked(scale) if blocked else scale.permute(1, 2, 0)
    operand = BlockScaledTensor.from_problem(data.permute(1, 2, 0), problem_scale)
    assert operand.data.data_ptr() == data.data_ptr() and operand.scale.data_ptr() == problem_scale.data_ptr()
    assert operand.data.shape == data.shape and operand.data.stride() == data.stride()
    np.testing.assert_array_equal(operand.dequantize(torch.float64).numpy(), values_by_numpy(NVFP4, data, scale))


def test_from_problem_refuses(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    with pytest.raises(OperandError, match=r"got shape \(130, 48\), expected \(MN, K, L\)"):
        BlockScaledTensor.from_problem(data[0], scale)
    with pytest.raises(OperandError, match=r"got shape \(130, 6\), expected \(MN, K/block, L\), or blocked"):
        BlockScaledTensor.from_problem(data.permute(1, 2, 0), scale[0])
    with pytest.raises(OperandTypeError, match="got list"):
        BlockScaledTensor.from_problem([1], scale)


def test_strided_views_are_accepted_where_kernels_can_read_them() -> None:
    wide, scale = random_bytes(2, 130, 64), random_bytes(2, 130, 6)
    operand = BlockScaledTensor(wide[:, ::2, 16:48], scale[:, ::2, 1:5])
    copy = BlockScaledTensor(wide[:, ::2, 16:48].contiguous(), scale[:, ::2, 1:5].contiguous())
    np.testing.assert_array_equal(operand.dequantize().numpy(), copy.dequantize().numpy())
    repeated = BlockScaledTensor(wide[:1, :, :32].expand(3, -1, -1), scale[:1, :, :4].expand(3, -1, -1))
    assert repeated.batch == 3


def test_data_alignment() -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    base = -buffer.data_ptr() % 128
    scale = torch.zeros(2, 2, 1, dtype=torch.uint8)
    for offset, row, batch, want in ((0, 128, 256, 128), (0, 32, 256, 32), (64, 128, 256, 64), (0, 128, 264, 8)):
        data = buffer[base + offset :].as_strided((2, 2, 8), (batch, row, 1))
        assert BlockScaledTensor(data, scale).data_alignment == want
        # strides of dimensions of size 1 do not count
        assert BlockScaledTensor(data[:1, :1], scale[:1, :1]).data_alignment == min(128, 64 if offset else 128)


def refuse(error: type[Exception], match: str, *args: object, **kwargs: object) -> None:
    with pytest.raises(error, match=match) as caught:
        BlockScaledTensor(*args, **kwargs)
    assert "got" in str(caught.value) and "expected" in str(caught.value)
    assert isinstance(caught.value, TypeError if error is OperandTypeError else ValueError)


def test_refuses_wrong_types(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    codes = scale.view(torch.uint8)
    refuse(OperandTypeError, "^data: got list, expected torch.Tensor", [1], scale)
    refuse(OperandTypeError, "^scale: got ndarray, expected torch.Tensor", data, codes.numpy())
    refuse(OperandTypeError, "^format: got str", data, scale, format="nvfp4")
    refuse(OperandTypeError, "data of nvfp4: got torch.float32, expected torch.float4", torch.zeros(130, 48), scale)
    refuse(OperandTypeError, "data of mxfp8: got torch.float4_e2m1fn_x2", data, scale, format=MXFP8)
    refuse(OperandTypeError, "scale of nvfp4: got torch.float32", data, scale.float())
    refuse(OperandTypeError, "scale of nvfp4: got torch.float8_e4m3fnuz", data, codes.view(torch.float8_e4m3fnuz))
    refuse(OperandTypeError, "scale of nvfp4: got torch.float8_e8m0fnu", data, codes.view(torch.float8_e8m0fnu))
    refuse(OperandTypeError, "scale of mxfp4: got torch.float8_e4m3fn", data, scale[..., :3], format=MXFP4)


def test_what_an_operand_like_a_checked_one_must_not_be(nvfp4_parts) -> None:
    """The checks of a kind are made once; whatever they look at makes another kind."""
    data, scale = (x[0].view(torch.uint8).contiguous() for x in nvfp4_parts)
    number = torch.ones(1)
    first, second = (
        BlockScaledTensor(data, scale, number),
        BlockScaledTensor(data.clone(), scale.clone(), number.clone()),
    )
    copied = pickle.loads(pickle.dumps(second))
    assert copied.key is first.key is second.key and "key" not in second.__getstate__()
    assert (first.rows, first.k, first.scale_layout) == (second.rows, second.k, "rowmajor")
    moved = torch.zeros(data.numel() + 1, dtype=torch.uint8)[1:].view(data.shape)
    gone = data.clone()
    gone.untyped_storage().resize_(0)
    for others in (
        (moved, scale, number),
        (gone, scale, number),
        (data.to_sparse(), scale, number),
        (torch.nested.nested_tensor([data[:1], data[1:]]), scale, number),
        (data, scale[:-1], number),
        (data, scale.t().contiguous().t(), number),
        (data, scale.int(), number),
        (data, scale, torch._neg_view(number)),
        (data, scale, number.double()),
        (data, scale, torch.ones(2)),
        (data, scale, 1.0),
        (data, None, number),
    ):
        for _ in range(2):
            with pytest.raises((OperandError, OperandTypeError)):
                BlockScaledTensor(*others)
    with pytest.raises(OperandTypeError, match="format"):
        BlockScaledTensor(data, scale, None, ["nvfp4"])


def packed_weight() -> PreparedWeight:
    shape = (*tiles(48, 160), PACKINGS["nvfp4"][torch.bfloat16].tile_bytes)
    return PreparedWeight(torch.zeros(shape, dtype=torch.uint8), 48, 160, torch.bfloat16)


@pytest.mark.parametrize(
    "make",
    [lambda: BlockScaledTensor(*parts(NVFP4, 3, 7, 160)), lambda: by_rows(torch.ones(7, 160)), packed_weight],
    ids=["blocks", "rows", "weight"],
)
def test_a_key_goes_with_the_last_that_has_it(make: Callable[[], Any]) -> None:
    """Sizes that change from call to call must not fill memory."""
    operand = make()
    key = weakref.ref(operand.key)
    assert make().key is key()
    del operand
    gc.collect()
    assert key() is None


def test_refuses_wrong_data(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    codes = data.view(torch.uint8)
    refuse(OperandError, r"^data: got shape \(48,\)", codes[0, 0], scale)
    refuse(OperandError, r"^data: got shape \(1, 2, 130, 48\)", codes[None], scale)
    refuse(OperandError, "no empty dimension", codes[:, :0], scale[:, :0])
    refuse(OperandError, "K of nvfp4: got 92 .*multiple of 16", codes[..., :46], scale)
    refuse(OperandError, "K of mxfp4: got 48 .*multiple of 32", codes[..., :24], scale.view(torch.uint8), format=MXFP4)
    refuse(OperandError, "stride of data along K: got 2 ", codes[..., ::2], scale[..., ::2])
    refuse(OperandError, "stride of data along K: got 48 ", codes.transpose(1, 2)[:, :, :96], scale)


def test_refuses_misaligned_data() -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    scale = torch.zeros(2, 2, dtype=torch.uint8)
    refuse(OperandError, "alignment of data: .*multiples of 8 bytes", buffer[4:].as_strided((2, 16), (16, 1)), scale)
    refuse(OperandError, "alignment of data: .*multiples of 8 bytes", buffer.as_strided((2, 16), (20, 1)), scale)
    mx = torch.zeros(2, 1, dtype=torch.uint8)
    for fmt in (MXFP4, MXFP8, MXFP8_E5M2):
        data = buffer[8:].as_strided((2, fmt.block_bytes), (64, 1))
        refuse(OperandError, "alignment of data: .*multiples of 16 bytes", data, mx, format=fmt)
    assert BlockScaledTensor(buffer[8:].as_strided((2, 16), (24, 1)), scale).data_alignment == 8


def test_refuses_wrong_rowmajor_scale(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    refuse(OperandError, r"got shape \(2, 130, 5\), expected \(2, 130, 6\) \(row-major\)", data, scale[..., :5])
    refuse(OperandError, r"got shape \(2, 6, 130\)", data, scale.transpose(1, 2))
    refuse(OperandError, r"got shape \(130, 6\), expected \(2, 130, 6\)", data, scale[0])
    refuse(OperandError, r"got shape \(2, 130, 6\), expected \(130, 6\)", data[0], scale)
    transposed = scale.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2)
    refuse(OperandError, "stride of row-major scales along K: got 130", data, transposed)


def test_refuses_wrong_blocked_scale(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    blocked = to_blocked(scale.view(torch.uint8))
    flat = blocked.permute(5, 2, 4, 0, 1, 3).reshape(-1)
    expected = r"expected shape \(32, 4, 2, 4, 2, 2\), strides \(16, 4, 1024, 1, 512, 2048\)"
    for wrong in (
        blocked[:, :, :1],
        blocked[..., :1, :],
        blocked[..., :1],
        blocked.contiguous(),
        blocked.transpose(2, 4),
    ):
        refuse(OperandError, expected, data, wrong)
    refuse(OperandError, r"got shape \(4000,\), stride 1, expected shape \(4096,\)", data, flat[:4000])
    refuse(OperandError, "stride 2, expected", data, torch.cat((flat, flat))[::2])
    shifted = torch.cat((flat[:8], flat))[8:]
    refuse(OperandError, "alignment of blocked scales: .*multiple of 16", data, shifted)
    assert BlockScaledTensor(data, blocked).scale_layout == BlockScaledTensor(data, flat).scale_layout == "blocked"


def test_refuses_tensors_on_two_devices(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    refuse(OperandError, "device of scale: got meta, expected cpu", data, scale.to("meta"))
    refuse(OperandError, "device of scale: got cpu, expected meta", data.to("meta"), to_blocked(scale))
    refuse(OperandError, "device of global scale: got meta, expected cpu", data, scale, torch.ones((), device="meta"))


def test_refuses_wrong_global_scale(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    refuse(OperandTypeError, "global scale: got float", data, scale, 1.0)
    refuse(OperandTypeError, "global scale: got torch.float16", data, scale, torch.ones((), dtype=torch.float16))
    refuse(OperandError, r"global scale: got shape \(2,\), expected one element", data, scale, torch.ones(2))
    mx = torch.zeros(2, 130, 3, dtype=torch.uint8)
    refuse(OperandError, "global scale of mxfp4: got a tensor, expected None", data, mx, torch.ones(()), MXFP4)


def test_refuses_dtype_to_dequantize_to(nvfp4_parts) -> None:
    with pytest.raises(OperandTypeError, match=r"got torch\.int32"):
        BlockScaledTensor(*nvfp4_parts).dequantize(torch.int32)


def test_scale_views(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    codes = scale.view(torch.uint8)
    blocked = to_blocked(codes)
    flat = blocked.permute(5, 2, 4, 0, 1, 3).reshape(-1)
    for layout in (blocked, flat):
        operand = BlockScaledTensor(data, layout)
        assert operand.blocked_scale().data_ptr() == blocked.data_ptr()
        assert torch.equal(operand.blocked_scale(), blocked)
        assert torch.equal(operand.rowmajor_scale(), codes)
    rowmajor = BlockScaledTensor(data, codes)
    assert rowmajor.rowmajor_scale() is codes
    with pytest.raises(OperandError, match=r"got rowmajor, expected blocked.*to_blocked converts"):
        rowmajor.blocked_scale()


def test_check_pair() -> None:
    def operand(batch: int, rows: int, k: int, device: str = "cpu") -> BlockScaledTensor:
        return BlockScaledTensor(*(part.to(device) for part in parts(NVFP4, batch, rows, k)))

    a = operand(2, 5, 64)
    check_pair(a, operand(2, 128, 64))
    for b, match in (
        (operand(2, 5, 32), "K of a and b: got 64 and 32"),
        (operand(1, 5, 64), "batch of a and b: got 2 and 1"),
        (operand(2, 5, 64, "meta"), "device of a and b: got cpu and meta"),
    ):
        with pytest.raises(OperandError, match=match):
            check_pair(a, b)
    with pytest.raises(OperandTypeError, match=r"^b: got Tensor, expected BlockScaledTensor"):
        check_pair(a, a.data)


def test_is_frozen_and_prints_no_values(nvfp4_parts) -> None:
    operand = BlockScaledTensor(*nvfp4_parts)
    for name in ("data", "scale", "rows", "format"):
        with pytest.raises(AttributeError):
            setattr(operand, name, None)
    assert repr(operand) == (
        "BlockScaledTensor(nvfp4, rows=130, k=96, batch=2, torch.float4_e2m1fn_x2, "
        "rowmajor torch.float8_e4m3fn, global_scale=False, cpu)"
    )


def test_construction_reads_no_values_and_computes_nothing(nvfp4_parts) -> None:
    data, scale = nvfp4_parts
    meta = BlockScaledTensor(data.to("meta"), scale.to("meta"))  # a meta tensor has no values to read
    assert math.prod(meta.data.shape) == 2 * 130 * 48
    problem = data.permute(1, 2, 0), to_blocked(scale)
    with Operations() as operations:
        BlockScaledTensor.from_problem(*problem)
    views = {"aten.permute.default", "aten.view.dtype", "aten.as_strided.default"}
    assert len(operations.names) <= 4 and set(operations.names) <= views

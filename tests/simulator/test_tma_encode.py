"""What the driver of an H200 makes of the arguments of cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col, and what it
refuses, byte for byte."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cute_nvfp4.sim.errors import LaunchError
from cute_nvfp4.sim.tma import TensorMap, encode

_TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(_TESTS / "gpu"))
from async_kernels.descriptor import KINDS  # noqa: E402
from async_kernels.recording import Recording  # noqa: E402


def _recorded() -> list:
    return Recording(_TESTS / "data" / "h200_async.npz").descriptors


def _encode(spec, address: int, sm: int = 90) -> bytes:
    modes = (spec.interleave, spec.swizzle, spec.l2, spec.fill)
    return encode.tiled(KINDS[spec.kind][0], address, spec.dims, spec.strides, spec.box, spec.steps, modes, sm)


def test_tiled_maps_of_the_driver():
    made = refused = 0
    for spec, address, code, data in _recorded():
        if code:
            with pytest.raises(LaunchError):
                _encode(spec, address)
            refused += 1
            continue
        assert _encode(spec, address) == data, f"{spec} at {address:#x}"
        made += 1
    assert made >= 150 and refused >= 20


def test_one_wrong_argument_is_noticed():
    spec, address, _, data = next(row for row in _recorded() if not row[2] and row[0].swizzle == 0)
    good = list(encode.tiled(0, 4096, (64, 8), (64,), (16, 4), (1, 1)))
    assert _encode(spec, address) == data and _encode(spec, address + 16) != data
    for changed in (
        encode.tiled(0, 4096, (64, 9), (64,), (16, 4), (1, 1)),
        encode.tiled(0, 4096, (64, 8), (80,), (16, 4), (1, 1)),
        encode.tiled(0, 4096, (64, 8), (64,), (16, 5), (1, 1)),
        encode.tiled(0, 4096, (64, 8), (64,), (16, 4), (1, 2)),
        encode.tiled(0, 4096, (64, 8), (64,), (16, 4), (1, 1), (0, 1, 0, 0)),
        encode.tiled(0, 4096, (64, 8), (64,), (16, 4), (1, 1), (0, 0, 2, 0)),
    ):
        assert list(changed) != good


def test_im2col_maps_of_the_driver():
    record = np.load(_TESTS / "data" / "h200_tma.npz")
    made = 0
    for n, case in enumerate(json.loads(bytes(record["cases"]))["cases"]):
        im = case.get("im2col")
        if im is None or f"{n}.map" not in record:
            continue
        rank = len(case["dims"])
        corners = (im["lower"], im["upper"], im["channels"], im["pixels"])
        steps, modes = case.get("estr", [1] * rank), (0, case.get("swz", 0), case.get("l2", 0), case.get("oob", 0))
        # Recorded maps have the address less that of the tensor.
        raw = encode.im2col(case["type"], case.get("base", 0), case["dims"], case["strides"], *corners, steps, modes)
        words = np.frombuffer(raw, np.uint64)
        np.testing.assert_array_equal(words[:8], record[f"{n}.map"], err_msg=str(case))
        made += 1
    assert made >= 30


@pytest.mark.parametrize(
    ("dims", "lower", "upper"),
    [((64, 12, 10, 3), (-128, 127), (127, -128)), ((64, 6, 5, 4, 3), (-1, -3, 2), (-2, 5, -6))],
)
def test_an_empty_bounding_box_is_refused(dims, lower, upper):
    """The driver of an H200 refuses these two."""
    strides = tuple(int(v) for v in 2 * np.cumprod(dims)[:-1])
    with pytest.raises(LaunchError, match="empty in dimension"):
        encode.im2col(6, 0, dims, strides, lower, upper, 32, 16, (1,) * len(dims))


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("rank 6", {"dims": (16,) * 6, "strides": (16,) * 5, "box": (16,) * 6, "steps": (1,) * 6}),
        ("dimension 1 is 0", {"dims": (64, 0)}),
        ("box dimension 1 is 257", {"box": (16, 257)}),
        ("element stride 1 is 9", {"steps": (1, 9)}),
        ("not a multiple of 16", {"strides": (72,)}),
        ("not a multiple of 16", {"address": 4104}),
        ("not within 0 and", {"strides": (1 << 40,)}),
        ("floating-point", {"modes": (0, 0, 0, 1)}),
        ("does not fit", {"box": (64, 4), "modes": (0, 1, 0, 0)}),
        ("swizzle 6 is not modelled", {"modes": (0, 6, 0, 0)}),
        ("needs compute capability", {"modes": (0, 4, 0, 0), "sm": 90}),
        ("data type 0 is 16", {"kind": 16}),
        ("needs 3 dimensions", {"modes": (1, 0, 0, 0)}),
        ("boxes of 128", {"kind": 14}),
        ("multiples of 32 bytes", {"kind": 15, "dims": (128, 8), "box": (128, 4), "address": 4112}),
    ],
)
def test_what_is_refused(text, changed):
    good = {"kind": 0, "address": 4096, "dims": (64, 8), "strides": (64,), "box": (16, 4), "steps": (1, 1)}
    encode.tiled(**good)
    with pytest.raises(LaunchError, match=text):
        encode.tiled(**good | changed)


def test_arguments_as_the_driver_takes_them():
    def array(kind, *values):
        return (kind * len(values))(*values)

    u32, u64, i32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
    dims, strides = array(u64, 64, 12, 10, 3), array(u64, 128, 1536, 15360)
    box, steps, low, high = array(u32, 32, 2, 2, 1), array(u32, 1, 2, 1, 1), array(i32, -1, -3), array(i32, -2, 5)
    at = [ctypes.addressof(a) for a in (dims, strides, box, steps, low, high)]
    m = TensorMap.decode(encode.encode_tiled(6, 4, 4096, at[0], at[1], at[2], at[3], 0, 2, 1, 1))
    assert (m.dims, m.strides, m.box, m.element_strides) == (tuple(dims), tuple(strides), tuple(box), tuple(steps))
    assert (m.swizzle, m.nan_fill, m.type, m.address) == ("64B", True, "f16", 4096)
    m = TensorMap.decode(encode.encode_im2col(6, 4, 4096, *at[:2], *at[4:], 32, 16, at[3], 0, 0, 0, 0))
    assert (m.im2col.lower, m.im2col.upper, m.im2col.channels, m.im2col.pixels) == ((-1, -3), (-2, 5), 32, 16)

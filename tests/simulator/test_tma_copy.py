"""Tensor copies against scalar loops: every type, rank, swizzle and edge; and what must be refused."""

from __future__ import annotations

import numpy as np
import pytest
import tma_lab as lab
import tma_reference as reference

from cute_nvfp4.sim.errors import Deadlock, Misaligned, OutOfBounds, ReadOnlyWrite
from cute_nvfp4.sim.tma import Im2col, InvalidTensorMap, TensorMap
from cute_nvfp4.sim.tma.descriptor import ELEMENT_BITS, FLOATS, PADDED, SPAN, SWIZZLES
from cute_nvfp4.sim.tma.reduce import TENSOR_TYPES

TYPES = tuple(t for t in ELEMENT_BITS if t not in PADDED)

ROOM = 6144
"""Bytes that a box has in shared memory, which has more."""


def swizzle_of(trial: int) -> str:
    """Another one for the same rank five trials later."""
    return SWIZZLES[(trial + trial // 5) % len(SWIZZLES)]


def random_map(rng, element: str, rank: int, swizzle: str = "none") -> tuple[TensorMap, np.ndarray]:
    """A small tensor map with gaps between rows, and memory for it."""
    per_unit = 128 // ELEMENT_BITS[element]
    dims = [int(rng.integers(1, 6)) * per_unit - int(rng.integers(0, per_unit))]
    dims[0] += dims[0] % 2 if element == "b4x16" else 0
    dims += rng.integers(1, 6, rank - 1).tolist()
    strides, size = [], -(-dims[0] // per_unit) * 16
    for n in dims[1:]:
        strides.append(size + 16 * int(rng.integers(0, 2)))
        size = strides[-1] * n
    widest = SPAN[swizzle] // 16 if swizzle != "none" else 4
    box = [int(rng.integers(1, widest + 1)) * per_unit, *rng.integers(1, 5, rank - 1).tolist()]
    while np.prod(box[1:]) * SPAN[swizzle] > ROOM:
        box[1 + int(np.argmax(box[1:]))] -= 1
    steps = [1, *rng.integers(1, 3, rank - 1).tolist()]
    nan = element in FLOATS and bool(rng.integers(2))
    data = lab.aligned(rng.integers(0, 256, size + 48, dtype=np.uint8).tobytes())
    return TensorMap(0, element, tuple(dims), tuple(strides), tuple(box), tuple(steps), swizzle, nan_fill=nan), data


def random_coords(rng, m: TensorMap, negative: bool = True) -> list[int]:
    per_unit = 128 // m.bits
    low = -3 if negative else 0
    return [int(rng.integers(low, 6)) * per_unit, *(int(rng.integers(low, n + 2)) for n in m.dims[1:])]


def reader(data: np.ndarray):
    def read(bit: int, count: int) -> int:
        word = int.from_bytes(data[bit // 8 : bit // 8 + 9].tobytes(), "little")
        return word >> bit % 8 & (1 << count) - 1

    return read


def expected_load(m, data, coords, place, offsets=(), rows=None, total=8192) -> np.ndarray:
    shared: dict[int, int] = {}
    reference.load(m, reader(data), shared, place, coords, offsets, rows)
    out = np.full(total, lab.GUARD, np.uint8)
    out[list(shared)] = list(shared.values())
    return out


@pytest.mark.parametrize("element", TYPES)
def test_loads(element):
    rng = np.random.default_rng(TYPES.index(element))
    for trial in range(10):
        m, data = random_map(rng, element, 1 + trial % 5, swizzle_of(trial))
        place = 128 * int(rng.integers(0, 9))
        coords = random_coords(rng, m)
        got = lab.load(m, data, coords, place=place)
        np.testing.assert_array_equal(got, expected_load(m, data, coords, place), err_msg=f"{m} {coords} {place}")


@pytest.mark.parametrize("element", TYPES)
def test_stores(element):
    rng = np.random.default_rng(100 + TYPES.index(element))
    for trial in range(10):
        m, data = random_map(rng, element, 1 + trial % 5, swizzle_of(trial))
        shared = rng.integers(0, 256, 8192, dtype=np.uint8)
        place, coords = 128 * int(rng.integers(0, 9)), random_coords(rng, m, negative=False)
        want = data.copy()
        bits = np.unpackbits(want, bitorder="little")

        def touch(bit, count, value, bits=bits):
            bits[bit : bit + count] = [value >> b & 1 for b in range(count)]

        reference.store(m, shared, place, coords, touch)
        lab.store(m, data, shared, coords, place)
        np.testing.assert_array_equal(data, np.packbits(bits, bitorder="little"), err_msg=f"{m} {coords} {place}")


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_im2col(rank):
    rng = np.random.default_rng(rank)
    for _ in range(12):
        spatial = rank - 2
        dims = (32, *rng.integers(3, 7, spatial).tolist(), 3)
        lower, upper = -rng.integers(0, 3, spatial), -rng.integers(0, 3, spatial)
        strides = tuple(64 * int(np.prod((1, *dims[1:j]))) for j in range(1, rank))
        steps = (1, *rng.integers(1, 3, spatial).tolist(), 1)
        box = Im2col(tuple(map(int, lower)), tuple(map(int, upper)), 8, int(rng.integers(1, 70)))
        m = TensorMap(0, "f16", dims, strides, (8,), steps, im2col=box, nan_fill=bool(rng.integers(2)))
        data = lab.aligned(rng.integers(0, 256, strides[-1] * dims[-1] + 16, dtype=np.uint8).tobytes())
        first = [int(rng.integers(a, n + b)) for a, n, b in zip(lower, dims[1:], upper)]
        coords = [8 * int(rng.integers(-1, 5)), *first, int(rng.integers(0, 4))]
        offsets = rng.integers(0, 4, spatial).tolist()
        got = lab.load(m, data, coords, offsets)
        np.testing.assert_array_equal(got, expected_load(m, data, coords, 0, offsets), err_msg=f"{m} {coords}")


def test_gather4_and_scatter4():
    """Four rows of a matrix make a tile, and a tile makes four rows."""
    rng = np.random.default_rng(4)
    m = TensorMap(0, "f16", (60, 12), (128,), (64, 1), (1, 1), "128B")
    data = lab.aligned(rng.integers(0, 256, 128 * 12, dtype=np.uint8).tobytes())
    for rows in ([3, 0, 11, 3], [5, 12, -1, 2]):
        got = lab.load(m, data, [0, *rows], mode="tile::gather4")
        np.testing.assert_array_equal(got, expected_load(m, data, [0], 0, rows=rows))
    shared = rng.integers(0, 256, 1024, dtype=np.uint8)
    lab.store(m, data, shared, [0, 7, 1, 2, 9], mode="tile::scatter4")
    for j, row in enumerate((7, 1, 2, 9)):
        line = np.concatenate([shared[128 * j + 16 * (u ^ j) :][:16] for u in range(8)])
        np.testing.assert_array_equal(data[128 * row : 128 * row + 128], line)


@pytest.mark.parametrize("operation", TENSOR_TYPES)
def test_reductions_of_integers(operation):
    rng = np.random.default_rng(9)
    fn = {
        "add": lambda a, b: a + b,
        "min": min,
        "max": max,
        "inc": lambda a, b: 0 if a >= b else a + 1,
        "dec": lambda a, b: b if a == 0 or a > b else a - 1,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }[operation]
    for element in (t for t in TENSOR_TYPES[operation] if t[1:].isdigit() and t[0] in "us"):
        m = TensorMap(
            0, element, (512 // ELEMENT_BITS[element], 5), (64,), (1024 // ELEMENT_BITS[element] // 2, 4), (1, 1)
        )
        dtype = np.dtype(f"{'i' if element[0] == 's' else 'u'}{m.bits // 8}")
        data = lab.aligned(rng.integers(0, 256, 64 * 5, dtype=np.uint8).tobytes())
        shared = rng.integers(0, 256, 256, dtype=np.uint8)
        old, new = data[64:].view(dtype).copy(), shared.view(dtype)
        lab.store(m, data, shared, [0, 1], operation=operation)
        mask = (1 << m.bits) - 1
        want = [fn(int(a), int(b)) & mask for a, b in zip(old, new)]
        assert [int(x) & mask for x in data[64:].view(dtype)] == want


def plain(**changes) -> TensorMap:
    """A 32 x 16 tensor of bytes, 64 bytes a row, in boxes of 32 x 8."""
    values = {"dims": (32, 16), "strides": (64,), "box": (32, 8), "element_strides": (1, 1)}
    return TensorMap(0, "u8", **{**values, **changes})


def memory(size: int = 64 * 16) -> np.ndarray:
    return lab.aligned((np.arange(size) % 251).astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("hazard", "text", "arguments"),
    [
        (Misaligned, "destination 0x440 in shared memory is not a multiple of 128", {"place": 64}),
        (OutOfBounds, "which has 520 bytes", {"place": 384, "total": 512}),
        (Misaligned, "coordinate 8 of dimension 0 is not a multiple of 16 bytes", {"coords": [8, 0]}),
        (OutOfBounds, "past the end of tensor 't3'", {"size": 64 * 10, "coords": [0, 4]}),
        (InvalidTensorMap, "the tensor map has 2 dimensions, the instruction 3", {"rank": 3, "coords": [0, 0, 0]}),
        (Deadlock, "8 bytes still to come", {"tx": 264}),
        (Deadlock, "8 bytes more than expected", {"tx": 248}),
    ],
)
def test_load_hazards(hazard, text, arguments):
    """Each error says what is wrong, and names the instruction."""
    size, coords = arguments.pop("size", 64 * 16), arguments.pop("coords", [0, 0])
    with pytest.raises(hazard) as caught:
        lab.load(plain(), memory(size), coords, **arguments)
    assert text in str(caught.value)
    assert "cp.async.bulk.tensor" in str(caught.value) or "mbarrier.try_wait" in str(caught.value)


def test_edges_of_the_tensor_are_not_touched():
    """A box over the edge reads only what the tensor map calls its own: the memory may end there."""
    m = plain()
    out = lab.load(m, memory(64 * 15 + 32), [16, 12])
    assert out[:256].reshape(8, 32)[:4, :16].any() and not out[:256].reshape(8, 32)[4:].any()


def test_store_hazards():
    shared = np.zeros(512, np.uint8)
    with pytest.raises(OutOfBounds, match="past the end of tensor 't3'"):
        lab.store(plain(), memory(64 * 10), shared, [0, 8])
    with pytest.raises(OutOfBounds, match="negative coordinates"):
        lab.store(plain(), memory(), shared, [0, -1])
    with pytest.raises(ReadOnlyWrite, match="read-only"):
        lab.store(plain(), memory(), shared, [0, 0], readonly=(3,))
    with pytest.raises(InvalidTensorMap, match="inc does not exist"):
        lab.store(plain(), memory(), shared, [0, 0], operation="inc")


def ragged(way: str, columns: int, first: int, count: int) -> tuple[TensorMap, list[int]]:
    """A map under which rows ``first`` to ``first + count`` of a matrix of u16 are a tensor with edges of its own, and
    the coordinates of its row 0; only the coordinates depend on the rows. The address runs around the 2^64 bytes that
    there are: two more dimensions lead there and back, or the address itself lies before the matrix by as much as the
    rows before the first may take."""
    pitch, most, far = 2 * columns, 0x7FFF0000, 1 << 30
    if way == "two dimensions":
        dims, strides = (columns, far, most, most), (pitch, pitch, (1 << 34) - pitch)
        return TensorMap(0, "u16", dims, strides, (32, 8, 1, 1), (1,) * 4), [0, far - count, first + count, far]
    start = far * pitch
    dims, strides = (columns, far, most), (pitch, pitch)
    return TensorMap(-start, "u16", dims, strides, (32, 8, 1), (1,) * 3), [0, far - count, first + count]


@pytest.mark.parametrize("way", ["two dimensions", "address"])
@pytest.mark.parametrize("checks", [False, True])
def test_addresses_wrap(way, checks):
    """Ragged tensors: rows past the end of a group of rows are filled, and stores leave them alone."""
    matrix = memory(64 * 40)
    want = matrix.reshape(40, 64)
    for first, count in ((0, 5), (7, 8), (20, 3), (39, 1)):
        m, coords = ragged(way, 32, first, count)
        out = lab.load(m, matrix, coords, total=512, checks=checks).reshape(8, 64)
        assert (out[:count] == want[first : first + count]).all() and not out[count:].any()
        after = want.copy()
        after[first : first + count] = first
        lab.store(m, matrix, np.full(512, first, np.uint8), coords, checks=checks)
        assert (want == after).all()


@pytest.mark.parametrize("checks", [False, True])
def test_addresses_that_wrap_to_nowhere(checks):
    """One row too many before or after the matrix, and a map that never comes back."""
    m, coords = ragged("address", 32, 38, 3)
    with pytest.raises(OutOfBounds, match="past the end of tensor 't3'"):
        lab.load(m, memory(64 * 40), coords, checks=checks)
    m, coords = ragged("two dimensions", 32, -1, 3)
    with pytest.raises(OutOfBounds, match="bytes before tensor"):
        lab.store(m, memory(64 * 40), np.zeros(512, np.uint8), coords, checks=checks)
    m, coords = ragged("address", 32, 0, 3)
    with pytest.raises(OutOfBounds, match=r"tensor 't\d'"):
        lab.load(m, memory(64 * 40), [0, 0, 0], checks=checks)


def test_descriptors_that_are_refused():
    good = np.frombuffer(plain().encode(), np.uint64)

    def changed(word: int, value: int, mask: int) -> bytes:
        w = good.copy()
        w[word] = int(w[word]) & ~mask | value
        return w.tobytes()

    for raw, text in (
        (bytes([255] * 128), "no tensor map"),
        (changed(1, 15 << 7, 15 << 7), "element type code 0xf"),
        (changed(1, 1 << 11, 3 << 11), "interleave layout 16B"),
        (changed(1, 1 << 15, 1 << 15), "NaN is for floating-point"),
        (changed(6, 7 << 56, 255 << 56), "not a multiple of 16 bytes"),
        (changed(0, 8, 15), "is not a multiple of 16"),
        (changed(1, 1 << 19, 3 << 19), "swizzle atomicity 1 goes with a swizzle of 128B, not none"),
        (changed(1, 3 << 13 | 2 << 19, 15 << 13 | 3 << 19), "swizzle atomicity 2, which is not modelled"),
        (bytes(64), "128 bytes"),
    ):
        with pytest.raises(InvalidTensorMap, match=text):
            TensorMap.decode(raw)


def padded(element: str, rows: int, swizzle: str, gap: int = 0) -> tuple[TensorMap, np.ndarray]:
    """256 columns of a type with padding, and memory for them."""
    pitch = 32 * ELEMENT_BITS[element] + gap
    data = lab.aligned(np.random.default_rng(rows).integers(0, 256, pitch * rows, dtype=np.uint8).tobytes())
    return TensorMap(0, element, (256, rows), (pitch,), (128, 8), (1, 1), swizzle), data


@pytest.mark.parametrize("swizzle", ["none", "128B", "128B_ATOM_32B"])
@pytest.mark.parametrize("element", PADDED)
def test_loads_with_padding(element, swizzle):
    m, data = padded(element, 12, swizzle, gap=32)
    for coords, place in (([0, 0], 0), ([128, 3], 1152), ([0, -2], 128), ([128, 9], 384), ([256, 0], 0)):
        shared: dict[int, int] = {}
        size = reference.padded_load(m, reader(data), shared, place, coords)
        assert size == 8 * 16 * m.bits
        want = np.full(8192, lab.GUARD, np.uint8)
        want[list(shared)] = list(shared.values())
        np.testing.assert_array_equal(lab.load(m, data, coords, place=place), want, err_msg=f"{m} {coords} {place}")


def test_gather4_with_padding():
    m, data = padded("b4x16_p64", 12, "128B")
    m = TensorMap(**dict(m.__dict__, box=(128, 1)))
    shared: dict[int, int] = {}
    reference.padded_load(m, reader(data), shared, 0, [128], rows=[5, 12, -1, 2])
    got = lab.load(m, data, [128, 5, 12, -1, 2], mode="tile::gather4")
    np.testing.assert_array_equal(got[:512], [shared[b] for b in range(512)])


def test_padding_hazards():
    """PTX ISA, "Restriction on Tensor Copy instructions"."""
    m, data = padded("b6x16_p32", 8, "128B")
    with pytest.raises(Misaligned, match="not a multiple of 128 elements"):
        lab.load(m, data, [64, 0])
    with pytest.raises(Deadlock, match="256 bytes still to come"):
        # The padded size is not what is counted.
        lab.load(m, data, [0, 0], tx=1024)
    with pytest.raises(InvalidTensorMap, match="a store of type b6x16_p32"):
        lab.store(m, data, np.zeros(1024, np.uint8), [0, 0])
    for changed, text in (
        ({"box": (64, 8)}, "boxes of 128"),
        ({"dims": (192, 8)}, "boxes of 128"),
        ({"strides": (208,)}, "multiples of 32 bytes"),
        ({"address": 16}, "multiples of 32 bytes"),
        ({"swizzle": "64B"}, "has no swizzle of 64B"),
    ):
        with pytest.raises(InvalidTensorMap, match=text):
            TensorMap.decode(TensorMap(**dict(m.__dict__, **changed)).encode())


def test_round_trip_of_descriptors():
    rng = np.random.default_rng(5)
    for trial in range(200):
        m, _ = random_map(rng, TYPES[trial % len(TYPES)], 1 + trial % 5, swizzle_of(trial))
        m = TensorMap(**dict(m.__dict__, address=0x7F0012345670, strides=tuple(s + (trial << 32) for s in m.strides)))
        assert TensorMap.decode(m.encode()) == m
    for trial, swizzle in enumerate(["none", "128B", "128B_ATOM_32B"] * 2):
        m, _ = padded(PADDED[trial // 3], 5, swizzle)
        assert TensorMap.decode(m.encode()) == m


def test_codes_of_sm_100a():
    """As compiled CuTe DSL host code sets them: padded 4- and 6-bit elements, and MN-major tf32 operands."""
    for element, code in (("b4x16", 11), ("b4x16_p64", 12), ("b6x16_p32", 13)):
        raw = TensorMap(0, element, (256, 8), (256,), (128, 8), (1, 1), "128B").encode()
        assert int(np.frombuffer(raw, np.uint64)[1]) & 0xFFFFFFFF == 1 << 4 | code << 7 | 3 << 13
    raw = TensorMap(0, "tf32", (256, 8), (1024,), (32, 8), (1, 1), "128B_ATOM_32B").encode()
    assert int(np.frombuffer(raw, np.uint64)[1]) & 0xFFFFFFFF == 1 << 4 | 7 << 7 | 3 << 13 | 1 << 16 | 1 << 19

"""ldmatrix and stmatrix of 8-, 6- and 4-bit elements and movmatrix.

Where an element goes is taken from the thread and value layouts of CuTe's copy traits for these instructions, evaluated
here by a few lines: both sides of a copy map (thread, bit) to a common number, and equal numbers are the same bit.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import InvalidLanes, UnsupportedInstruction

BITS = (128, 1)
"""One row of 16 bytes: the value mode of the side in shared memory, as (size, stride)."""
TRANSPOSED = ((4, 256), (8, 8))
VALUES = ((8, 1), (2, 128), (2, 64))


def evaluate(modes) -> list[int]:
    """All values of a layout, first mode fastest; ``modes`` are (size, stride)."""
    sizes = [range(s) for s, _ in reversed(modes)]
    strides = [d for _, d in reversed(modes)]
    return [sum(i * d for i, d in zip(index, strides)) for index in itertools.product(*sizes)]


def placement(memory_threads, register_threads, register_values) -> dict[tuple[int, int], tuple[int, int]]:
    """(thread, byte of its registers) -> (row by the lane that addresses it, byte of the row); bytes of 8 bits."""
    at: dict[int, tuple[int, int]] = {}
    for thread, first in enumerate(evaluate(memory_threads)):
        for bit, far in enumerate(evaluate((BITS,))):
            at.setdefault(first + far, (thread, bit))
    out = {}
    for thread, first in enumerate(evaluate(register_threads)):
        for bit, far in enumerate(evaluate(register_values)):
            row, inside = at[first + far]
            if bit % 8 == 0:
                assert inside % 8 == 0
                out[thread, bit // 8] = row, inside // 8
    return out


def names(count: int) -> str:
    return "{" + ", ".join(f"%r{10 + j}" for j in range(count)) + "}"


def load(opcode: str, data: np.ndarray, registers: int) -> np.ndarray:
    """(32, registers * 4) bytes that the lanes get; lane l addresses row l of ``data`` (rows, 16), or the first row
    when there are fewer."""
    out, words = np.zeros((32, registers), "u4"), data.size // 4
    copy = "".join(f"ld.global.b32 %r2, [%p0+{4 * j}]; st.shared.b32 [tile+{4 * j}], %r2;" for j in range(words))
    store = "".join(f"st.global.b32 [%rd2+{4 * j}], %r{10 + j};" for j in range(registers))
    body = f"""mov.u32 %r1, %tid.x; mad.wide.u32 %rd2, %r1, {4 * registers}, %p1; {copy} mov.u32 %r3, tile;
    and.b32 %r4, %r1, {len(data) - 1}; mad.lo.u32 %r5, %r4, 16, %r3; bar.warp.sync -1;
    {opcode} {names(registers)}, [%r5]; {store}"""
    launch_kernel(module(body, 2, ".shared .align 16 .b8 tile[512];"), [data, out])
    return out.view("u1")


def store(opcode: str, fragments: np.ndarray) -> np.ndarray:
    """(rows, 16) bytes of shared memory after storing (32, registers * 4) bytes; lane l addresses row l."""
    registers = fragments.shape[1] // 4
    rows = 8 * registers
    back = np.zeros((rows, 16), "u1")
    fetch = "".join(f"ld.global.b32 %r{10 + j}, [%rd2+{4 * j}];" for j in range(registers))
    out = "".join(f"ld.shared.b32 %r2, [tile+{4 * j}]; st.global.b32 [%p1+{4 * j}], %r2;" for j in range(4 * rows))
    body = f"""mov.u32 %r1, %tid.x; mad.wide.u32 %rd2, %r1, {4 * registers}, %p0; {fetch} mov.u32 %r3, tile;
    and.b32 %r4, %r1, {rows - 1}; mad.lo.u32 %r5, %r4, 16, %r3;
    {opcode} [%r5], {names(registers)}; bar.warp.sync -1; {out}"""
    launch_kernel(module(body, 2, ".shared .align 16 .b8 tile[512];"), [np.ascontiguousarray(fragments), back])
    return back


def regroup(got: np.ndarray) -> np.ndarray:
    """CuTe's order of the bytes of m16n16: low halves of a pair of registers first, then high halves."""
    return got.reshape(32, -1, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(32, -1)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """(rows, 16) codes at the low end of rows of 16 bytes; the padding is full of ones, and means nothing."""
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * j for j, code in enumerate(row)) | ((1 << 128) - 1) >> 16 * bits << 16 * bits
        rows.append(list(number.to_bytes(16, "little")))
    return np.array(rows, "u1")


@pytest.mark.parametrize("form", ["b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64"])
@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_m16n16(count: int, form: str) -> None:
    bits = {"b8": 8, "b8x16.b6x16_p32": 6, "b8x16.b4x16_p64": 4}[form]
    codes = np.random.default_rng(1).integers(0, 1 << bits, (16 * count, 16)).astype("u1")
    data = codes if bits == 8 else packed(codes, bits)
    got = regroup(load(f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.{form}", data, 2 * count))
    memory = ((2, 128), (2, 1024), (4, 256), (2, 2048 if count == 2 else 0))
    where = placement(memory, TRANSPOSED, (*VALUES, (2 * count, 1024)))
    assert len(where) == 32 * 8 * count
    assert all(got[lane, byte] == codes[at] for (lane, byte), at in where.items())


@pytest.mark.parametrize("form,bits", [("b6x16_p32", 6), ("b4x16_p64", 4)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_m8n16(count: int, form: str, bits: int) -> None:
    codes = np.random.default_rng(2).integers(0, 1 << bits, (8 * count, 16)).astype("u1")
    got = load(f"ldmatrix.sync.aligned.m8n16.x{count}.shared::cta.b8x16.{form}", packed(codes, bits), count)
    where = placement(((8 * count, 128), (4 // count, 0)), ((32, 32),), ((32, 1), (count, 1024)))
    assert all(got[lane, byte] == codes[at] for (lane, byte), at in where.items())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_m16n8(count: int) -> None:
    fragments = np.random.default_rng(3).integers(0, 256, (32, 4 * count)).astype("u1")
    back = store(f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8", fragments)
    where = placement(((8 * count, 128), (4 // count, 0)), TRANSPOSED, (*VALUES, (count, 1024)))
    assert len(set(where.values())) == back.size
    assert all(fragments[lane, byte] == back[at] for (lane, byte), at in where.items())


@pytest.mark.parametrize("count", [1, 2])
def test_stored_is_what_was_loaded(count: int) -> None:
    data = np.random.default_rng(4).integers(0, 256, (16 * count, 16)).astype("u1")
    got = regroup(load(f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8", data, 2 * count))
    back = store(f"stmatrix.sync.aligned.m16n8.x{2 * count}.trans.shared.b8", got)
    # The load numbers its rows in another order (its trait); the store takes them as they come.
    number = evaluate(((2, 1), (2, 8), (4, 2), (2, 16)))
    assert all((back[number[lane]] == data[lane]).all() for lane in range(16 * count))


def test_movmatrix() -> None:
    tile, out = np.random.default_rng(5).integers(0, 65536, (8, 8), dtype="u2"), np.zeros((8, 8), "u2")
    body = """mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %p0; mad.wide.u32 %rd2, %r1, 4, %p1;
    ld.global.b32 %r2, [%rd1]; movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2; st.global.b32 [%rd2], %r3;"""
    launch_kernel(module(body, 2), [tile, out])
    assert np.array_equal(out, tile.T)


@pytest.mark.parametrize(
    "opcode,registers",
    [
        ("ldmatrix.sync.aligned.m16n16.x1.shared.b8", 2),
        ("ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8", 4),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b8", 1),
        ("ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b6x16_p32", 1),
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8", 1),
        ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8x16", 2),
        ("ldmatrix.sync.aligned.m16n8.x1.trans.shared.b8", 1),
        ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8", 1),
    ],
)
def test_forms_that_do_not_exist_are_refused(opcode: str, registers: int) -> None:
    with pytest.raises(UnsupportedInstruction):
        load(opcode, np.zeros((8, 16), "u1"), registers)


@pytest.mark.parametrize("form", ["m16n8.x1.shared.b8", "m16n8.x1.trans.shared.b16", "m16n16.x1.trans.shared.b8"])
def test_stores_that_do_not_exist_are_refused(form: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        store(f"stmatrix.sync.aligned.{form}", np.zeros((32, 4), "u1"))


@pytest.mark.parametrize(
    "code",
    [
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r4, %r5}, [%r3];",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%r4}, [%r3];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r3};",
    ],
)
def test_matrices_of_bytes_need_blackwell(code: str) -> None:
    text = module(f"mov.u32 %r3, tile; {code}", 0, ".shared .align 16 .b8 tile[512];")
    launch_kernel(text, [], checks=False)
    with pytest.raises(UnsupportedInstruction, match="need sm_100a"):
        launch_kernel(text.replace("sm_100a", "sm_90a"), [])


def test_movmatrix_of_some_lanes_is_an_error() -> None:
    with pytest.raises(InvalidLanes, match="all 32 lanes must"):
        launch_kernel(module("movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2;", 0), [], block=(16, 1, 1))

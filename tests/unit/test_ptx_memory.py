"""What the helpers' accesses are in PTX, what they refuse, and that the simulator sees what they must not touch."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from support import ptx_cases, ptx_kernels
from support.ptx_kernels import BLOCK

from cute_nvfp4.errors import CuteNvfp4Error
from cute_nvfp4.ptx import memory
from cute_nvfp4.ptx.warp import sum_lanes
from cute_nvfp4.sim import Misaligned, OutOfBounds


def offsets(first: int) -> np.ndarray:
    """A word a thread: 0, except ``first`` in thread 77."""
    words = np.zeros((BLOCK, 1), np.uint32)
    words[77] = first
    return words


@pytest.mark.parametrize("num_bytes,suffix", [(4, ".b32"), (8, ".v2.b32"), (16, ".v4.b32")])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_policies_are_in_the_ptx(num_bytes: int, suffix: str, arch: str) -> None:
    for name in (f"load{num_bytes}", f"load{num_bytes}_if"):
        ptx = ptx_kernels.compiled(name, arch).ptx
        for l1 in ("no_allocate", "evict_last", "evict_first"):
            assert ptx.count(f"ld.global.L1::{l1}{suffix} ") == 1
            assert ptx.count(f"ld.global.L1::{l1}.L2::cache_hint{suffix} ") == 1
        assert ptx.count("0x12F0000000000000") == 4


def test_policies_of_256_bits_are_in_the_ptx() -> None:
    for name in ("load32", "load32_if"):
        ptx = ptx_kernels.compiled(name, "sm_100a").ptx
        for l1 in ("no_allocate", "evict_last", "evict_first"):
            assert ptx.count(f"ld.global.L1::{l1}.v8.b32 ") == 1
            assert ptx.count(f"ld.global.L1::{l1}.L2::evict_first.v8.b32 ") == 1


def test_256_bits_do_not_exist_on_sm_90a() -> None:
    with pytest.raises(CuteNvfp4Error, match="does not compile for sm_90a"):
        ptx_kernels.compiled("load32", "sm_90a")


@pytest.mark.parametrize("name,size", [("load4", 4), ("load8", 8), ("load16", 16), ("load32", 32), ("copy16", 16)])
def test_a_byte_too_far(name: str, size: int) -> None:
    """The last whole piece is in bounds, one byte less of data is not, and the error says whose memory it is."""
    ins = ptx_kernels.BODIES[name].ins
    words = np.concatenate([offsets(4 * size), np.full((BLOCK, ins - 1), 0, np.uint32)], 1)
    ptx_kernels.run(name, words, np.zeros(5 * size, np.uint8), arch="sm_100a")
    with pytest.raises(OutOfBounds, match=r"tensor 'data'.*thread \(77, 0, 0\)"):
        ptx_kernels.run(name, words, np.zeros(5 * size - 1, np.uint8), arch="sm_100a")


@pytest.mark.parametrize("name,size", [("load8", 8), ("load16", 16), ("load32", 32), ("copy8", 8), ("copy16", 16)])
def test_misaligned(name: str, size: int) -> None:
    ins = ptx_kernels.BODIES[name].ins
    words = np.concatenate([offsets(size // 2), np.full((BLOCK, ins - 1), 0, np.uint32)], 1)
    with pytest.raises(Misaligned, match=r"thread \(77, 0, 0\)"):
        ptx_kernels.run(name, words, np.zeros(64, np.uint8), arch="sm_100a")


@pytest.mark.parametrize("name", ["load4_if", "load8_if", "load16_if", "load32_if", "byte_if"])
def test_a_true_predicate_is_not_a_licence(name: str) -> None:
    """The cases that read nowhere with a false predicate mean something: with a true one it is an error."""
    words = np.full((BLOCK, 2), 1, np.uint32)
    words[:, 0] = 0
    data = np.zeros(32, np.uint8)
    ptx_kernels.run(name, words, data, arch="sm_100a")
    words[5, 0] = 1 << 30
    with pytest.raises(OutOfBounds, match=r"thread \(5, 0, 0\)"):
        ptx_kernels.run(name, words, data, arch="sm_100a")
    words[5, 1] = 0
    assert not ptx_kernels.run(name, words, data, arch="sm_100a").any()


def test_partial_copies_read_only_their_valid_bytes() -> None:
    """Whole copies start at the front; masked ones in the last lane end with the data."""
    case = ptx_cases.BY_BODY["copy16"]
    words, data = case.inputs()
    last = len(data) // 16 - 1
    words[:, 0] = np.arange(BLOCK) % last * 16
    found = ptx_kernels.run("copy16", words, data, arch="sm_90a")
    np.testing.assert_array_equal(found, case.expected(words, data))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="bytes of a load: got 12, expected one of"):
        memory._instruction(12, "", "", 3)
    with pytest.raises(ValueError, match="L2 policy: got 'evict_last', expected '' or 'evict_first'"):
        memory._instruction(16, "", "evict_last", 4)
    with pytest.raises(ValueError, match="lanes of a reduction: got 3, expected a power of two"):
        sum_lanes(None, 3)


@pytest.mark.parametrize(
    "body,pattern,new",
    [
        # the doubled magnitude of 1.5 becomes 2
        ("e2m1_s8", str(0x03020100), str(0x02020100)),
        ("e2m1_f16x2", r"cvt\.rn\.f16x2\.e2m1x2 (%r\d+), x2", r"cvt.rn.f16x2.e2m1x2 \1, x3"),
        ("e4m3_f16x2", r"cvt\.rn\.f16x2\.e4m3x2 (%r\d+), h", r"cvt.rn.f16x2.e4m3x2 \1, l"),
        ("fma_f16x2", r"fma\.rn\.f16x2", "fma.rn.ftz.f16x2"),
        ("fma_e2m1x16", r"fma\.rn\.f16x2 s, d, (%r\d+), s;", ""),
        ("mma_s8", r"\.s32\.s8\.s8\.s32", ".s32.s8.u8.s32"),
        # 5 would do as well as 4: the lanes of a quad agree by then
        ("sum_lanes", r"(shfl\.sync\.bfly\.b32.*), 4, ", r"\1, 8, "),
    ],
)
def test_wrong_helpers_are_noticed(body: str, pattern: str, new: str) -> None:
    """One wrong constant, operand or modifier in the PTX of a helper, and its case fails."""
    kernel = ptx_kernels.compiled(body, "sm_100a")
    ptx, count = re.subn(pattern, new, kernel.ptx, count=1)
    assert count == 1
    case = ptx_cases.BY_BODY[body]
    words, data = case.inputs()
    found = ptx_kernels.run_kernel(replace(kernel, ptx=ptx), words, ptx_kernels.BODIES[body].outs, data)
    assert not np.array_equal(found, case.expected(words, data))

"""What the compiled GEMV kernels cost, read from their cubins: it stays so."""

from __future__ import annotations

import functools

import pytest
from support.gemv_problems import TEN_SHAPES

from cute_nvfp4.kernels.gemv.config import GemvConfig
from cute_nvfp4.kernels.gemv.kernel import Gemv
from cute_nvfp4.ops import gemv as ops
from cute_nvfp4.runtime.inspection import KernelReport, inspect_cubin

BENCHMARK_SHAPES = ((7168, 16384, 1), (4096, 7168, 8), (7168, 2048, 4))
SHAPES = tuple(dict.fromkeys(BENCHMARK_SHAPES + TEN_SHAPES))
# most registers of a thread: on sm_120a two CTAs of 512 threads share a multiprocessor; elsewhere one has it to itself
SM_REGISTERS, MAX_REGISTERS = 65536, 128
# elements of A of a lane in a slice: two rows, 64 of each; and of a block of b
LANE_ELEMENTS, BLOCK_ELEMENTS = 128, 16


@functools.cache
def _report(config: GemvConfig) -> KernelReport:
    kernel = ops.KERNEL.compile(config)
    return inspect_cubin(kernel.cubin, kernel.ptx).kernel


def compiled(arch: str, shape: tuple[int, int, int], scales: str = "blocked") -> tuple[KernelReport, GemvConfig, str]:
    m, k, batch = shape
    kernel, config = ops.compile_gemv(arch, m=m, k=k, batch=batch, scales=scales)
    return _report(config), config, kernel.ptx


def accesses(report: KernelReport, kind: str, space: str) -> dict[tuple[int, str], int]:
    """(bits, policy) → how many, in SASS."""
    return {(x.bits, x.policy): x.count for x in report.sass_accesses if (x.kind, x.space) == (kind, space)}


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a", "sm_120a"])
@pytest.mark.parametrize(
    "shape,scales", [(shape, "blocked") for shape in SHAPES] + [(BENCHMARK_SHAPES[0], "rowmajor")], ids=str
)
def test_registers_and_memory(arch: str, shape: tuple[int, int, int], scales: str) -> None:
    report, config, _ = compiled(arch, shape, scales)
    assert (report.stack_bytes, report.local_bytes, report.spill_loads, report.spill_stores) == (0, 0, 0, 0)
    assert report.registers <= min(MAX_REGISTERS, SM_REGISTERS // (config.threads * config.min_blocks))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_256_bit_loads_past_l1(shape: tuple[int, int, int]) -> None:
    """Every load of A is of 256 bits and has its policies; only b (64 bits) may stay in L1, scales are 64 bits."""
    report, _, ptx = compiled("sm_120a", shape)
    loads = accesses(report, "load", "global")
    wide = {policy: count for (bits, policy), count in loads.items() if bits == 256}
    # two rows a slice, asked for ahead of the loop and in it
    assert list(wide) == ["NA.EFL2"] and wide["NA.EFL2"] >= 4 and wide["NA.EFL2"] % 2 == 0
    assert ptx.count("ld.global.L1::no_allocate.L2::evict_first.v8.b32 ") == wide["NA.EFL2"]
    assert {key for key in loads if key[0] != 256} == {(64, "EL"), (64, "NA"), (8, "")}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_conversion_for_two_elements(shape: tuple[int, int, int]) -> None:
    """One ``F2FP`` for each pair of elements of A and of b in the code, and no other way to decode."""
    report, config, ptx = compiled("sm_100a", shape)
    kernel = Gemv(config)
    # copies of the code that decodes a slice of A, and of that which decodes a block of b (a loop for the rest of b)
    slices = 1 if config.shared_stages else config.stages
    rest = kernel.first_blocks * config.threads < config.capacity // BLOCK_ELEMENTS
    pairs = (slices * LANE_ELEMENTS + (kernel.first_blocks + rest) * BLOCK_ELEMENTS) // 2
    assert report.count("F2FP.F16.E2M1") == pairs == ptx.count("cvt.rn.f16x2.e2m1x2")
    # and an FMA of two for each pair of A; multiplications of scales are HMUL2 or HFMA2 too, five a slice at most
    fmas = sum(report.count(opcode) for opcode in ("HFMA2", "HMUL2"))
    assert slices * LANE_ELEMENTS // 2 <= fmas <= slices * (LANE_ELEMENTS // 2 + 4) + 8
    assert report.count("PRMT") < 16


@pytest.mark.sweep(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensor_cores_and_asynchronous_copies_on_sm_90a(shape: tuple[int, int, int]) -> None:
    report, _, ptx = compiled("sm_90a", shape)
    # eight words of two rows, the two signs apart
    assert report.count("IMMA.16832.S8.S8") == 16 == ptx.count("mma.sync.aligned.m16n8k32")
    copies = accesses(report, "copy", "global")
    wide = {policy: count for (bits, policy), count in copies.items() if bits == 128}
    # sixteen rows, four an instruction, in one place; nothing of A in narrower pieces
    assert all(policy.startswith("BYPASS") for policy in wide)
    assert sum(wide.values()) == ptx.count("cp.async.cg.shared.global.L2::cache_hint") == 4
    assert {bits for bits, _ in copies} == {128, 64}
    assert report.count("F2FP.F16.E2M1") == 0
    assert {(bits, policy) for bits, policy in accesses(report, "load", "global")} == {(64, "EL"), (8, "")}


RAGGED = (((70, 528, 2), "blocked"), ((70, 528, 2), "rowmajor"), ((9, 16400, 1), "rowmajor"))


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("shape,scales", RAGGED, ids=str)
def test_ragged_and_chunked_variants_do_not_spill(arch: str, shape: tuple[int, int, int], scales: str) -> None:
    """Tails, bytewise scales and a K of several chunks: slower, but in registers."""
    report, _, _ = compiled(arch, shape, scales)
    assert (report.stack_bytes, report.local_bytes, report.spill_loads, report.spill_stores) == (0, 0, 0, 0)


def test_sm_103a_is_as_sm_100a() -> None:
    reports = [compiled(arch, BENCHMARK_SHAPES[0])[0] for arch in ("sm_100a", "sm_103a")]
    assert reports[0].opcodes == reports[1].opcodes and reports[0].registers == reports[1].registers

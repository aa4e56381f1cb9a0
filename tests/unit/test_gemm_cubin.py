"""What the compiled GEMM kernels cost, read from their cubins: it stays so."""

from __future__ import annotations

import functools

import pytest
from support.gemm_problems import FORMAT_PAIRS

from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemm.sm100.warp_roles import roles
from cute_nvfp4.ops.gemm import compile_gemm
from cute_nvfp4.runtime.inspection import Loop, Report, innermost_loop, inspect_cubin
from cute_nvfp4.target import ARCHITECTURES

# instructions that the MMA warp issues for 128 x tile_n x 256 of NVFP4, its loop's own among them. 192 and 256 columns
# have twelve atoms of scales to copy where 64 and 128 have eight: an address and a copy each
STEADY = {64: 42, 128: 43, 192: 51, 256: 51}
MAX_REGISTERS = 128
MMAS_OF_A_STEP = 4
PAIRED = {"pair": True, "cluster": (2, 1)}
KINDS = {
    "plain": {},
    "pair": PAIRED,
    "multicast": {"cluster": (2, 2)},
    "pair, multicast": {"pair": True, "cluster": (4, 2)},
    "split": {"split_k": 4},
    "stream_k": {"scheduler": "stream_k"},
    "direct": {"store": "direct"},
    "rows not aligned": {"store": "direct", "vector": False},
    "columns": {"store": "direct", "out_major": "m", "bias": "m"},
    "fp32, factors, bias": {"out": "float32", "factors": 3, "bias": "n"},
}


@functools.cache
def report(**changes: object) -> Report:
    kernel = compile_gemm(GemmConfig(**changes))  # type: ignore[arg-type]
    return inspect_cubin(kernel.cubin, kernel.ptx)


def per_step(loop: Loop) -> float:
    """Instructions of a step of K."""
    return loop.instructions * MMAS_OF_A_STEP / mmas(loop)


def mmas(loop: Loop) -> int:
    return loop.count("UTCOMMA") + loop.count("UTCQMMA")


@pytest.mark.sweep
@pytest.mark.parametrize("tile_n", STEADY)
@pytest.mark.parametrize("pair", [False, True])
def test_instructions_of_a_step(tile_n: int, pair: bool) -> None:
    loop = innermost_loop(report(tile_n=tile_n, **(PAIRED if pair else {})).sass, "UTCOMMA")
    assert per_step(loop) <= STEADY[tile_n]
    # four MMAs, a commit, and a copy for each 128 rows and 4 columns of scales
    steps = mmas(loop) // MMAS_OF_A_STEP
    assert mmas(loop) == steps * MMAS_OF_A_STEP and loop.count("UTCBAR") == steps
    assert loop.count("UTCCP") == steps * 4 * (1 + -(-tile_n // 128))


@pytest.mark.parametrize("kind", KINDS)
def test_no_spills(kind: str) -> None:
    for tile_n in (64, 256) if kind == "plain" else (128,):
        kernel = report(tile_n=tile_n, **KINDS[kind]).kernel
        # ptxas puts four addresses aside, once a work tile, where K is split in four, and uses 64 registers
        spilled = (16, 0, 4, 4) if kind == "split" else (0, 0, 0, 0)
        assert (kernel.stack_bytes, kernel.local_bytes, kernel.spill_loads, kernel.spill_stores) == spilled
        most = roles(GemmConfig(tile_n=tile_n, **KINDS[kind])).registers  # type: ignore[arg-type]
        assert kernel.registers <= MAX_REGISTERS <= most


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_each_warp_does_its_own(kind: str) -> None:
    """MMAs, copies of scales and commits in one loop, TMA loads in another; accumulators are read in neither."""
    found = report(tile_n=128, **KINDS[kind])
    mma, load = (innermost_loop(found.sass, opcode) for opcode in ("UTCOMMA", "UTMALDG"))
    for loop, own, foreign in (
        (mma, ("UTCOMMA", "UTCCP", "UTCBAR", "SYNCS"), ("UTMALDG", "UTMASTG", "LDTM", "STG", "STS", "LDG")),
        (load, ("UTMALDG", "SYNCS"), ("UTCOMMA", "UTCCP", "UTCBAR", "UTMASTG", "LDTM", "STG", "STS", "LDG")),
    ):
        assert all(loop.count(opcode) for opcode in own)
        assert not any(loop.count(opcode) for opcode in foreign)
    # A, B and the scales of both, once a step
    assert load.count("UTMALDG") == 4 == found.kernel.count("UTMALDG")
    assert found.kernel.count("LDTM") and not found.kernel.count("UTCHMMA")


def test_multicast_and_pairs_are_in_the_opcodes() -> None:
    plain, multicast, pair = (
        report(tile_n=128, **KINDS[kind]).kernel.opcodes for kind in ("plain", "multicast", "pair")
    )
    assert not any("MULTICAST" in opcode or "2CTA" in opcode for opcode in plain)
    assert sum(n for opcode, n in multicast.items() if opcode.startswith("UTMALDG") and "MULTICAST" in opcode) == 4
    # in a pair only the scales of B go to both
    assert sum(n for opcode, n in pair.items() if opcode.startswith("UTMALDG") and "MULTICAST" in opcode) == 1
    for prefix in ("UTCOMMA", "UTCCP", "UTCBAR", "UTMALDG"):
        assert all("2CTA" in opcode for opcode in pair if opcode.startswith(prefix))


@pytest.mark.parametrize("tile_n", [64, 128, 256])
def test_outputs_go_by_tma(tile_n: int) -> None:
    """A store for each 32 columns, and no others; without TMA sixteen bytes at a time."""
    kernel = report(tile_n=tile_n).kernel
    assert kernel.count("UTMASTG") == tile_n // 32 and not kernel.count("STG")
    direct = report(tile_n=tile_n, store="direct").kernel
    wide = sum(x.count for x in direct.sass_accesses if (x.kind, x.space, x.bits) == ("store", "global", 128))
    assert not direct.count("UTMASTG") and wide == tile_n * 2 // 16


@pytest.mark.parametrize("formats", FORMAT_PAIRS, ids="*".join)
def test_opcodes_of_formats(formats: tuple[str, str]) -> None:
    """Four-bit kinds have an instruction of their own; E4M3, E5M2 and unpacked E2M1 are one kind."""
    found = report(tile_n=128, a_format=formats[0], b_format=formats[1])
    own, other = ("UTCOMMA", "UTCQMMA") if all(name.endswith("fp4") for name in formats) else ("UTCQMMA", "UTCOMMA")
    assert found.kernel.count(own) and not found.kernel.count(other)
    loop = innermost_loop(found.sass, own)
    # scales of NVFP4 are of 16 elements, those of the others of 32, and eight bits are twice four: 4, 2 and 1 atoms
    atoms = {("nvfp4", "nvfp4"): 4, ("mxfp4", "mxfp4"): 2}.get(formats, 1)
    assert loop.count("UTCCP") * MMAS_OF_A_STEP == 2 * atoms * mmas(loop)
    assert per_step(loop) <= STEADY[128]


def test_sm_103a_is_as_sm_100a() -> None:
    """But for a name: one scale for sixteen elements is ``4X`` of an instruction's 64 there, ``BLOCK16`` here."""
    first, second = (report(tile_n=128, arch=ARCHITECTURES[a]).kernel for a in ("sm_100a", "sm_103a"))
    renamed = {opcode.replace("UTCOMMA.4X", "UTCOMMA.BLOCK16"): n for opcode, n in first.opcodes.items()}
    assert renamed == second.opcodes and first.registers == second.registers


GATED = {"products": 2, "gate": "silu", "store": "direct", "tile_n": 64}


def test_a_gated_kernel_stays_in_the_instruction_cache() -> None:
    """Each of two groups of epilogue warps has one of the two epilogue tiles: of the 24 KB that one group takes, less
    than the 20 KB are left that an SM keeps from a launch to the next."""
    assert (roles(GemmConfig(**GATED)).groups, roles(GemmConfig(**GATED | {"store": "tma"})).groups) == (2, 1)
    assert 16 * report(**GATED).kernel.instructions <= 20 << 10
    assert 16 * report(**GATED, **PAIRED).kernel.instructions <= 20 << 10


@pytest.mark.parametrize(
    ("changes", "waits"),
    [({}, 0), ({"split_k": 2}, 2), (PAIRED, 4), ({"cluster": (1, 2)}, 1)],
)
def test_the_loading_warp_begins_at_once(changes: dict[str, object], waits: int) -> None:
    """It only arrives where the warps of its CTA meet. In a cluster it waits for the other CTAs' barriers, with K split
    alone at its end; a pair waits for both CTAs' tensor memory before its first MMA, and before it gives it back.
    Nobody arrives at the cluster's barrier with a fence of the GPU's memory."""
    ptx = compile_gemm(GemmConfig(**changes)).ptx  # type: ignore[arg-type]
    assert ptx.count("bar.arrive") + ptx.count("barrier.cta.arrive") == 1
    assert ptx.count("barrier.cluster.wait") == waits
    assert ptx.count("barrier.cluster.arrive") == ptx.count("barrier.cluster.arrive.relaxed")
    assert "mbarrier.arrive.release.cluster" not in ptx or "split_k" in changes

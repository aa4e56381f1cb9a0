"""Prepared weights times 16-bit activations on Blackwell, any number of rows, against float64: on sm_100a the streaming
kernel, and that on tcgen05 with weights decoded to tensor memory; on sm_120a the kernel on mma.sync."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import test_packed_gated_gemm as gated
import test_packed_gemm as dense
import test_packed_groups as groups
import torch
from support.mutants import FIRST, LAST, at, drop, instead, offset, outcome
from support.packed_problems import run

from cute_nvfp4 import BlockScaledTensor, gemm, grouped_gemm, prepare_weight, quantize, simulating, to_blocked
from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.limits import can_implement
from cute_nvfp4.kernels.gemm.sm90.schedules import EqualShares, SharedTiles, WholeTiles
from cute_nvfp4.ops.prepared_weight.gemm import WGMMA
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, candidates, choose, predict
from cute_nvfp4.planning.packed_groups import PackedGroups, choose_groups
from cute_nvfp4.runtime.inspection import inspect_cubin
from cute_nvfp4.sim import Schedule, adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = pytest.mark.sweep(8)
HALF, BF16 = torch.float16, torch.bfloat16
Case = dense.Case
WHOLE, SHORT = {"schedule": WholeTiles()}, {"stage_tiles": 1}
CHOSEN = (
    # rows beyond the streaming kernel's, few rows with bias, x that is decoded first
    Case(33, 130, 272, out=BF16),
    Case(200, 264, 144, HALF, HALF, bias=BF16),
    Case(3, 200, 128, bias=torch.float32, out=BF16),
    Case(20, 100, 160, HALF, quantized=True),
)
GROUPS = (
    groups.Case((1, 0, 3), 130, 256, out=BF16),
    groups.Case((5, 0, 20), 100, 160, HALF, HALF, 2, {"tile_n": 16}, quantized=True, before=1),
    groups.Case((130, 0, 20, 90), 130, 384, workers=2, tiling={"tile_n": 128}),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The cases of a class: each of these arguments has the values that the class's table of that name has."""
    for name in ("case", "fused", "grouped", "m", "scheduled", "schedule", "mutant"):
        if name in metafunc.fixturenames and metafunc.cls is not None and hasattr(metafunc.cls, name.upper()):
            metafunc.parametrize(name, getattr(metafunc.cls, name.upper()), ids=str)


def plan(arch: str, workers: int, **tiling: Any) -> PackedPlan:
    return PackedPlan(WgmmaConfig(arch=ARCHITECTURES[arch], **tiling), workers)


def drawn(seed: int) -> Case:
    """A problem of any size and formats, by the plan that is chosen or by any other of sm_100a."""
    g = np.random.default_rng([seed, 17])
    m, n, k = int(g.integers(1, 300)), int(g.integers(1, 500)), 32 * int(g.integers(1, 40))
    dtype, out = (HALF, BF16)[g.integers(2)], (HALF, BF16, torch.float32)[g.integers(3)]
    bias = (None, HALF, torch.float32)[g.integers(3)]
    format = (NVFP4, NVFP4, MXFP4)[g.integers(3)]
    if g.integers(3) == 0:
        return Case(m, n, k, dtype, out, bias=bias, format=format)
    while True:
        tiling = {
            "tile_n": int(g.choice((16, 32, 48, 64, 96, 128, 160, 192, 256))), "warpgroups": int(g.choice((2, 4))),
            "stage_tiles": int(g.choice((1, 2))), "schedule": (WholeTiles(), EqualShares())[g.integers(2)],
            "stages": int(g.choice((0, 0, 2, 3, 4))),
        }  # fmt: skip
        if not can_implement(WgmmaConfig(arch=ARCHITECTURES["sm_100a"], **tiling)):
            return Case(m, n, k, dtype, out, int(g.integers(1, 8)), tiling, bias=bias, format=format)


class OnBlackwell:
    """What the kernels of both must do. CASE, FUSED, GROUPED: products, gated ones, groups. M: rows of products whose
    bits are those of sm_90a, on the architectures AS_SM_90A too. SCHEDULED: cases that run under each SCHEDULE.
    MUTANTS: of the kernel of CUT, what each changes and what notices it."""

    ARCH: str
    CUT: Case
    AS_SM_90A: tuple[str, ...] = ()
    MUTANTS: ClassVar[dict[str, tuple[Any, str]]]
    SAME_BITS: bool
    """Whether every schedule gives the same bits."""

    def test_exact(self, case: Case) -> None:
        problem = dense.Problem(case)
        assert problem.right(run(problem, self.ARCH))

    @pytest.mark.parametrize("seed", range(40))
    def test_random_problems(self, seed: int) -> None:
        problem = dense.Problem(self.drawn(seed))
        assert problem.right(run(problem, self.ARCH))

    def drawn(self, seed: int) -> Case:
        return drawn(seed)

    def test_gated(self, fused: gated.Case) -> None:
        problem = gated.Problem(fused)
        assert problem.right(run(problem, self.ARCH))

    def test_groups(self, grouped: groups.Case) -> None:
        problem = groups.Problem(grouped)
        assert problem.right(run(problem, self.ARCH))

    @pytest.mark.parametrize("sizes, quantized, out", groups.LISTS, ids=["parameters", "nvfp4", "workspace"])
    def test_lists(self, sizes: list, quantized: bool, out: torch.dtype) -> None:
        pairs, outs, expected = groups.groups(sizes, quantized, out)
        with simulating(self.ARCH):
            grouped_gemm(pairs, alpha=0.75, out=outs)
        assert all(groups.within(got, *right) for got, right in zip(outs, expected))

    def test_bits_of_sm_90a(self, m: int) -> None:
        """On data whose every sum has few bits, by the plans that are chosen."""
        generator = torch.Generator().manual_seed(m)
        x = torch.randint(-4, 5, (m, 528), generator=generator).bfloat16()
        data = torch.randint(0, 256, (136, 264), dtype=torch.uint8, generator=generator)
        scale = torch.randint(0x38, 0x48, (136, 33), dtype=torch.uint8, generator=generator) & 0xF8  # 1 or 2
        weight = prepare_weight(BlockScaledTensor(data, to_blocked(scale)))
        found = []
        for arch in ("sm_90a", self.ARCH, *self.AS_SM_90A):
            with simulating(arch) as runs:
                found.append(gemm(x, weight, out_dtype=torch.float32))
            assert runs[-1].kernel.arch == arch
        assert all(torch.equal(found[0], one) for one in found)
        assert torch.equal(found[0].double(), x.double() @ weight.dequantize(torch.float64).T)

    @pytest.mark.slow
    def test_any_schedule_is_right(self, scheduled: Case, schedule: Schedule) -> None:
        """No hazard. Bits may differ on sm_100a, for the simulator joins MMAs that are under way together."""
        problem = dense.Problem(scheduled)
        out = run(problem, self.ARCH, schedule=schedule)
        assert problem.right(out) and (not self.SAME_BITS or torch.equal(out, run(problem, self.ARCH)))

    def test_mutants_are_noticed(self, mutant: str) -> None:
        change, noticed = self.MUTANTS[mutant]
        problem = dense.Problem(self.CUT)
        assert outcome(change, lambda: problem.right(problem.run()), self.ARCH) == noticed

    def report(self, **tiling: Any) -> Any:
        """What the machine code of a plan's kernel has: nothing is spilled."""
        kernel = WGMMA.compile(plan(self.ARCH, 1, stage_tiles=1, **tiling).config)
        report = inspect_cubin(kernel.cubin, kernel.ptx).kernel
        assert report.spill_loads == report.spill_stores == report.stack_bytes == 0
        return report

    def refused(self, tiling: dict[str, Any], message: str) -> None:
        x, weight = torch.zeros(32, 256).bfloat16(), prepare_weight(quantize(torch.zeros(64, 256), backend="reference"))
        with simulating(self.ARCH), pytest.raises(OperandError, match=message):
            gemm(x, weight, config=plan(self.ARCH, 1, **tiling))


def counted(opcodes: dict[str, int], start: str) -> int:
    return sum(count for name, count in opcodes.items() if name.startswith(start))


class TestSm100(OnBlackwell):
    ARCH = "sm_100a"
    AS_SM_90A = ("sm_103a",)
    SAME_BITS = False
    CASE = (
        *CHOSEN,
        # streamed
        Case(1, 200, 256),
        Case(13, 200, 640, HALF, HALF, format=MXFP4),
        Case(9, 130, 128, HALF, quantized=True),
        # one warpgroup or two; every place of the ring decoded, or as many as tensor memory holds; cut tiles or whole
        Case(5, 200, 640, workers=5, tiling={"tile_n": 16}),
        Case(20, 300, 1664, workers=1, tiling={"tile_n": 32, **WHOLE, "stages": 4}),
        Case(70, 130, 384, HALF, HALF, 2, {"tile_n": 64, **WHOLE}, format=MXFP4),
        Case(140, 300, 896, workers=4, tiling={"tile_n": 128, "warpgroups": 4, **SHORT}, out=BF16),
        Case(200, 500, 1664, workers=1, tiling={"tile_n": 128, "warpgroups": 4, **WHOLE}, out=BF16),
        Case(300, 500, 896, workers=3, tiling={"tile_n": 192, "warpgroups": 4, **SHORT}, out=HALF, format=MXFP8),
        Case(300, 300, 640, HALF, workers=2, tiling={"tile_n": 256, **SHORT, **WHOLE}, format=MXFP8_E5M2),
    )
    CUT = CASE[7]
    FUSED = (
        gated.Case(33, 136, 272, out=BF16),
        gated.Case(9, 70, 288, "relu", out=HALF),
        gated.Case(70, 72, 384, "gelu_tanh", HALF, HALF, plan("sm_100a", 2, tile_n=64), name="n64"),
        gated.Case(
            140, 136, 256, out=BF16, plan=plan("sm_100a", 2, tile_n=128, warpgroups=4, stage_tiles=1), name="n128"
        ),
    )
    GROUPED = (
        *GROUPS,
        groups.Case((33, 7, 70), 136, 256, workers=3, tiling={"tile_n": 64, "warpgroups": 4}, out=BF16),
        groups.Case((300, 0, 20, 190), 130, 384, workers=2, tiling={"tile_n": 256, "stage_tiles": 1}),
    )
    M = (9, 24, 130)
    SCHEDULED, SCHEDULE = (CUT, CASE[8], CASE[13]), adversarial(20)
    MUTANTS: ClassVar = {
        "a full stage not waited for": (at("mbarrier.try_wait", instead("setp.eq.b32 {0}, 0, 0;"), LAST), "Race"),
        "a stage not given back": (at("tcgen05.commit", drop(), FIRST), "Deadlock"),
        "decoded weights not waited for": (at("tcgen05.wait::st", drop(), FIRST), "Race"),
        "products left out": (at("tcgen05.mma", drop(), FIRST), "UninitializedRead"),
        "another half of the lanes": (at("tcgen05.ld", offset(16 << 16), FIRST), "wrong"),
        "sums not announced": (at("st.release.gpu", drop(), FIRST), "Deadlock"),
    }
    MUTANT = tuple(MUTANTS)

    def test_sass(self) -> None:
        """A warp stores both of its slabs of a packed tile to tensor memory at a time."""
        opcodes = self.report(tile_n=256, schedule=WholeTiles()).opcodes
        assert counted(opcodes, "UTCHMMA") == 2 * 4 and counted(opcodes, "STTM") == 2 * 2

    @pytest.mark.parametrize("rows", [17, 64, 200, 2048])
    def test_planning(self, rows: int) -> None:
        """No tile is wider than need be, and rings are deep enough to decode ahead."""
        problem = PackedProblem(m=rows, n=8192, k=8192)
        for chosen in candidates(problem, ARCHITECTURES[self.ARCH], 148):
            c = chosen.config
            assert not chosen.streams and chosen.workers <= 148 and c.ring_stages % c.decoded_stages == 0
            assert c.decoded_stages >= 2 and c.tile_n - 64 < rows
        assert choose(PackedProblem(m=16, n=8192, k=8192), ARCHITECTURES[self.ARCH], 148).streams

    @pytest.mark.parametrize(
        "tiling, message",
        [
            ({"tile_n": 8}, "tile_n of sm_100a: got 8, expected a multiple of 16"),
            ({"warpgroups": 3}, "a plan for sm_100a: got 3 warpgroups"),
            ({"schedule": SharedTiles(split_k=2)}, "a plan for sm_100a: got 2 warpgroups, SharedTiles.split_k=2."),
            ({"tile_n": 256, "warpgroups": 4}, "columns of tensor memory beside sums: got 0 for stages of 64"),
        ],
        ids=str,
    )
    def test_plans_that_cannot_be(self, tiling: dict[str, Any], message: str) -> None:
        self.refused(tiling, message)


class TestSm120(OnBlackwell):
    ARCH = "sm_120a"
    SAME_BITS = True
    CASE = (
        *CHOSEN,
        Case(1, 72, 640, HALF, bias=HALF),
        # tiles cut between CTAs, a tile of many CTAs, whole tiles
        Case(24, 600, 256, workers=3, tiling={"tile_n": 8}),
        Case(5, 200, 640, workers=5, tiling={"tile_n": 16}),
        Case(70, 130, 384, HALF, HALF, 2, {"tile_n": 64, "schedule": WholeTiles()}),
        Case(140, 300, 384, workers=4, tiling={"tile_n": 128, "stage_tiles": 1}, out=BF16),
        Case(140, 300, 256, workers=2, tiling={"tile_n": 128, "schedule": WholeTiles(raster="n")}),
        Case(60, 200, 256, workers=3, tiling={"tile_n": 32, "stage_tiles": 1, "stages": 3}, out=HALF),
    )
    CUT = CASE[8]
    FUSED = (
        gated.Case(33, 136, 272, out=BF16),
        gated.Case(40, 203, 144, "relu", out=HALF),
        gated.Case(70, 72, 384, "gelu_tanh", HALF, HALF, plan("sm_120a", 2, tile_n=64), name="n64"),
        gated.Case(140, 72, 256, out=BF16, plan=plan("sm_120a", 2, tile_n=128, stage_tiles=1), name="n128"),
    )
    GROUPED = (*GROUPS, groups.Case((33, 7, 70), 136, 256, workers=3, tiling={"tile_n": 64}, out=BF16))
    M = (24, 130)
    SCHEDULED, SCHEDULE = (CUT,), adversarial(20)
    MUTANTS: ClassVar = {
        "a full stage not waited for": (at("mbarrier.try_wait", instead("setp.eq.b32 {0}, 0, 0;"), LAST), "Race"),
        "a stage not given back": (at("mbarrier.arrive.shared", drop(), LAST), "Deadlock"),
        "other rows of x": (at("ldmatrix", offset(1024), FIRST), "wrong"),
        "sums not announced": (at("st.release.gpu", drop(), FIRST), "Deadlock"),
    }
    MUTANT = tuple(MUTANTS)

    def drawn(self, seed: int) -> Case:
        """By the plan that is chosen."""
        return replace(drawn(seed), workers=None, tiling={})

    def test_mxfp8(self) -> None:
        """Products, gated ones and groups; stages are short where two of two packed tiles would fit."""
        problems = (
            dense.Problem(Case(33, 130, 288, format=MXFP8, out=BF16)),
            dense.Problem(Case(3, 200, 160, HALF, bias=HALF, format=MXFP8_E5M2)),
            gated.Problem(gated.Case(20, 72, 160, format=MXFP8)),
            groups.Problem(groups.Case((90, 0, 20), 130, 160, out=BF16, format=MXFP8)),
        )
        assert all(problem.right(run(problem, self.ARCH)) for problem in problems)

    @pytest.mark.parametrize("packing", ["nvfp4", "mxfp8"])
    @pytest.mark.parametrize("arch, count", [("sm_120a", 188), ("sm_90a", 132)])
    def test_rings_are_deep(self, arch: str, count: int, packing: str) -> None:
        """Of every candidate; eight bits an element take as much longer as memory says on sm_120a."""
        found = {}
        for m in (17, 64, 200, 512):
            problem = PackedProblem(m=m, n=8192, k=8192, packing=packing)
            plans = candidates(problem, ARCHITECTURES[arch], count)
            assert min(plan.config.ring_stages for plan in plans) > 2
            found[m] = predict(plans[0], problem, count)
        listed = PackedGroups(sizes=((200, 4096, 4096),) * 4, packing=packing)
        assert choose_groups(listed, ARCHITECTURES[arch], count).config.ring_stages > 2
        if arch == self.ARCH:
            plain = PackedProblem(m=17, n=8192, k=8192)
            least = predict(choose(plain, ARCHITECTURES[arch], count), plain, count)
            assert (found[17] / least > 1.6) == (packing == "mxfp8")

    @pytest.mark.parametrize("tile_n", [16, 64, 128])
    def test_no_bank_conflicts(self, tile_n: int) -> None:
        """Of what the main loop reads."""
        problem = dense.Problem(Case(tile_n, 256, 512, workers=2, tiling={"tile_n": tile_n, "schedule": WholeTiles()}))
        with simulating(self.ARCH, counters=True, checks=False) as runs:
            problem.run()
        loads = [x for x in runs[-1].result.memory if x.space == "shared" and x.kind == "load"]
        assert any(x.instruction.startswith("ldmatrix") for x in loads)
        assert [x for x in loads if x.conflicts] == []

    def test_sass(self) -> None:
        """For every step of 16 along K a warp multiplies 16 rows with 128 of x."""
        opcodes = self.report(tile_n=128).opcodes
        assert counted(opcodes, "HMMA.16816.F32.BF16") == 128 and counted(opcodes, "LDSM") == 64

    @pytest.mark.parametrize("rows, widths", [(17, (16, 32)), (64, (32, 64)), (2048, (128,))])
    @pytest.mark.parametrize("sm_count", [170, 188, 48])
    def test_planning(self, rows: int, widths: tuple[int, ...], sm_count: int) -> None:
        chosen = choose(PackedProblem(m=rows, n=8192, k=8192), ARCHITECTURES[self.ARCH], sm_count)
        assert not chosen.streams and chosen.config.tile_n in widths and chosen.workers <= sm_count

    @pytest.mark.parametrize(
        "tiling",
        [{"tile_n": 256}, {"schedule": EqualShares(cluster_rows=2)}, {"schedule": SharedTiles(split_k=2)}],
        ids=str,
    )
    def test_plans_of_wgmma_are_refused(self, tiling: dict[str, Any]) -> None:
        self.refused(tiling, "a plan for sm_120a: got")

"""The rungs of the notebook's ladder: right in the simulator, and their counters say what the notebook says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks"))

import cells
import ladder_tools as tools

from cute_nvfp4.errors import OperandError
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.sim import Race
from cute_nvfp4.target import architecture

ladder = cells.module("01_gemv.ipynb", "gemv_ladder")
OneThreadARow, WideAndPacked = ladder.OneThreadARow, ladder.WideAndPacked
SharedVector, TileOfQuads, RingOfCopies = ladder.SharedVector, ladder.TileOfQuads, ladder.RingOfCopies
RUNGS = (OneThreadARow, ladder.OneWarpARow, WideAndPacked, SharedVector, TileOfQuads, RingOfCopies)
ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("sm_90a", "sm_100a")
# all shapes: several CTAs, fewer slices than a ring has stages, a batch
SHAPES = ((256, 2048, 1), (128, 1024, 2))


@pytest.fixture(scope="module")
def cases() -> dict:
    return {shape: tools.make_case(*shape, seed=7) for shape in SHAPES}


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rung", [*RUNGS, None], ids=lambda r: r.__name__ if r else "final")
def test_rung_is_right(rung: type | None, arch: str, cases: dict) -> None:
    """Every E2M1 code and finite E4M3 scale; outputs start as NaN, so that none may stay unwritten."""
    for case in cases.values():
        tools.check(case, tools.simulate(rung, case, arch, sms=3).out)


def test_case_has_the_full_range(cases: dict) -> None:
    case = cases[256, 2048, 1]
    a = case.a["rowmajor"]
    assert a.data.unique().numel() == 256
    assert a.scale.view(torch.uint8).unique().tolist() == [x for x in range(256) if x & 0x7F != 0x7F]
    torch.testing.assert_close(a.dequantize(), case.a["blocked"].dequantize(), rtol=0, atol=0)


@pytest.mark.parametrize("rung", [WideAndPacked, TileOfQuads])
def test_nan_scales_stay_in_their_rows(rung: type) -> None:
    case = tools.make_case(128, 1024, nan=True)
    assert 0 < int(case.expected.isnan().sum()) < 128
    tools.check(case, tools.simulate(rung, case, "sm_100a").out)


def test_check_refuses_small_errors_and_unwritten_outputs(cases: dict) -> None:
    case = cases[256, 2048, 1]
    tools.check(case, case.expected.float())
    wrong = case.expected.float()
    wrong[0, 17] += 1e-4 * case.magnitude[0, 17].float()
    with pytest.raises(AssertionError, match="1 of 256 results are wrong"):
        tools.check(case, wrong)
    wrong = case.expected.float()
    wrong[0, 255] = float("nan")
    with pytest.raises(AssertionError, match="never written"):
        tools.check(case, wrong)


class WrongRows(TileOfQuads):
    """Takes rows r and r + 16 where their scales are those of r and r + 32."""

    def row_in_tile(self, quad, i):
        return (quad & 3) + (quad >> 2) * 64 + i * 16


class LostWords(SharedVector):
    """Reads b in another order than it was staged in."""

    word_shape, word_stride = (4, 32, 1 << 16), (1, 4, 128)


@pytest.mark.parametrize("mutant", [WrongRows, LostWords])
def test_a_wrong_rung_is_found(mutant: type, cases: dict) -> None:
    case = cases[256, 2048, 1]
    with pytest.raises((AssertionError, Race)):
        tools.check(case, tools.simulate(mutant, case, "sm_100a").out)


def test_scales_of_another_row_are_found(cases: dict) -> None:
    case = cases[256, 2048, 1]
    a = case.a["rowmajor"]
    rolled = BlockScaledTensor(a.data, a.scale.view(torch.uint8).roll(1, dims=1).view(torch.float8_e4m3fn))
    mixed = tools.Case({"rowmajor": rolled, "blocked": case.a["blocked"]}, case.b, case.expected, case.magnitude)
    out = tools.simulate(OneThreadARow, mixed, "sm_90a").out
    with pytest.raises(AssertionError):
        tools.check(case, out)


@pytest.mark.parametrize("shape", [(64, 1024), (128, 512)])
def test_sizes_that_a_rung_does_not_take_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(OperandError, match="multiples of 128 and 1024"):
        tools.simulate(OneThreadARow, tools.make_case(*shape), "sm_90a")


def _figures(rung: type | None, arch: str, case: tools.Case) -> tools.Figures:
    return tools.figures(tools.simulate(rung, case, arch, sms=4), case)


def test_two_half_loads_ask_for_everything_twice_and_the_ring_does_not(cases: dict) -> None:
    """What the notebook says of rung e on sm_90a, and of its cure."""
    case = cases[256, 2048, 1]
    data_sectors = 256 * 1024 // 32
    found = {}
    for rung, arch, width in ((TileOfQuads, "sm_90a", 16), (TileOfQuads, "sm_100a", 32), (RingOfCopies, "sm_90a", 16)):
        result = tools.simulate(rung, case, arch).launch.result
        loads = [x for x in tools.global_loads(result) if x.width == width]
        found[rung, arch] = sum(x.sectors for x in loads) / data_sectors
    assert found == {(TileOfQuads, "sm_90a"): 2.0, (TileOfQuads, "sm_100a"): 1.0, (RingOfCopies, "sm_90a"): 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_the_ladder_goes_up(arch: str) -> None:
    """No spills anywhere; fewer instructions, and less asked for than once too often, from the second rung on."""
    case = tools.make_case(256, 4096)
    rungs = tools.ladder(architecture(arch))
    assert [letter for letter, _, _ in rungs] == ["a", "b", "c", "d", "e", *(["e'"] if arch == "sm_90a" else []), "f"]
    found = [_figures(rung, arch, case) for _, _, rung in rungs]
    assert all(x.spills == 0 and x.registers <= 96 for x in found)
    assert all(x.distinct_bytes >= x.useful_bytes for x in found)
    assert found[0].sector_use < 0.05 < 0.4 < found[1].sector_use < 0.9 < found[-1].sector_use <= 1.0
    first, last = found[1], found[-1]
    assert last.instructions_per_element < 0.25 * first.instructions_per_element


def test_benchmark_says_what_it_needs() -> None:
    script = ROOT / "benchmarks" / "gemv_ladder.py"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("no CUDA device") and "01_gemv.ipynb" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rungs_are_right_on_the_gpu() -> None:
    from cute_nvfp4.runtime.backend import resolve

    arch, case = resolve("cuda", "cuda").arch, tools.make_case(1024, 7168, 2, device="cuda")
    for _, _, rung in tools.ladder(arch):
        call, out = tools.prepare(rung, case, arch)
        assert out.isnan().all()
        call()
        torch.cuda.synchronize()
        tools.check(case, out)

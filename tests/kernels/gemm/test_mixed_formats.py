"""Products of MXFP8 and MXFP4 operands, whose elements of four bits TMA unpacks beside those of eight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import backends, gated_gemm_problems, gemm_problems, grouped_problems
from support.gemm_problems import Case, make
from support.gemm_structures import random_case, structures
from support.mutants import plan_anew

import cute_nvfp4.runtime.compile
from cute_nvfp4 import gemm, simulating
from cute_nvfp4.errors import OperandError, SimError
from cute_nvfp4.formats import FORMATS
from cute_nvfp4.kernels.gemm import config
from cute_nvfp4.kernels.gemm.shared_plan import StagePlan
from cute_nvfp4.kernels.gemm.sm120 import mainloop
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ptx.mma import load_matrices
from cute_nvfp4.scale_layout import to_blocked
from cute_nvfp4.target import ARCHITECTURES

PAIRS = (("mxfp8", "mxfp4"), ("mxfp8_e5m2", "mxfp4"), ("mxfp4", "mxfp8"), ("mxfp4", "mxfp8_e5m2"))
ARCHS = ("sm_100a", "sm_120a")
SEEDS = 40
BOTH = pytest.mark.parametrize("arch", ARCHS, indirect=True)


def store_of(arch: str) -> str:
    return "tma" if ARCHITECTURES[arch].generation == "sm100" else "direct"


def every_code(name: str) -> BlockScaledTensor:
    """(codes, 128): row i has code i once, at a place of its own, and zeros."""
    fmt = FORMATS[name]
    count = 2**fmt.element_bits
    codes = torch.arange(count)
    data = torch.zeros(count, 128, dtype=torch.int64)
    data[codes, 5] = codes
    if fmt.elements_per_byte == 2:
        data = data[:, ::2] | data[:, 1::2] << 4
    scale = torch.full((count, 4), 127, dtype=torch.uint8)
    return BlockScaledTensor(data.to(torch.uint8), to_blocked(scale), None, fmt)


@BOTH
@pytest.mark.sweep
@pytest.mark.parametrize("formats", PAIRS, ids="*".join)
def test_every_code_times_every_code(arch: str, formats: tuple[str, str]) -> None:
    a, b = map(every_code, formats)
    values = [x.dequantize(torch.float64)[:, 5] for x in (a, b)]
    c = gemm(a, b, out_dtype=torch.float32, backend=backends.backend()).double()
    expected = values[0][:, None] * values[1][None, :]
    assert c.equal(expected) or ((c.isnan() == expected.isnan()).all() and c.nan_to_num().equal(expected.nan_to_num()))


@BOTH
@pytest.mark.sweep(10, draws=("seed",))
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_problems(arch: str, seed: int) -> None:
    generator = np.random.default_rng([seed, 11])
    a, b = PAIRS[seed % len(PAIRS)]
    every = [x for x in structures(arch) if (x.a_format, x.b_format) == (a, b)]
    case = random_case(generator, every, max_mn=400, max_k=1536)
    problem = make(replace(case, store=store_of(arch)))
    gemm_problems.check(problem, problem.run(backends.backend()))


GROUPS = (
    grouped_problems.Grouped(((130, 200, 384), (0, 100, 128), (7, 300, 640))),
    grouped_problems.Grouped(((130, 200, 384), (90, 100, 128), (7, 300, 640)), maps="workspace", swap=True),
    grouped_problems.Grouped(((130, 200, 384), (0, 200, 384), (7, 200, 384)), True, before=2, swap=True, tile_n=64),
)


@BOTH
@pytest.mark.sweep
@pytest.mark.parametrize("formats", PAIRS, ids="*".join)
@pytest.mark.parametrize("grouped", GROUPS, ids=str)
def test_groups(arch: str, grouped: grouped_problems.Grouped, formats: tuple[str, str]) -> None:
    problem = grouped_problems.make(replace(grouped, a_format=formats[0], b_format=formats[1]))
    problem.check(problem.run(backends.backend()))


@BOTH
@pytest.mark.sweep
@pytest.mark.parametrize("formats", PAIRS, ids="*".join)
@pytest.mark.parametrize("form", gated_gemm_problems.FORMS)
def test_gated(arch: str, form: str, formats: tuple[str, str]) -> None:
    n = 200 if form == "two" else 256
    case = Case(130, n, 384, alpha=2.0**-10, tile_n=64, store=store_of(arch), a_format=formats[0], b_format=formats[1])
    problem = gated_gemm_problems.make(gated_gemm_problems.Gated(case, form=form))
    problem.check(problem.run(backend=backends.backend()))


@BOTH
def test_k_is_whole_boxes(arch: str) -> None:
    """A box of unpacked elements has 128, and so has the tensor whole ones; memory lies at multiples of 32 bytes."""
    a, b = (gemm_problems.make(Case(9, 9, 160, a_format=f, b_format=f)).a for f in ("mxfp8", "mxfp4"))
    with pytest.raises(OperandError, match="K of a: got 160, expected a multiple of 128: TMA unpacks"):
        gemm(a, b, backend=backends.backend())
    whole = make(Case(9, 9, 128, a_format="mxfp8", b_format="mxfp4"))
    room = torch.zeros(9 * 64 + 16, dtype=torch.uint8, device=whole.a.device)
    start = 16 if room.data_ptr() % 32 == 0 else 0
    b = replace(whole.b, data=room[start : start + 9 * 64].view(1, 9, 64))
    with pytest.raises(OperandError, match=r"alignment of b: got address .*, expected multiples of 32 bytes"):
        gemm(whole.a, b, backend=backends.backend())


# --- a wrong kernel is noticed


def _padding_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagePlan, "loaded", property(lambda self: sum(size for _, size in self.parts)))


def _as_e4m3(patch: pytest.MonkeyPatch) -> None:
    *others, kind = config.KINDS
    wrong = replace(kind, element_types=(*kind.element_types[:2], ("mxfp4", 0)))
    patch.setattr(config, "KINDS", (*others, wrong))
    patch.setattr(
        config, "_KIND_OF", {pair: wrong if found is kind else found for pair, found in config._KIND_OF.items()}
    )


def _as_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mainloop, "load_unpacked", load_matrices)


MUTANTS = {
    ("sm_100a", "padding counts as bytes that arrive"): _padding_counts,
    ("sm_100a", "elements of four bits are read as E4M3"): _as_e4m3,
    ("sm_120a", "padding counts as bytes that arrive"): _padding_counts,
    ("sm_120a", "elements of four bits are loaded as bytes"): _as_bytes,
}


@pytest.mark.sim_only("runs wrong kernels")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("target,name", MUTANTS)
def test_mutants_are_noticed(target: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_NVFP4_CACHE", "0")
    monkeypatch.setattr(cute_nvfp4.runtime.compile, "_memory", {})
    plan_anew(monkeypatch)
    problem = make(Case(130, 136, 256, a_format="mxfp8", b_format="mxfp4", workers=0))
    with monkeypatch.context() as patch, simulating(target, step_limit=60_000):
        MUTANTS[target, name](patch)
        try:
            noticed = bool(gemm_problems.wrong(problem, problem.run(backends.backend())).any())
        except SimError:
            noticed = True
    assert noticed

"""Products of MXFP4 weights on sm_90a that nobody packs, with x in any MX format: rows are decoded as they lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support import backends
from support.mutants import LAST, Source, at, constant, instead, offset, outcome
from support.plain_operands import off

from cute_nvfp4 import (
    BlockScaledTensor,
    GroupedRows,
    gated_gemm,
    gemm,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare,
    quantize,
    simulating,
    to_blocked,
)
from cute_nvfp4.formats import MXFP4
from cute_nvfp4.kernels.gemm.packed import rows as rows_module
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.schedules import WholeTiles
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, candidates
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]
F32 = {"out_dtype": torch.float32}
PLAN = PackedPlan(
    WgmmaConfig(packing="mxfp4_rows", dtype="bfloat16", out="float32", vector=False, tile_n=64, schedule=WholeTiles()),
    2,
)


def weights(*shape: int, seed: int = 1) -> BlockScaledTensor:
    """Every code; scales from 2**-6 to 2**5, and padding that holds anything."""
    generator = torch.Generator().manual_seed(seed)
    *batch, rows, k = shape
    data = torch.randint(0, 256, (*batch, rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(121, 133, (*batch, rows, k // 32), dtype=torch.uint8, generator=generator)
    return BlockScaledTensor(backends.place(data), backends.place(blocked(scale)), None, MXFP4)


def blocked(scale: torch.Tensor) -> torch.Tensor:
    """Blocked scales, NaN where none is of a row."""
    own = to_blocked(torch.full_like(scale, 1)).view(torch.uint8)
    return torch.where(own == 1, to_blocked(scale).view(torch.uint8), 0xFF)


def x_of(format: str, *shape: int, seed: int = 9) -> BlockScaledTensor:
    return quantize(
        backends.place(torch.randn(shape, generator=torch.Generator().manual_seed(seed))), format, backend="reference"
    )


def plans() -> list[PackedPlan]:
    """One candidate of each structure."""
    kind = {"dtype": "bfloat16", "out": "float32", "packing": "mxfp4_rows"}
    found: dict[tuple, PackedPlan] = {}
    for plan in candidates(PackedProblem(m=130, n=300, k=512, **kind), ARCHITECTURES["sm_90a"], 132):
        c = plan.config
        found.setdefault((c.schedule, c.ctas_per_sm), plan)
    return list(found.values())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("plan", plans(), ids=str)
def test_every_structure(plan: PackedPlan) -> None:
    a, b = x_of("mxfp4", 130, 512), weights(300, 512)
    with simulating("sm_90a"):
        found = gemm(a, b, alpha=0.5, config=plan, **F32)
    assert off(found, gemm(a, b, alpha=0.5, backend="reference", **F32)) < 2.0**-20


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "mxfp8_e5m2"])
def test_formats_of_x(format: str) -> None:
    """A batch with a bias of each; the call decodes x and multiplies, and can be prepared."""
    a, b = x_of(format, 2, 70, 256), weights(2, 140, 256)
    bias = backends.place(torch.randn(2, 140, generator=torch.Generator().manual_seed(1)))
    with simulating("sm_90a") as runs:
        found = gemm(a, b, bias=bias, **F32)
    assert len(runs) in (0, 2)
    exact = gemm(a, b, bias=bias, backend="reference", **F32)
    assert off(found, exact) < 2.0**-20 and off(exact[0], exact[1]) > 0.1
    with simulating("sm_90a"):
        assert prepare(gemm, a, b, bias=bias, **F32)().equal(found)


def test_all_scales() -> None:
    """Scales from 2**-127, which is subnormal in bf16, to 2**125 with the largest code; NaN makes its row NaN alone."""
    data = torch.full((254, 64), 0x77, dtype=torch.uint8)
    data[:, 16:] = 0
    scale = torch.full((254, 4), 127, dtype=torch.uint8)
    scale[:253, 0], scale[253, 3] = torch.arange(253, dtype=torch.uint8), 0xFF
    b = BlockScaledTensor(backends.place(data), backends.place(to_blocked(scale)), None, MXFP4)
    # sums of neither row are subnormal in float32, or infinite, where they are looked at
    x = torch.tensor([2.0**12, 2.0**-12]).repeat(10).unsqueeze(1).expand(20, 128)
    a = quantize(backends.place(x.contiguous()), "mxfp8", backend="reference")
    with simulating("sm_90a"):
        found = gemm(a, b, **F32)
    exact = gemm(a, b, backend="reference", **F32)
    assert found[:, 253].isnan().all()
    for row, scales in ((0, slice(0, 127)), (1, slice(127, 253))):
        assert torch.equal(found[row::2, scales], exact[row::2, scales])
        assert exact[row, scales].isfinite().all() and len(exact[row, scales].unique()) == len(exact[row, scales])


def test_gated_lists_and_stacks() -> None:
    a, gate, up = x_of("mxfp8", 20, 256), weights(136, 256, seed=2), weights(136, 256, seed=3)
    list_of = [(x_of("mxfp4", m, k), weights(n, k, seed=m)) for m, n, k in ((20, 130, 256), (3, 70, 128))]
    stack, rows = weights(3, 72, 128), GroupedRows.of(x_of("mxfp8_e5m2", 150, 128), [2, 133, 133, 140])
    options = {"gate": "identity", "alpha": 2.0**-8, **F32}
    with simulating("sm_90a") as runs:
        gated = gated_gemm(a, gate, up, **options)
        listed = grouped_gemm(list_of, **F32)
        contiguous = grouped_gemm_contiguous(rows, stack, **F32)
    assert len(runs) in (0, 6), "each decodes x and multiplies"
    assert off(gated, gated_gemm(a, gate, up, backend="reference", **options)) < 2.0**-20
    assert near(listed, grouped_gemm(list_of, backend="reference", **F32))
    exact = grouped_gemm_contiguous(rows, stack, backend="reference", **F32)
    assert off(contiguous[2:140], exact[2:140]) < 2.0**-20


def near(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> bool:
    return all(off(x, y) < 2.0**-20 for x, y in zip(found, exact, strict=True))


@pytest.mark.parametrize("a, b, k", [("mxfp4", "mxfp8", 128), ("mxfp8", "mxfp4", 96)])
def test_what_is_packed_in_the_call(a: str, b: str, k: int) -> None:
    """Weights of eight bits, and a K that ends within a stage: a launch packs the weight before."""
    left, right = x_of(a, 20, k), x_of(b, 40, k, seed=2)
    with simulating("sm_90a") as runs:
        found = gemm(left, right, **F32)
    assert len(runs) in (0, 3) and off(found, gemm(left, right, backend="reference", **F32)) < 2.0**-20


@pytest.mark.sim_only("runs schedules")
@pytest.mark.sweep(5)
@pytest.mark.parametrize("schedule", adversarial(20), ids=str)
def test_any_schedule_gives_the_same_bits(schedule) -> None:
    a, b = x_of("mxfp8", 40, 256), weights(136, 256)
    with simulating("sm_90a"):
        found = gemm(a, b, config=PLAN, **F32)
    with simulating("sm_90a", schedule=schedule, checks=True):
        assert torch.equal(gemm(a, b, config=PLAN, **F32), found)


MUTANTS = (
    ("codes not multiplied first", Source(rows_module, "mul_bf16x2", lambda pair, power: pair), "wrong"),
    ("signs of codes dropped", at("lop3.b32", constant(0x80008000, 0), LAST), "wrong"),
    ("scales of another lane", at("prmt.b32", instead("prmt.b32 {0}, {1}, {2}, 0x4000;")), "wrong"),
    ("a scale's other eight bytes", at("cp.async.ca", offset(8), LAST), "OutOfBounds"),
    ("atoms counted as those of NVFP4", Source(rows_module, "stage_atoms", lambda packing: 2), "Race"),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name, change, noticed", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name: str, change, noticed: str) -> None:
    a, b = x_of("mxfp8", 70, 256), weights(140, 256)
    exact = gemm(a, b, backend="reference", **F32)
    assert outcome(change, lambda: off(gemm(a, b, config=PLAN, **F32), exact) < 2.0**-20, "sm_90a") == noticed

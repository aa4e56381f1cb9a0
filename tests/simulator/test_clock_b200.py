"""The clock of a B200: figures of tcgen05 against what was published, and that each of them counts in some launch."""

from __future__ import annotations

import functools

import pytest
import torch
from clock_lab import needs_ptxas

from cute_nvfp4 import BlockScaledTensor, gemm, quantize, simulating
from cute_nvfp4.planning.gemm import GemmProblem, Plan
from cute_nvfp4.sim.clock.effects import product
from cute_nvfp4.sim.clock.machine import clock_of, machine
from cute_nvfp4.sim.clock.notes import Product
from cute_nvfp4.sim.observe.timing import Timing
from cute_nvfp4.target import ARCHITECTURES
from tests.simulator.ptx_lab import launch_kernel, module, wait
from tests.simulator.test_tcgen05_move import DECLARED, HEAD, TAIL

B200 = machine("b200")
PUBLISHED = (  # CTAs, M, N, where A is: cycles between two, cycles until a batch of one is committed
    *((1, 64, n, "shared", ii, latency) for n, ii, latency in ((64, 32, 152), (128, 64, 184), (256, 128, 248))),
    *((1, 128, n, "shared", ii, latency) for n, ii, latency in ((64, 48, 168), (128, 64, 200), (256, 128, 264))),
    *((1, 128, n, "tensor", ii, latency) for n, ii, latency in ((64, 32, 136), (128, 64, 168), (256, 128, 232))),
    *((2, 128, n, "shared", ii, latency) for n, ii, latency in ((64, 25, 173), (128, 32, 197), (256, 64, 229))),
    *((2, 256, n, "shared", ii, latency) for n, ii, latency in ((64, 43, 202), (128, 64, 234), (256, 128, 298))),
)
OF_LAUNCHES = ("tcgen05.commit", "tcgen05.copy_bytes_per_cycle")
"""Figures of tcgen05 that no product has."""
OF_PRODUCTS = tuple(name for name in B200.figures if name.startswith("tcgen05.") and name not in OF_LAUNCHES)
COUNTED = tuple(
    name
    for name in B200.figures
    if name.startswith(("tcgen05.", "tensor_memory.")) and not name.endswith(("_64", "_tensor"))
)


@pytest.mark.parametrize("ctas, m, n, a, interval, latency", PUBLISHED)
def test_products_take_what_was_published(ctas, m, n, a, interval, latency):
    """Within 8 % of the time between two (a pair of 64 rows and columns: 29 %) and a tenth of the latency."""
    busy, until = product(Product(m, n, ctas, a), B200)
    assert busy == pytest.approx(interval, rel=0.29 if (ctas, m, n) == (2, 128, 64) else 0.08)
    assert until == pytest.approx(latency, rel=0.1)


@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_every_figure_of_a_product_counts(name):
    other = B200.with_figures({name: B200[name] / 3 if "bytes" in name else 3 * B200[name]})
    cases = [Product(m, n, ctas, a) for ctas, m, n, a, *_ in PUBLISHED]
    assert [product(c, other) for c in cases] != [product(c, B200) for c in cases]


@functools.cache
def operands(rows: int, k: int, seed: int) -> BlockScaledTensor:
    return quantize(torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)))


@functools.cache
def launch(ctas: int) -> Timing:
    """The modelled time of a GEMM of two tiles of 128 x 128, or of one of 256 x 128 by a pair of CTAs."""
    problem = GemmProblem(256, 128, 512)
    plan = Plan(
        problem.config(ARCHITECTURES["sm_100a"], False, pair=ctas == 2, cluster=(ctas, 1), tile_n=128), False, 2 // ctas
    )
    with simulating("sm_100a", clock="b200") as runs:
        gemm(operands(256, 512, 1), operands(128, 512, 2), config=plan)
    return runs[-1].result.timing


@needs_ptxas
@pytest.mark.parametrize("ctas", [1, 2])
def test_a_gemm_of_tcgen05(ctas):
    """All of its events found their instruction; the tensor cores' work is a bound of its time."""
    timing = launch(ctas)
    assert timing.machine == "b200" and timing.coverage["events"] > 0.99 and timing.coverage["code"] > 0.9
    products, column = 512 / 64, B200[f"tcgen05.column_{ctas}_128"]
    assert timing.cycles > products * column * 128 + B200["dram.latency_50"]
    assert timing.again({}) == timing.microseconds
    waits = {reason for cost in timing.code for reason in cost.lost}
    assert {"mbarrier: copies", "mbarrier: tensor"} <= waits and timing.pipes["tensor"] > 0


@needs_ptxas
@pytest.mark.parametrize("name", COUNTED)
def test_every_figure_of_tensor_cores_counts_in_a_launch(name):
    """Three times the cycles, or a third of the rate, make a launch slower."""
    factor = 1 / 3 if "bytes" in name else 3.0
    ctas = 2 if name.endswith("_2_128") else 1
    assert launch(ctas).again({name: factor}) > launch(ctas).microseconds


@needs_ptxas
def test_a_shift_takes_its_turn_on_the_tensor_core():
    shifts = f"""
    mov.u32 %r6, bar; setp.ne.u32 %q1, %r0, 0; @%q1 bra SHIFTED;
    mbarrier.init.shared.b64 [%r6], 1; fence.mbarrier_init.release.cluster;
    {"tcgen05.shift.cta_group::1.down [%r3];" * 4}
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r6];
    {wait("%r6", "0")}
    SHIFTED:
    """
    text = module((HEAD + shifts + TAIL).replace("{columns}", "32"), 0, DECLARED + ".shared .align 8 .b64 bar;")
    found = launch_kernel(text, [], block=(32, 1, 1), clock="b200").timing
    slow, slower = (found.again({"tcgen05.copy_bytes_per_cycle": 1 / f}) for f in (30, 60))
    cycles = 4 * 31 * 32 / B200["tcgen05.copy_bytes_per_cycle"]
    assert (slower - slow) * found.cycles_per_us == pytest.approx(30 * cycles) and found.pipes["tensor"] > 0


def test_every_figure_has_a_source():
    assert clock_of("sm_100a") == "b200" and set(B200.figures) == set(B200.sources)
    assert set(machine("h200").figures) - set(B200.figures) == {n for n in machine("h200").figures if "wgmma" in n}
    assert B200.arch == "sm_100a"

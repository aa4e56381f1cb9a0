"""A gated GEMM's result quantized in its epilogue: the bits of quantizing the float32 result."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support import backends
from support.gated_gemm_problems import Gated, Problem, make
from support.gemm_problems import Case, poisoned_memory

from cute_nvfp4 import BlockScaledTensor, gemm
from cute_nvfp4.formats import as_bytes
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.scale_layout import blocked_bytes, blocked_view

pytestmark = [pytest.mark.kernels("sm_100a", "sm_103a"), pytest.mark.sweep(6)]
BASE = Case(m=140, n=208, k=544, batch=2, alpha=2.0**-8, tile_n=128, exact=True, out="new")
GUARD = 0xA5
CASES = {
    "64": replace(BASE, tile_n=64, batch=0, n=400),
    "128": BASE,
    "192, half a piece": replace(BASE, tile_n=192, batch=1),
    "one block": replace(BASE, m=1, n=16, batch=1),
    "pair": replace(BASE, m=300, pair=True, cluster_m=2),
    "cluster": replace(BASE, m=300, cluster_m=2, cluster_n=2, tile_n=64, batch=1),
    "split": replace(BASE, k=1056, tile_n=64, split_k=4, batch=1),
    "stream": replace(BASE, k=2080, scheduler="stream_k", workers=7, batch=1),
    "chosen": replace(BASE, workers=0, m=130, n=96),
}


def room(problem: Problem, global_scale: float, offset: int = 0) -> tuple[BlockScaledTensor, torch.Tensor]:
    """An output with ``GUARD`` in it and behind it, and the memory of its data."""
    case = problem.gated.case
    shape = (case.m, case.n // 2) if case.batch == 0 else (case.batch, case.m, case.n // 2)
    memory = torch.full((math.prod(shape) + 64,), GUARD, dtype=torch.uint8, device=backends.device())
    data = memory[offset : offset + math.prod(shape)].view(shape)
    scale = torch.full(
        (blocked_bytes(case.m, case.n // 16, max(case.batch, 1)),), GUARD, dtype=torch.uint8, device=backends.device()
    )
    scale = blocked_view(scale, case.m, case.n // 16, max(case.batch, 1))
    return BlockScaledTensor(data, scale, torch.tensor(global_scale, device=backends.device())), memory


def same(got: BlockScaledTensor, right: BlockScaledTensor) -> bool:
    """Data and scales, padding included."""
    return as_bytes(got.data).equal(right.data) and as_bytes(got.blocked_scale()).equal(right.blocked_scale())


@pytest.mark.parametrize("name", CASES)
def test_bits_of_the_unfused_result(name: str) -> None:
    """Sums are exact here: both kernels have the same float32 result, whatever the order of their sums."""
    problem = make(Gated(CASES[name], "gelu_tanh" if name == "pair" else "silu"))
    unfused = problem.run(out_dtype=torch.float32)
    for global_scale in (0.37, float(unfused.abs().max()) / 2688):
        right = quantize(unfused, "nvfp4", "max", global_scale=global_scale, backend="reference")
        assert right.data.unique().numel() > 4
        out, memory = room(problem, global_scale)
        assert problem.run(out=out) is out
        assert same(out, right) and (memory[out.data.numel() :] == GUARD).all()
    new = problem.run(out_global_scale=global_scale)
    assert same(new, right) and new.global_scale.equal(right.global_scale)


@pytest.mark.parametrize("n", [144, 160])
def test_data_aligned_to_eight_bytes(n: int) -> None:
    problem = make(Gated(replace(BASE, n=n, batch=1, m=40)))
    right = quantize(problem.run(out_dtype=torch.float32), "nvfp4", "max", global_scale=0.5, backend="reference")
    out, memory = room(problem, 0.5, offset=8)
    problem.run(out=out)
    assert same(out, right) and (memory[:8] == GUARD).all() and (memory[8 + out.data.numel() :] == GUARD).all()


def test_scales_from_the_smallest_to_the_largest() -> None:
    """alpha and the global scale move scales through E4M3's subnormals to zero, and beyond its largest number."""
    seen = set()
    for exponent, global_scales in (
        (-30, (1.0, 2.0**-100)),
        (-9, (1.0, 30.0, 300.0, 3000.0, 2.0**118)),
        (20, (2.0**40, 1e-3)),
    ):
        problem = make(Gated(replace(BASE, m=33, n=64, batch=1, alpha=2.0**exponent), "relu"))
        unfused = problem.run(out_dtype=torch.float32)
        for global_scale in global_scales:
            right = quantize(unfused, "nvfp4", "max", global_scale=global_scale, backend="reference")
            assert same(problem.run(out_global_scale=global_scale), right)
            seen |= set(right.rowmajor_scale().flatten().tolist())
    assert {0, 1, 7, 8, 0x7E} <= seen, sorted(seen)


@pytest.mark.parametrize("global_scale", [0.0, -1.0, float("nan"), float("inf"), 2.0**-101, 2.0**119])
def test_a_global_scale_out_of_range_is_nan(global_scale: float) -> None:
    problem = make(Gated(replace(BASE, m=33, n=80, batch=1)))
    made = problem.run(out_global_scale=torch.tensor(global_scale, device=backends.device()))
    right = quantize(
        problem.run(out_dtype=torch.float32),
        "nvfp4",
        "max",
        global_scale=torch.tensor(global_scale, device=backends.device()),
        backend="reference",
    )
    assert same(made, right)
    assert made.rowmajor_scale().eq(0x7F).all() and not as_bytes(made.blocked_scale()).eq(0x7F).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_infinity_and_nan_poison_their_blocks(bad: float) -> None:
    """Rows 3 and 64 of the result: every block of them, and no other."""
    problem = make(Gated(replace(BASE, m=70, n=80, batch=1, alpha=2.0**-9), "relu"))
    scale = problem.a.rowmajor_scale().clone()
    problem.a.data[0, [3, 64]] = 0x77
    if math.isnan(bad):
        for row in (3, 64):
            problem.a.scale[row % 32, row // 32 % 4, 0, 0, 0, 0] = 0x7F
    else:
        problem = replace(problem, alpha=2.0**120)
    unfused = problem.run(out_dtype=torch.float32)
    assert unfused.isfinite().any() and not unfused.isfinite().all() and scale.numel()
    right = quantize(unfused, "nvfp4", "max", global_scale=1.0, backend="reference")
    assert same(problem.run(out_global_scale=1.0), right)


def test_the_next_product_takes_it() -> None:
    """A feed-forward layer: gate and up projections, then down, without leaving NVFP4."""
    problem = make(Gated(replace(BASE, n=512, batch=0, exact=False), form="interleaved"))
    unfused = problem.run(out_dtype=torch.float32)
    scale = float(unfused.abs().max()) / 2688
    down = make(Gated(replace(BASE, m=16, n=96, k=512, batch=0))).alone[0]
    hidden = problem.run(out_global_scale=scale)
    fused = gemm(hidden, down, out_dtype=torch.float32)
    assert (
        same(hidden, quantize(unfused, "nvfp4", "max", global_scale=scale, backend="reference"))
        and fused.isfinite().all()
    )
    assert fused.equal(
        gemm(quantize(unfused, "nvfp4", "max", global_scale=scale, backend="reference"), down, out_dtype=torch.float32)
    )


def test_reference_backend() -> None:
    problem = make(Gated(replace(BASE, batch=0), "relu"))
    made = problem.run(out_global_scale=0.37, backend="reference", config=None)
    # sums and the product of this gate are exact, so that both round the same numbers
    assert same(made, problem.run(out_global_scale=0.37))


def test_a_graph_needs_no_new_memory() -> None:
    """With ``out`` nothing is allocated for the result: the same tensors come back, filled again."""
    problem = make(Gated(replace(BASE, batch=1, m=64, n=64)))
    out, _ = room(problem, 0.37)
    with poisoned_memory():
        pointers = out.data.data_ptr(), out.scale.data_ptr()
        first = as_bytes(problem.run(out=out).data).clone()
        as_bytes(out.data).fill_(GUARD)
        assert as_bytes(problem.run(out=out).data).equal(first)
    assert pointers == (out.data.data_ptr(), out.scale.data_ptr())

"""alpha, global scales and what a packing leaves out, where their product is no float32 number but the result is.

Every kernel that scales sums is tried with products that overflow or underflow on the way, in any order, or altogether.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cutlass import Int32
from support import backends
from support.exact_sums import Expected, gated, product, values_of, wrong
from support.mutants import WRONG, Source, outcome

from cute_nvfp4 import (
    BlockScaledTensor,
    GroupedRows,
    gated_gemm,
    gemm,
    gemv,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare_weight,
    to_blocked,
)
from cute_nvfp4.kernels import factors as sum_factors
from cute_nvfp4.kernels.gemm import epilogue
from cute_nvfp4.kernels.gemm.packed import stream_sums
from cute_nvfp4.kernels.gemm.sm90 import epilogue as wgmma_epilogue
from cute_nvfp4.kernels.gemv import epilogue as gemv_epilogue

pytestmark = [pytest.mark.sweep]
K = 128
"""Enough for the streaming kernel, and few enough for exact sums."""
SCALES = (0x30, 0x38, 0x3C, 0x40)
"""E4M3 codes of 0.5, 1, 1.5 and 2: sums have few bits, and none rounds."""
FACTORS = (
    (1.0, 3e38, 3e-38),  # one of them times the factor of a packing or of a dot product is infinite
    (1.0, 3e-38, 3e38),
    (20.0, 3e35, 1e-36),
    (2.0**-126, 1e-3, 2.0**127),  # subnormal on the way, with bits lost
    (1e-38, 1e-30, 1e30),
    (2.0**-149, 1.0, 2.0**127),  # alpha itself
    (3e38, 3e38, 4e-39),  # the product of all; sums below 1 have a result
    (3e38, 0.0, 3e38),
    (1e-30, 1e-30, 1e30),
    (1.0, 1e-4, 1e-37),
    (1e-30, 1e-12, 1.0),  # a subnormal product; its bits are not lost where sums are large
    (1e-30, -1e-20, 1e-10),
    (-1e30, 1e20, 1e-10),
    (math.inf, 1.0, 1e-30),
    (3e38, 3e38, math.nan),
)
"""alpha, and the global scales of a and b."""


class Operand:
    """NVFP4 rows with few bits, and their values; scale: the global one; zeros: whether the first row is zero, which an
    infinite product would make NaN."""

    def __init__(self, seed: int, *shape: int, scale: float | None = None, zeros: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, (*shape, K), generator=generator, dtype=torch.uint8)
        if zeros:
            codes[..., 0, :] = 0
        index = torch.randint(0, len(SCALES), (*shape, K // 16), generator=generator)
        scales = torch.tensor(SCALES, dtype=torch.uint8)[index]
        self.values = values_of(codes, scales, "nvfp4")
        factor = None if scale is None else torch.tensor([scale], dtype=torch.float32)
        self.factor = 1.0 if factor is None else float(factor)
        place = backends.place
        data = place(codes[..., ::2] | codes[..., 1::2] << 4)
        self.tensor = BlockScaledTensor(data, place(to_blocked(scales)), None if factor is None else place(factor))


def _plain(a: Operand, b: Operand, alpha: Any) -> Any:
    return gemm(a.tensor, b.tensor, alpha=alpha, out_dtype=torch.float32), lambda p: p(a, b)


def _bias(a: Operand, b: Operand, alpha: Any) -> Any:
    bias = torch.arange(b.tensor.rows, dtype=torch.float32)
    found = gemm(a.tensor, b.tensor, alpha=alpha, bias=backends.place(bias), out_dtype=torch.float32)
    return found, lambda p: p(a, b, bias.double())


def _vector(a: Operand, b: Operand, alpha: Any) -> Any:
    found = gemv(a.tensor, b.tensor, alpha=float(alpha), out_dtype=torch.float32)
    return found.unsqueeze(1), lambda p: Expected(*(None if x is None else x[:, :1] for x in p(a, b)))


def _gated(a: Operand, b: Operand, alpha: Any) -> Any:
    up = Operand(3, 16, scale=b.factor)
    found = gated_gemm(a.tensor, b.tensor, up.tensor, gate="silu", alpha=alpha, out_dtype=torch.float32)
    return found, lambda p: gated(p(a, b), p(a, up), "silu")


def _groups(a: Operand, b: Operand, alpha: Any) -> Any:
    found = grouped_gemm([(a.tensor, b.tensor)], alpha=alpha, out_dtype=torch.float32)
    return found[0], lambda p: p(a, b)


def _rows(a: Operand, b: Operand, alpha: Any) -> Any:
    stack = BlockScaledTensor(b.tensor.data[None], b.tensor.scale, b.tensor.global_scale)
    rows = GroupedRows.of(a.tensor, [0, a.tensor.rows])
    return grouped_gemm_contiguous(rows, stack, alpha=alpha, out_dtype=torch.float32), lambda p: p(a, b)


def _prepared(a: Operand, b: Operand, alpha: Any) -> Any:
    weight = prepare_weight(b.tensor, dtype=torch.float16)
    return gemm(a.tensor, weight, alpha=alpha, out_dtype=torch.float32), lambda p: p(a, b)


def _prepared_gated(a: Operand, b: Operand, alpha: Any) -> Any:
    # each weight has a factor of its own, of which one needs what the other does not
    up = Operand(3, 16, scale=1 / b.factor if 0 < b.factor < math.inf else b.factor)
    weight = prepare_weight(b.tensor, up.tensor, dtype=torch.float16)
    found = gated_gemm(a.tensor, weight, gate="identity", alpha=alpha, out_dtype=torch.float32)
    return found, lambda p: gated(p(a, b), p(a, up), "identity")


def _prepared_rows(a: Operand, b: Operand, alpha: Any) -> Any:
    stack = BlockScaledTensor(b.tensor.data[None], b.tensor.scale, b.tensor.global_scale)
    weight = prepare_weight(stack, dtype=torch.float16)
    rows = GroupedRows.of(a.tensor, [0, a.tensor.rows])
    return grouped_gemm_contiguous(rows, weight, alpha=alpha, out_dtype=torch.float32), lambda p: p(a, b)


PLACES: dict[str, tuple[Callable, tuple[str, ...], int]] = {
    "gemm": (_plain, ("sm_90a", "sm_100a", "sm_120a"), 5),
    "gemm of many rows": (_plain, ("sm_90a",), 20),
    "gemm with bias": (_bias, ("sm_90a", "sm_100a"), 20),
    "gemv": (_vector, ("sm_90a", "sm_100a"), 5),
    "gated_gemm": (_gated, ("sm_100a", "sm_120a"), 5),
    "grouped_gemm": (_groups, ("sm_100a",), 5),
    "rows of groups": (_rows, ("sm_100a", "sm_120a"), 5),
    "prepared, streamed": (_prepared, ("sm_90a", "sm_120a"), 5),
    "prepared": (_prepared, ("sm_90a", "sm_120a"), 20),
    "prepared, gated, streamed": (_prepared_gated, ("sm_90a",), 5),
    "prepared, gated": (_prepared_gated, ("sm_90a", "sm_120a"), 20),
    "prepared rows": (_prepared_rows, ("sm_90a", "sm_120a"), 5),
}
"""What is called, where, and with how many rows."""
RUNS = [
    pytest.param(name, arch, marks=pytest.mark.kernels(arch), id=f"{name.replace(' ', '_')}-{arch}")
    for name, (_, archs, _) in PLACES.items()
    for arch in archs
]


def judged(name: str, alpha: float, a_scale: float, b_scale: float, on_device: bool = False) -> str:
    """What is wrong with a call."""
    call, _, m = PLACES[name]
    a, b = Operand(1, m, scale=a_scale, zeros=True), Operand(2, 16, scale=b_scale)
    number = torch.tensor([alpha], dtype=torch.float32)
    found, expected = call(a, b, backends.place(number) if on_device else alpha)

    def of(x: Operand, y: Operand, bias: torch.Tensor | None = None) -> Expected:
        return product(x.values, y.values, float(number) * x.factor * y.factor, bias)

    return wrong(found.cpu(), expected(of))


@pytest.mark.parametrize(("name", "arch"), RUNS, indirect=["arch"])
@pytest.mark.parametrize("factors", FACTORS, ids=lambda x: "_".join(f"{y:g}" for y in x))
def test_factors(name: str, arch: str, factors: tuple[float, float, float]) -> None:
    del arch
    assert judged(name, *factors) == ""


def _left_out(values: Any, factor: Any, registers: Any) -> None:
    """No shift."""


def _unscaled(total: Any, factor: Any) -> Any:
    return total * factor.alpha


def _as_it_comes(normal: Any, product: Any, numbers: Any, exponent: int) -> tuple:
    """Every product taken for a normal number."""
    return product, Int32(0)


TINY, INFINITE, APART = (1e-30, 1e-12, 1.0), (1.0, 3e38, 3e-38), (1.0, 1e-4, 1e-37)
MUTANTS = (
    ("gemm", "sm_100a", TINY, Source(epilogue, "apply_shift", _left_out)),
    ("prepared, streamed", "sm_90a", TINY, Source(stream_sums, "scaled", _unscaled)),
    ("prepared", "sm_90a", TINY, Source(wgmma_epilogue, "apply_shift", _left_out)),
    ("prepared, gated", "sm_90a", APART, Source(wgmma_epilogue, "apply_shift", _left_out)),
    ("gemv", "sm_90a", TINY, Source(gemv_epilogue, "scaled", _unscaled)),
    ("gemv", "sm_100a", INFINITE, Source(sum_factors, "_unless", _as_it_comes)),
    ("prepared rows", "sm_90a", INFINITE, Source(sum_factors, "_unless", _as_it_comes)),
)


@pytest.mark.sim_only("a mutant is traced anew")
@pytest.mark.parametrize(
    ("name", "arch", "factors", "change"), MUTANTS, indirect=["arch"], ids=lambda x: str(x).split("(")[0]
)
def test_mutants_are_noticed(name: str, arch: str, factors: tuple[float, ...], change: Source) -> None:
    assert outcome(change, lambda: not judged(name, *factors), arch) == WRONG

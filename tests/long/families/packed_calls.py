"""Calls with prepared weights at random, by the plans that are chosen: of every format, alone, gated, and of groups."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from support.packed_problems import gated_product, operand, within

from cute_nvfp4 import BlockScaledTensor, GroupedRows, grouped_gemm, grouped_gemm_contiguous, prepare_weight
from cute_nvfp4.formats import FORMATS as BLOCK_FORMATS
from cute_nvfp4.kernels.gemm.config import GATE_NAMES
from tests.kernels.prepared_weight import test_packed_gated_gemm as gated
from tests.kernels.prepared_weight import test_packed_gemm as packed
from tests.long.depends import PACKED
from tests.long.family import Family, Once

_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class PackedCall:
    """Rows x (m, k) times a weight (n, k) of ``format``, prepared for ``type``; x is that, or ``quantized`` to NVFP4.

    bias: its dtype. gate: of two weights.
    """

    m: int
    n: int
    k: int
    format: str = "nvfp4"
    type: str = "bfloat16"
    result: str = "float32"
    quantized: bool = False
    bias: str = ""
    gate: str = ""


@dataclass(frozen=True)
class PackedGroups:
    """Rows of groups, each times a weight (n, k) of its own: of a stack, of which group 0 begins at row ``before``; or
    of a list, where n and k are different in each by a multiple of ``more``."""

    sizes: tuple[int, ...]
    n: int
    k: int
    listed: bool = False
    more: int = 0
    before: int = 0
    format: str = "nvfp4"
    type: str = "bfloat16"
    result: str = "float32"
    quantized: bool = False
    gate: str = ""
    seed: int = 0


def _any(g: np.random.Generator, values: Any) -> Any:
    return values[int(g.integers(len(values)))]


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _kind(g: np.random.Generator) -> dict[str, Any]:
    """Formats and dtypes that a call takes together."""
    format, quantized = str(_any(g, list(BLOCK_FORMATS))), bool(g.integers(3) == 0)
    # MX weights of a float16 product have fewer scales; what is quantized is decoded to float16
    half = quantized or g.integers(2) == 0
    return {
        "format": format, "quantized": quantized, "type": "float16" if half else "bfloat16",
        "result": str(_any(g, _DTYPES)), "gate": str(_any(g, ("", "", *GATE_NAMES))),
    }  # fmt: skip


# --- one product, or two and a gate


def _random_call(generator: np.random.Generator, arch: str) -> PackedCall:
    g, kind = generator, _kind(generator)
    m = int(g.integers(1, 17) if g.integers(2) else g.integers(17, 140))
    # of one element the problems take no deviation
    n, k = int(g.integers(2, 300)), 32 * int(g.integers(1, 17))
    bias = "" if kind["gate"] else str(_any(g, ("", "", *_DTYPES)))
    return PackedCall(m, n, k, **kind, bias=bias)


def _call(case: PackedCall) -> Once:
    shared = {
        "dtype": _dtype(case.type), "out": _dtype(case.result), "quantized": case.quantized,
        "format": BLOCK_FORMATS[case.format],
    }  # fmt: skip
    problem: Any
    if case.gate:
        problem = gated.Problem(gated.Case(case.m, case.n, case.k, case.gate, **shared))
    else:
        bias = _dtype(case.bias) if case.bias else None
        problem = packed.Problem(packed.Case(case.m, case.n, case.k, **shared, bias=bias))
    return lambda: _right(problem.right(problem.run()))


def _right(right: bool) -> None:
    assert right, "wrong"


# --- groups


def _random_groups(generator: np.random.Generator, arch: str) -> PackedGroups:
    g, kind = generator, _kind(generator)
    listed, count = bool(g.integers(2)), int(_any(g, (1, 2, 3, 5, 9, 18)))
    most = 200 // count
    sizes = tuple(0 if g.integers(4) == 0 else int(g.integers(1, most + 1)) for _ in range(count))
    n, k = int(g.integers(2, 200)), 32 * int(g.integers(1, 9))
    more = int(_any(g, (0, 1, 8))) if listed else 0
    before = 0 if listed else int(g.integers(4))
    return PackedGroups(sizes, n, k, listed, more, before, **kind, seed=int(g.integers(1 << 20)))


@dataclass(frozen=True)
class _Group:
    """What a group is of, in float64: rows, and its weight or its two."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]


class _Problem:
    """Operands of groups. Their factors make arguments of a gate of about 4, and results that float16 has."""

    groups: list[_Group]

    def __init__(self, case: PackedGroups) -> None:
        self.case, self.dtype, self.out = case, _dtype(case.type), _dtype(case.result)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.options = {"gate": case.gate} if case.gate else {}

    def factors(self) -> torch.Tensor:
        products = [group.x @ group.weights[0].t() for group in self.groups]
        sizes = [float(x.abs().mean()) if len(x) else 4.0 for x in products]
        return torch.tensor([4 / max(size, 2.0**-20) for size in sizes])

    def rows(self, m: int) -> Any:
        if self.case.quantized:
            return operand((m, self.k), self.generator, 0.25)
        return torch.randn(m, self.k, generator=self.generator).to(self.dtype)

    def weights(self, *shape: int) -> tuple[BlockScaledTensor, ...]:
        format = BLOCK_FORMATS[self.case.format]
        each = (0.5, -0.125) if self.case.gate else (0.5,)
        return tuple(operand(shape, self.generator, factor, format, self.dtype) for factor in each)

    def check(self) -> None:
        for i, (out, group) in enumerate(zip(self.run(), self.groups, strict=True)):
            if len(group.x):
                _right(self._near(out, group, float(self.alpha[i])))

    def _near(self, out: torch.Tensor, group: _Group, alpha: float) -> bool:
        if self.case.gate:
            return gated_product(group.x, group.weights, alpha, self.case.gate).right(out)
        (weight,) = group.weights
        # the later groups of a list are longer along K than what the bound was made for
        magnitude = group.x.abs() @ weight.abs().t() * abs(alpha) * max(1.0, group.x.shape[1] / 256)
        return within(out, group.x @ weight.t() * alpha, magnitude)


class _List(_Problem):
    """Each with sizes of its own; rows of results lie apart, some unaligned, and NaN lies between them."""

    def __init__(self, case: PackedGroups) -> None:
        super().__init__(case)
        self.pairs: list[tuple[Any, Any]] = []
        self.rooms, self.groups = [], []
        for i, m in enumerate(case.sizes):
            n, self.k = case.n + i * case.more, case.k + 32 * i * bool(case.more)
            weights, x = self.weights(n, self.k), self.rows(m) if m else None
            wide = _wide(x) if m else torch.zeros(0, self.k, dtype=torch.float64)
            self.groups.append(_Group(wide, tuple(w.dequantize(torch.float64) for w in weights)))
            self.pairs.append((x, prepare_weight(*weights, dtype=self.dtype)))
            self.rooms.append(torch.empty(m, n + 8 + i % 2, dtype=self.out))
        self.alpha = self.factors()

    def run(self) -> list[torch.Tensor]:
        outs = [room.fill_(float("nan"))[:, : room.shape[1] - 8 - i % 2] for i, room in enumerate(self.rooms)]
        grouped_gemm(self.pairs, alpha=self.alpha, out=outs, **self.options)
        assert all(room[:, out.shape[1] :].isnan().all() for room, out in zip(self.rooms, outs)), "written beside"
        return outs


class _Stack(_Problem):
    """Rows one after the other, some of no group before and after."""

    def __init__(self, case: PackedGroups) -> None:
        super().__init__(case)
        self.k, self.edges = case.k, [*accumulate(case.sizes, initial=case.before)]
        x, weights = self.rows(self.edges[-1] + 3), self.weights(len(case.sizes), case.n, case.k)
        wide, values = _wide(x), [w.dequantize(torch.float64) for w in weights]
        self.groups = [
            _Group(wide[begin:end], tuple(v[i] for v in values))
            for i, (begin, end) in enumerate(zip(self.edges, self.edges[1:]))
        ]
        self.offsets = torch.tensor(self.edges, dtype=torch.int32)
        self.x = GroupedRows.of(x, self.offsets) if case.quantized else x
        self.prepared, self.alpha = prepare_weight(*weights, dtype=self.dtype), self.factors()

    def run(self) -> list[torch.Tensor]:
        out = torch.full((self.edges[-1] + 3, self.case.n), float("nan"), dtype=self.out)
        status, offsets = torch.full((1,), 7, dtype=torch.int32), None if self.case.quantized else self.offsets
        grouped_gemm_contiguous(
            self.x, self.prepared, offsets=offsets, alpha=self.alpha, out=out, status=status, **self.options
        )
        assert status.item() == 0
        assert out[: self.edges[0]].isnan().all() and out[self.edges[-1] :].isnan().all(), "rows of no group"
        return [out[begin:end] for begin, end in zip(self.edges, self.edges[1:])]


def _wide(x: Any) -> torch.Tensor:
    return x.dequantize(torch.float64) if isinstance(x, BlockScaledTensor) else x.double()


def _groups(case: PackedGroups) -> Once:
    return (_List if case.listed else _Stack)(case).check


_ARCHS = ("sm_90a", "sm_120a")
FAMILIES = (
    Family("packed-call", PackedCall, _call, _random_call, archs=_ARCHS, weight=2, goal=300, rooms=PACKED),
    Family("packed-groups", PackedGroups, _groups, _random_groups, archs=_ARCHS, weight=2, goal=300, rooms=PACKED),
)

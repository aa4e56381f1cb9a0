"""GEMV, quantization, alone and fused, and its inverse: problems at random."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from support import fused_problems
from support import gemv_problems as gemv
from support import quantize_problems as quantizing

from cute_nvfp4 import BlockScaledTensor, dequantize, prepare_weight, to_blocked
from cute_nvfp4.formats import FORMATS as BLOCK_FORMATS
from cute_nvfp4.quantization.hadamard import Hadamard
from cute_nvfp4.quantization.rules import resolve_format
from tests.long.family import Family, Once

ARCHS = ("sm_100a", "sm_90a", "sm_120a", "sm_121a")
DTYPES = ("bfloat16", "float16", "float32")
VIEWS = ("", "", "rows apart", "from 1", "from 8", "columns apart", "transposed")
FUSED_VIEWS = ("", "rows apart", "from 1", "from 8")


@dataclass(frozen=True)
class GemvCase:
    """A seed of ``gemv_problems.random_case``, with limits that a smaller case lowers."""

    seed: int
    max_m: int = 700
    max_k: int = 5000


@dataclass(frozen=True)
class QuantizeCase:
    """Random rows by one rule. ``operation``: quantize, rmsnorm or silu_mul.

    batch: matrices, 0 for x without that dimension. edges: numbers of every kind. view: how x lies in memory, NaN
    between its rows. form: "", "tile" (square tiles), or "transposed" (the strided dimension is K). rotation: elements
    that are rotated together. computed: the global scale comes from the data. second: a residual, or an ``up`` of its
    own. weight: of rmsnorm, "x" (of x's dtype), "float32" or "".
    """

    format: str
    rule: str
    rows: int
    k: int
    operation: str = "quantize"
    dtype: str = "bfloat16"
    global_scale: float | None = None
    stochastic: bool = False
    seed: int = 0
    batch: int = 0
    edges: bool = False
    view: str = ""
    form: str = ""
    rotation: int = 0
    computed: bool = False
    layout: str = "blocked"
    second: bool = False
    weight: str = "x"
    eps: float = 1e-6


@dataclass(frozen=True)
class CodesCase:
    """Every code under every scale, (batch, rows, k); ``batch`` 0: a matrix. pitch: bytes between rows of data.

    dtype: of the values, or of the activations that a packed weight is for. two: a weight and another, interleaved.
    """

    format: str
    rows: int
    k: int
    dtype: str = "bfloat16"
    batch: int = 0
    layout: str = "blocked"
    factor: float | None = None
    pitch: int = 0
    two: bool = False
    seed: int = 0


def _random_gemv(generator: np.random.Generator, arch: str) -> GemvCase:
    return GemvCase(int(generator.integers(1 << 30)))


def _gemv(case: GemvCase) -> Once:
    drawn = gemv.random_case(np.random.default_rng(case.seed), case.max_m, case.max_k)
    problem = gemv.make(drawn)
    return lambda: gemv.check(problem, problem.run())


# --- quantization


def _any(g: np.random.Generator, values: Any) -> Any:
    return values[int(g.integers(len(values)))]


def _random_quantize(generator: np.random.Generator, arch: str) -> QuantizeCase:
    g = generator
    kind = str(g.choice(quantizing.FORMATS))
    operation = str(g.choice(("quantize", "quantize", "rmsnorm", "silu_mul")))
    form = str(_any(g, ("", "", "tile", "transposed"))) if operation == "quantize" else ""
    rules = quantizing.rules(kind, tile=form == "tile")
    rule = str(g.choice([r for r in rules if r != "optimal" or operation == "quantize"]))
    # a search for each block takes long
    most_rows, most_k = (4, 2) if rule == "optimal" else (8, 6)
    block = resolve_format(kind).block
    rows, k = int(2 ** g.integers(0, most_rows + 1)), 32 * int(2 ** g.integers(0, most_k + 1))
    scale = None if g.integers(2) else float(2.0 ** g.integers(-8, 8))
    case = QuantizeCase(
        kind, rule, int(g.integers(1, rows + 1)), block * int(g.integers(1, k // block + 1)), operation,
        str(g.choice(DTYPES)), scale, seed=int(g.integers(1 << 20)), layout=str(_any(g, ("blocked", "rowmajor"))),
        computed=bool(kind == "nvfp4" and g.integers(4) == 0),
    )  # fmt: skip
    if operation != "quantize":
        return replace(
            case, view=_any(g, FUSED_VIEWS), second=bool(g.integers(2)), weight=_any(g, ("x", "float32", "")),
            eps=_any(g, (1e-6, 0.0, 3.0)),
        )  # fmt: skip
    return replace(
        case, stochastic=bool(rule != "optimal" and g.integers(3) == 0), batch=int(_any(g, (0, 0, 1, 3))), form=form,
        edges=bool(case.rows * case.k >= 2048 and g.integers(2)), view=_any(g, VIEWS),
        rotation=int(_any(g, (0, 0, 2, 16))),
    )  # fmt: skip


def _quantize(case: QuantizeCase) -> Once:
    return lambda: _check_quantize(case)


def _check_quantize(case: QuantizeCase) -> None:
    dtype = getattr(torch, case.dtype)
    scale: Any = "auto" if case.computed else case.global_scale if case.format == "nvfp4" else None
    if case.operation == "quantize":
        options: dict[str, Any] = {"global_scale": scale, "scale_layout": case.layout, "block_2d": case.form == "tile"}
        if case.rotation:
            options["hadamard"] = Hadamard.from_seed(case.seed, case.rotation)
        options |= {"seed": case.seed} if case.stochastic else {}
        x = _rows(case, dtype)
        if case.form == "transposed":
            x, options = x.mT.contiguous(), options | {"transpose": True}
        found = quantizing.differences(_lying(x, case.view), case.format, case.rule, **options)
        assert not found, found
        return
    options = {"format": case.format, "rule": case.rule, "scale_layout": case.layout}
    options |= {} if scale is None else {"global_scale": scale}
    if case.operation == "rmsnorm":
        x = fused_problems.random(case.rows, case.k, dtype, case.seed)
        weight = fused_problems.random(1, case.k, dtype, case.seed + 1)[0]
        weight = weight.float() if case.weight == "float32" else weight if case.weight else None
        second = fused_problems.random(case.rows, case.k, dtype, case.seed + 2) if case.second else None
        fused_problems.check_rmsnorm(_lying(x, case.view), weight, second, eps=case.eps, **options)
        return
    x = fused_problems.random(case.rows, 2 * case.k, dtype, case.seed)
    parts = (_lying(part, case.view) for part in x.chunk(2, -1)) if case.second else (_lying(x, case.view),)
    fused_problems.check_silu_mul(*parts, **options)


def _rows(case: QuantizeCase, dtype: torch.dtype) -> torch.Tensor:
    """(rows, k) or (batch, rows, k)."""
    make = quantizing.edges if case.edges else fused_problems.random
    found = []
    for i in range(max(case.batch, 1)):
        seed = case.seed + i
        found.append(
            make(case.rows, case.k, seed=seed).to(dtype) if case.edges else make(case.rows, case.k, dtype, seed)
        )
    return torch.stack(found) if case.batch else found[0]


def _lying(x: torch.Tensor, view: str) -> torch.Tensor:
    """``x`` in memory as ``view`` says; what lies between its elements is NaN."""
    if not view:
        return x
    if view == "transposed":
        return _lying(x.mT, "rows apart").mT
    *rows, k = x.shape
    room = torch.full((*rows, 2 * k + 24), float("nan"), dtype=x.dtype)
    first = int(view[5:]) if view.startswith("from") else 0
    step = 2 if view == "columns apart" else 1
    lying = room[..., first : first + step * k : step]
    lying.copy_(x)
    return lying


# --- codes


def _random_codes(g: np.random.Generator, formats: Any) -> CodesCase:
    format = str(_any(g, formats))
    rows, k = int(2 ** g.integers(0, 10)), 2 ** int(g.integers(0, 6))
    step = BLOCK_FORMATS[format].block
    return CodesCase(
        format, int(g.integers(1, rows + 1)), step * int(g.integers(1, k + 1)), batch=int(_any(g, (0, 0, 1, 3))),
        layout=str(_any(g, ("blocked", "rowmajor"))), pitch=int(_any(g, (0, 0, 16, 32, 48))),
        seed=int(g.integers(1 << 20)),
    )  # fmt: skip


def _random_dequantize(generator: np.random.Generator, arch: str) -> CodesCase:
    case = _random_codes(generator, list(BLOCK_FORMATS))
    factor = float(2.0 ** generator.integers(-60, 60)) if case.format == "nvfp4" and generator.integers(2) else None
    return replace(case, dtype=str(_any(generator, DTYPES)), factor=factor)


def _random_pack(generator: np.random.Generator, arch: str) -> CodesCase:
    case = _random_codes(generator, ("nvfp4", "nvfp4", "mxfp8", "mxfp8_e5m2"))
    dtype = str(_any(generator, DTYPES[:2])) if case.format == "nvfp4" else "bfloat16"
    return replace(case, dtype=dtype, two=bool(generator.integers(3) == 0))


def _operand(case: CodesCase, number: int = 0) -> BlockScaledTensor:
    format, g = BLOCK_FORMATS[case.format], torch.Generator().manual_seed(case.seed + number)
    shape, columns = (max(case.batch, 1), case.rows), format.data_columns(case.k)
    data = torch.randint(0, 256, (*shape, columns + case.pitch), dtype=torch.uint8, generator=g)[..., :columns]
    scale = torch.randint(0, 256, (*shape, format.scale_columns(case.k)), dtype=torch.uint8, generator=g)
    scale = to_blocked(scale) if case.layout == "blocked" else scale if case.batch else scale[0]
    factor = None if case.factor is None else torch.tensor(case.factor)
    return BlockScaledTensor(data if case.batch else data[0], scale, factor, format)


def _dequantize(case: CodesCase) -> Once:
    x, dtype = _operand(case), getattr(torch, case.dtype)
    expected, bits = x.dequantize(dtype), torch.int32 if case.dtype == "float32" else torch.int16

    def once() -> None:
        found = dequantize(x, dtype, backend="sim")
        same = (found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())
        assert found.shape == expected.shape and bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"

    return once


def _pack(case: CodesCase) -> Once:
    weights, dtype = [_operand(case, i) for i in range(1 + case.two)], getattr(torch, case.dtype)
    expected = prepare_weight(*weights, dtype=dtype, backend="reference").packed

    def once() -> None:
        found = prepare_weight(*weights, dtype=dtype, backend="sim").packed
        assert found.shape == expected.shape and torch.equal(found, expected), int((found != expected).sum())

    return once


FAMILIES = (
    Family("gemv", GemvCase, _gemv, _random_gemv, archs=ARCHS, weight=2, goal=500, rooms=("gemv",)),
    Family(
        "quantize", QuantizeCase, _quantize, _random_quantize, archs=ARCHS, weight=3, goal=1000,
        rooms=("quantize", "kernels/gemm/gates.py"),
    ),
    Family(
        "dequantize", CodesCase, _dequantize, _random_dequantize, archs=ARCHS, goal=250,
        rooms=("dequantize", "quantize"),
    ),
    Family("pack", CodesCase, _pack, _random_pack, archs=("sm_90a", "sm_120a"), goal=250, rooms=("pack", "quantize")),
)  # fmt: skip

"""The rules that search: of all scales of the format they choose the one with the least error.

The error of a scale is that of the whole block under it: the squares of (element · scale) · global scale − x, summed in
the order of ``ordered_sum``. Among equal errors the formula's scale wins, then the smallest. By definition every scale
is evaluated; in fact a range is, outside of which the error must be larger than E, the error of the formula's scale.
With t = scale · global scale and elements sorted by magnitude a₁ ≤ … ≤ a_B:

- if 6t < a_B, the largest element is clipped, and its error is (a_B − 6t)², which is more than E if t < (a_B − √E) / 6;
- elements below t/4 become 0, and their error is their sum of squares, which is more than E if t > 4·a_i, with i the
  first at which a₁² + … + a_i² exceeds E.

The bounds are widened by more than float32 rounding can change on both sides, so the result equals that of the
exhaustive search bit for bit. The idea of such bounds is qwantize's (0.1.1).

The number of scales that are evaluated depends on the values, which torch cannot trace: under ``torch.compile`` a
search is one operator of the graph, and its inside is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_nvfp4 import formats
from cute_nvfp4.operand import is_wrapper
from cute_nvfp4.quantization.block_request import GlobalScale, Request, ordered_sum, residual
from cute_nvfp4.quantization.mx import power_of_two
from cute_nvfp4.quantization.rounding import _BIAS, round_e2m1
from cute_nvfp4.quantization.rules import resolve_rule

# relative margins of errors and of scales: sums of a few hundred float32 values are off by at most 2**-16
_ERROR_MARGIN = 1 + 2.0**-10
_SCALE_MARGIN = 2.0**-18
_LARGEST_E4M3 = 0x7E
_UE8M0_CODES = (1, 254)
# how much is searched at a time: on a CPU, blocks that fit into a second-level cache; on a GPU, elements, for each of
# which temporaries take some twenty bytes
_CPU_BLOCKS, _DEVICE_ELEMENTS = 4096, 1 << 23


_SCHEMA = (
    "(Tensor x, Tensor largest, Tensor start, Tensor? global_scale, Tensor? hessian, str rule, bool tile) -> Tensor"
)


@dataclass(frozen=True)
class _Candidates:
    """The scales of a search. ``first`` … ``last`` are codes; ``value(code)`` gives float32 scales.

    values: the scales of all codes, ascending, times the global scale; bounds are looked up in them.
    """

    first: int
    values: torch.Tensor
    value: Callable[[torch.Tensor], torch.Tensor]
    factor: GlobalScale


class _Limits(NamedTuple):
    """The lowest and the highest code that each block's scale may have; None: any."""

    lowest: torch.Tensor | None
    highest: torch.Tensor | None


_EVERY_CODE = _Limits(None, None)


def search_e4m3(x: torch.Tensor, largest: torch.Tensor, start: torch.Tensor, request: Request) -> torch.Tensor:
    """The best E4M3 code (n,) for each block of ``x`` (B, n), which is finite. start: the formula's code."""
    if torch.compiler.is_compiling() or is_wrapper(x):
        return _as_operator(x, largest, start, request)
    factor = request.global_scale
    table = formats.decode_e4m3(torch.arange(_LARGEST_E4M3 + 1, dtype=torch.uint8, device=x.device))
    candidates = _Candidates(0, table * (factor.value * factor.shift), lambda code: table[code], factor)
    return _search(x, start.to(torch.int32), candidates, request).to(torch.uint8)


def search_ue8m0(x: torch.Tensor, largest: torch.Tensor, start: torch.Tensor, request: Request) -> torch.Tensor:
    """The best UE8M0 code in 1 … 254 (int32) for each block of ``x``, which is finite. start: the formula's code.

    A block is searched as a multiple of its formula scale, so that no square overflows or underflows.
    """
    if torch.compiler.is_compiling() or is_wrapper(x):
        return _as_operator(x, largest, start, request)
    first, last = _UE8M0_CODES
    start = start.clamp(first, last)
    # codes relative to the start; codes further away give the same float32 results as the last of these
    reach = _BIAS - 1
    relative = torch.arange(-reach, reach + 1, dtype=torch.int32, device=x.device)
    candidates = _Candidates(
        -reach, power_of_two(relative), power_of_two, GlobalScale.of(torch.ones((), device=x.device))
    )
    scaled = x * power_of_two(_BIAS - start)
    limits = _Limits((first - start).clamp(min=-reach), (last - start).clamp(max=reach))
    return start + _search(scaled, torch.zeros_like(start), candidates, request, limits)


def _as_operator(x: torch.Tensor, largest: torch.Tensor, start: torch.Tensor, request: Request) -> torch.Tensor:
    factor = None if request.global_scale is None else request.global_scale.value
    return _search_operator(x, largest, start, factor, request.hessian, request.rule.name, request.tile)


@torch.library.custom_op("cute_nvfp4::search_scales", mutates_args=(), schema=_SCHEMA)
def _search_operator(x, largest, start, global_scale, hessian, rule, tile):
    """``search_e4m3`` if there is a global scale, else ``search_ue8m0``; searched formats have E2M1 elements."""
    format = formats.MXFP4 if global_scale is None else formats.NVFP4
    factor = None if global_scale is None else GlobalScale.of(global_scale)
    request = Request(format, resolve_rule(rule, format), factor, tile, None, hessian)
    return (search_ue8m0 if factor is None else search_e4m3)(x, largest, start, request)


@_search_operator.register_fake
def _(x, largest, start, global_scale, hessian, rule, tile):
    return torch.empty_like(start)


def _search(
    x: torch.Tensor, start: torch.Tensor, candidates: _Candidates, request: Request, limits: _Limits = _EVERY_CODE
) -> torch.Tensor:
    """The best code of each block, within ``limits``."""
    step = _CPU_BLOCKS if x.device.type == "cpu" else max(1, _DEVICE_ELEMENTS // x.shape[0])
    best = torch.empty_like(start)
    for begin in range(0, x.shape[1], step):
        part = slice(begin, begin + step)
        own = _Limits(*(None if limit is None else limit[part] for limit in limits))
        group = None
        if request.rule.choice == "hessian":
            group = torch.arange(begin, min(begin + step, x.shape[1]), device=x.device) % request.hessian.shape[0]
        best[part] = _search_part(x[:, part], start[part], candidates, request, own, group)
    return best


def _search_part(
    x: torch.Tensor,
    start: torch.Tensor,
    candidates: _Candidates,
    request: Request,
    limits: _Limits,
    group: torch.Tensor | None,
) -> torch.Tensor:
    squares = _evaluate(x, start, candidates)
    squares = ordered_sum(squares * squares, request.tile)
    low, high = _bounds(x, squares, candidates, request.tile)
    if limits.lowest is not None:
        low, high = torch.maximum(low, limits.lowest), torch.minimum(high, limits.highest)
    # widest ranges first, so that the blocks with candidates left are always the first ones
    width = (high - low + 1).clamp(min=0).masked_fill(squares == 0, 0)
    order = width.argsort(descending=True, stable=True)
    narrower = torch.bincount(width).cumsum(0)
    counts = (x.shape[1] - narrower[:-1]).tolist()
    x, low, best = x[:, order], low[order], start[order]
    group = None if group is None else group[order]
    least = _objective(_evaluate(x, best, candidates), request, group)
    for number, count in enumerate(counts):
        code = low[:count] + number
        error = _objective(_evaluate(x[:, :count], code, candidates), request, None if group is None else group[:count])
        better = error < least[:count]
        least[:count] = torch.where(better, error, least[:count])
        best[:count] = torch.where(better, code, best[:count])
    result = torch.empty_like(best)
    result[order] = best
    return result


def _evaluate(x: torch.Tensor, code: torch.Tensor, candidates: _Candidates) -> torch.Tensor:
    """The residuals (B, n) of the blocks ``x`` under the scales ``code``."""
    factor = candidates.factor
    scale = candidates.value(code)
    # a scale of zero has no reciprocal; all its elements are zero
    inverse = torch.where(scale == 0, 0.0, 1.0 / (factor.value * scale))
    return residual(x, round_e2m1(x * inverse), scale, factor)


def _objective(difference: torch.Tensor, request: Request, group: torch.Tensor | None) -> torch.Tensor:
    """The sum that the search minimizes: of squares, or rᵀHr in float64."""
    if group is None:
        return ordered_sum(difference * difference, request.tile)
    rows = difference.t().to(torch.float64).unsqueeze(-1)
    weighted = torch.bmm(request.hessian[group].to(torch.float64), rows)
    return (rows * weighted).sum((1, 2))


def _bounds(
    x: torch.Tensor, error: torch.Tensor, candidates: _Candidates, tile: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes (first, last) of each block outside of which the sum of squares exceeds ``error``."""
    error = error * (_ERROR_MARGIN / (2 if tile else 1))
    magnitude, _ = (x * candidates.factor.shift).abs().sort(0)
    low = (magnitude[-1] - error.sqrt()) / 6 * (1 - _SCALE_MARGIN)
    exceeds = (magnitude * magnitude).cumsum(0) > error
    # a block that may become all zeros has no upper bound
    first = exceeds.to(torch.int8).argmax(0, keepdim=True)
    high = magnitude.gather(0, first)[0] * (4 * (1 + _SCALE_MARGIN))
    high = torch.where(exceeds[-1], high, torch.inf)
    values = candidates.values
    low_code = torch.searchsorted(values, low) + candidates.first
    high_code = torch.searchsorted(values, high, right=True) - 1 + candidates.first
    return low_code.to(torch.int32), high_code.to(torch.int32)

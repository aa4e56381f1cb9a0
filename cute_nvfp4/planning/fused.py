"""Which variant of the kernels that compute what they quantize runs a request, and on how many CTAs."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import OperandError, explain
from ..kernels.quantize.arguments import Walk
from ..kernels.quantize.config import WARP, WARP_ROWS, QuantizeConfig
from ..kernels.quantize.fused import FusedConfig, RmsnormConfig, SiluMulConfig
from ..scale_layout import ATOM_ROWS
from ..target import Architecture
from .quantize import QuantizeProblem, choose, grid

# words of a row that a thread of rmsnorm holds, at most
_WORDS = 32


class _Threads(NamedTuple):
    """Threads of a CTA of rmsnorm, at most; threads of a multiprocessor, which registers allow."""

    of_cta: int
    resident: int


# how many CTAs of rmsnorm share a place on a multiprocessor, one after the other
_WAVES = 1
# CTAs of silu_mul on a multiprocessor, as registers allow
_SILU_CTAS = 5


@dataclass(frozen=True)
class FusedProblem:
    """What the choice depends on. quantize: the quantization of the values; values: whether they are stored."""

    quantize: QuantizeProblem
    values: bool = False


@dataclass(frozen=True)
class RmsnormProblem(FusedProblem):
    """residual: whether one is added; weight: its dtype, "" for none."""

    residual: bool = False
    weight: str = "bfloat16"


@dataclass(frozen=True)
class FusedPlan:
    """A variant of the kernel, its CTAs, and how they walk the rows."""

    config: FusedConfig
    ctas: int
    walk: Walk


@functools.lru_cache(maxsize=1024)
def choose_rmsnorm(problem: RmsnormProblem, arch: Architecture, sm_count: int) -> FusedPlan:
    """The plan for ``problem`` on ``sm_count`` multiprocessors of ``arch``.

    How a row is divided, and so the order of its sum, depends on K, the format and the dtype alone.

    Raises:
        OperandError: the kernel cannot run it.
    """
    config = _quantization(problem.quantize, arch)
    columns, threads = problem.quantize.columns, _threads(config)
    blocks = -(-columns // threads.of_cta)
    if blocks * config.block_bytes > 4 * _WORDS:
        most = threads.of_cta * 4 * _WORDS // config.item_bytes
        raise OperandError(
            explain(f"K of rmsnorm in {config.dtype}", got=problem.quantize.k, expected=f"at most {most}")
        )
    warps = -(-columns // (blocks * WARP))
    rows = problem.quantize.rows
    if problem.quantize.scale_layout == "blocked":
        rows = -(-rows // ATOM_ROWS) * ATOM_ROWS
    resident = max(1, (threads.resident if blocks == 1 else threads.of_cta) // (warps * WARP))
    ctas = min(rows, _WAVES * resident * sm_count)
    # the definition needs no table: filling one pays where it serves several rows, encoding takes many steps, and there
    # are few bytes to wait for (with a residual memory takes longer, and there is no register left)
    fast_path = rows > ctas and not (arch.has_fp4_convert or problem.residual or problem.values)
    fast_path = fast_path or config.choice != ""
    config = dataclasses.replace(config, warps=warps, min_blocks=min(resident, 16), bulk=False, fast_path=fast_path)
    more = {"blocks": blocks, "residual": problem.residual, "weight": problem.weight}
    return FusedPlan(RmsnormConfig(**vars(config), values=problem.values, **more), ctas, Walk(1, rows, 0, 0, 0, 0))


@functools.lru_cache(maxsize=1024)
def choose_silu_mul(problem: FusedProblem, arch: Architecture, sm_count: int) -> FusedPlan:
    """The plan, as :func:`choose_rmsnorm` has it, for the kernel of rows with two inputs."""
    config = _quantization(problem.quantize, arch)
    # two rows of a warp at a time, and a kilobyte of each CTA's that the system takes
    of_warp, rest, room = 2 * WARP_ROWS * WARP * config.block_bytes + 8 * WARP_ROWS, 3072, arch.shared_bytes + 1024
    warps = config.warps if config.warps * of_warp + rest <= room else config.warps // 2
    config = dataclasses.replace(config, warps=warps, min_blocks=min(_SILU_CTAS, room // (warps * of_warp + rest)))
    ctas, walk = grid(problem.quantize, config, sm_count)
    return FusedPlan(SiluMulConfig(**vars(config), values=problem.values), ctas, walk)


def _threads(config: QuantizeConfig) -> _Threads:
    if config.block_bytes > 64:
        return _Threads(256, 256)
    return _Threads(512, 1024 if config.block_bytes == 32 and not config.choice else 512)


def _quantization(problem: QuantizeProblem, arch: Architecture) -> QuantizeConfig:
    """How the kernels quantize rows that only registers have."""
    if problem.rule.choice == "optimal":
        raise OperandError(
            explain(
                "rule for values that are computed", got=repr(problem.rule.name), expected="one that does not search"
            )
        )
    return dataclasses.replace(choose(problem, arch, 1).config, defers=False)

"""Chooses the variant and the number of CTAs for kernels that quantize what they compute."""

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

# the largest number of words of a row that a thread of rmsnorm holds
_WORDS = 32


class _Threads(NamedTuple):
    """The largest number of threads in a CTA of rmsnorm, and on a multiprocessor, whose registers limit it."""

    of_cta: int
    resident: int


# CTAs of rmsnorm for each one that a multiprocessor holds at a time
_WAVES = 1
# CTAs of silu_mul that the registers of a multiprocessor allow
_SILU_CTAS = 5


@dataclass(frozen=True)
class FusedProblem:
    """The facts that decide the choice. quantize: the quantization of the values. values: whether they are stored."""

    quantize: QuantizeProblem
    values: bool = False


@dataclass(frozen=True)
class RmsnormProblem(FusedProblem):
    """A ``FusedProblem`` of rmsnorm. residual: whether one is added. weight: its dtype, "" for none."""

    residual: bool = False
    weight: str = "bfloat16"


@dataclass(frozen=True)
class FusedPlan:
    """A variant of the kernel, its number of CTAs, and how they walk the rows."""

    config: FusedConfig
    ctas: int
    walk: Walk


@functools.lru_cache(maxsize=1024)
def choose_rmsnorm(problem: RmsnormProblem, arch: Architecture, sm_count: int) -> FusedPlan:
    """The plan for ``problem`` on ``sm_count`` multiprocessors of ``arch``.

    K, the format and the dtype alone decide how a row is divided, and so the order of its sum.

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
    # encoding by definition needs no table. Filling one pays if it serves several rows, if encoding takes many steps,
    # and if there are few bytes to wait for (a residual makes memory slower, and leaves no register)
    fast_path = rows > ctas and not (arch.has_fp4_convert or problem.residual or problem.values)
    fast_path = fast_path or config.choice != ""
    config = dataclasses.replace(config, warps=warps, min_blocks=min(resident, 16), bulk=False, fast_path=fast_path)
    more = {"blocks": blocks, "residual": problem.residual, "weight": problem.weight}
    return FusedPlan(RmsnormConfig(**vars(config), values=problem.values, **more), ctas, Walk(1, rows, 0, 0, 0, 0))


@functools.lru_cache(maxsize=1024)
def choose_silu_mul(problem: FusedProblem, arch: Architecture, sm_count: int) -> FusedPlan:
    """The plan for the kernel of rows with two inputs, as :func:`choose_rmsnorm` makes it."""
    config = _quantization(problem.quantize, arch)
    # a warp buffers two rows at a time, and the system takes a kilobyte of each CTA's shared memory
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
    """The configuration that quantizes rows held in registers."""
    if problem.rule.choice == "optimal":
        raise OperandError(
            explain(
                "rule for values that are computed", got=repr(problem.rule.name), expected="one that does not search"
            )
        )
    return dataclasses.replace(choose(problem, arch, 1).config, defers=False)

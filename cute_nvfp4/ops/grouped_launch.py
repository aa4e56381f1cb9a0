"""How grouped GEMMs are planned, compiled and launched: the arguments of their host functions."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError, explain
from ..kernels.gemm.grouped_config import MAPS, GroupedConfig, can_implement_grouped
from ..operand import BlockScaledTensor
from ..planning.gemm_problem import Plan
from ..planning.grouped import GroupedProblem, can_run_grouped, choose_grouped
from ..runtime.backend import sm_count
from ..runtime.compile import CompiledKernel, build, compile_cached
from ..runtime.launch import Launcher, launcher
from ..target import Target
from .checks import DTYPE_NAMES, parts
from .gemm import _TILING, _launch
from .grouped_rows import GroupedRows
from .operands import FACTORS, OPERAND_TYPES, arguments_of, example_operand, example_pointer

_POINTER, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_MAP_BYTES = 128
_TABLES = 64
"""Tables of groups that are kept on the device."""


def launch_list(
    pairs: Sequence[tuple[BlockScaledTensor, BlockScaledTensor]],
    outs: Sequence[torch.Tensor],
    scalar: float,
    alpha: torch.Tensor | None,
    target: Target,
    given: Plan | None,
) -> None:
    """Runs the groups that have rows."""
    device = outs[0].device
    factors = [] if alpha is None else [(alpha, int(alpha.shape[0] > 1))]
    for side in (0, 1):
        scales = [pair[side].global_scale for pair in pairs]
        if any(x is not None for x in scales):
            one = torch.ones(1, dtype=torch.float32, device=device) if any(x is None for x in scales) else None
            factors.append((torch.cat([one if x is None else x.reshape(1) for x in scales]), 1))
    problem = GroupedProblem(
        sizes=tuple((a.rows, b.rows, a.k) for a, b in pairs),
        a_format=pairs[0][0].format.name,
        b_format=pairs[0][1].format.name,
        out=DTYPE_NAMES[outs[0].dtype],
        vector=all(_aligned(x) for x in outs),
        factors=len(factors),
    )
    plan, run = _plan(problem, target, sm_count(target, device), given)
    groups = [_row(plan, a, b, out) for (a, b), out in zip(pairs, outs)]
    scratch: dict[str, tuple[torch.Tensor, bool]] = {}
    if plan.config.maps == "parameters":
        # slots that no group has are another without rows
        padding = [(groups[0][0], (0, 0, *groups[0][1][2:]))] * (plan.config.slots - len(groups))
        filled = groups + padding
        values = [x for operands, row in filled for x in (*operands, row[2])] + [x for _, row in filled for x in row]
    else:
        table = _table(tuple(_table_row(operands, row) for operands, row in groups), device)
        words = _MAP_BYTES // 8
        maps = torch.empty((len(groups) * len(MAPS) + 1) * words, dtype=torch.int64, device=device)
        # the host's allocator aligns less than a GPU's does
        maps = maps[-maps.data_ptr() // 8 % words :]
        scratch = {"table of groups": (table, False), "tensor maps": (maps, True)}
        values = [*groups[0][0], groups[0][1][2], table.data_ptr(), len(groups), maps.data_ptr()]
    values += [outs[0].data_ptr(), 0]

    def named() -> dict[str, tuple[torch.Tensor, bool]]:
        tensors = {
            f"group {i}: {name}": x for i, (a, b) in enumerate(pairs) for name, x in parts({"a": a, "b": b}).items()
        }
        read = {name: (x, False) for name, x in tensors.items() if x is not None}
        return read | scratch | {f"out[{i}]": (x, True) for i, x in enumerate(outs)}

    _finish(run, values, plan, 1, scalar, factors, device, target, named)


def launch_contiguous(
    a: GroupedRows,
    b: BlockScaledTensor,
    out: torch.Tensor,
    status: torch.Tensor,
    scalar: float,
    alpha: torch.Tensor | None,
    target: Target,
    given: Plan | None,
) -> None:
    """Runs the contiguous form."""
    factors = [] if alpha is None else [(alpha, int(alpha.shape[0] > 1))]
    factors += [(x, 0) for x in (a.global_scale, b.global_scale) if x is not None]
    problem = GroupedProblem(
        sizes=((a.rows, b.rows, a.k),),
        a_format=a.format.name,
        b_format=b.format.name,
        out=DTYPE_NAMES[out.dtype],
        vector=_aligned(out),
        factors=len(factors),
        stack=b.batch,
    )
    plan, run = _plan(problem, target, sm_count(target, a.device), given)
    operands, row = _row(plan, a, b, out)
    values = [*operands, a.k, a.offsets.data_ptr(), a.groups, a.rows, a.atoms, status.data_ptr(), *row[3:]]

    def named() -> dict[str, tuple[torch.Tensor, bool]]:
        tensors = {**parts({"a": a, "b": b}), "a.offsets": a.offsets}
        read = {name: (x, False) for name, x in tensors.items() if x is not None}
        return read | {"out": (out, True), "status": (status, True)}

    _finish(run, values, plan, b.batch, scalar, factors, a.device, target, named)


def compile_grouped_gemm(config: GroupedConfig) -> CompiledKernel:
    """The kernels of ``config``, compiled once. Needs no GPU and no tensors.

    Raises:
        OperandError: the configuration cannot be; the message says which limit, and by how much.
    """
    reason = can_implement_grouped(config)
    if reason:
        raise OperandError(reason)
    return compile_cached(("grouped_gemm", config), lambda: _build(config))


@functools.lru_cache(maxsize=1024)
def _plan(problem: GroupedProblem, target: Target, sm_count: int, given: Plan | None) -> tuple[Plan, Launcher]:
    if given is None:
        plan = choose_grouped(problem, target.arch, sm_count)
    else:
        plan = _complete(given, problem, target)
    return plan, launcher(compile_grouped_gemm(plan.config), target, _types(plan.config))


def _complete(plan: Plan, problem: GroupedProblem, target: Target) -> Plan:
    """The caller's plan with all that the problems decide filled in."""
    if not isinstance(plan, Plan):
        raise OperandTypeError(explain("config", got=type(plan).__name__, expected="a Plan of kernels.gemm_problem"))
    reason = can_run_grouped(problem)
    if reason:
        raise OperandError(reason)
    tiling = {name: getattr(plan.config, name) for name in _TILING}
    # maps in a workspace serve few groups too
    maps = "workspace" if plan.config.maps == "workspace" and not problem.stack else ""
    config = problem.config(target.arch, plan.swap, maps, **tiling)
    least = min(-(-k // config.tile_k) for _, _, k in problem.sizes)
    if config.split_k > least:
        raise OperandError(
            explain("split_k", got=config.split_k, expected=f"at most {least}, the steps of the least K")
        )
    if plan.workers < 1:
        raise OperandError(explain("workers", got=plan.workers, expected="at least 1"))
    return dataclasses.replace(plan, config=config)


def _aligned(out: torch.Tensor) -> bool:
    """Whether all rows start, and end, at multiples of 16 bytes."""
    stride = out.stride(0) if out.shape[0] > 1 else 0
    return (out.data_ptr() | stride * out.element_size() | out.shape[1] * out.element_size()) % 16 == 0


def _row(plan: Plan, a: Any, b: Any, out: torch.Tensor) -> tuple[list, tuple]:
    """Arguments of a group's operands, and (m, n, k, output, stride), as the kernel sees them."""
    first, second = (b, a) if plan.swap else (a, b)
    stride = out.stride(0) if out.shape[0] > 1 else 0
    row = (first.rows, second.rows, a.k, out.data_ptr(), stride)
    return [*arguments_of(first), *arguments_of(second)], row


def _table_row(operands: list, row: tuple) -> tuple[int, ...]:
    """A row of the table on the device (``grouped_scheduler.ROW_WORDS``)."""
    half = len(operands) // 2
    sides = (operands[:half], operands[half:])
    return (*row, *(x for data, scale, _, row_stride, *_ in sides for x in (data, row_stride, scale)))


_tables: OrderedDict[tuple, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
_captured: list[tuple[torch.Tensor, torch.Tensor]] = []


def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """``rows`` on the device, copied there without waiting; the same rows are copied once while they are remembered."""
    host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    if device.type != "cuda":
        return host
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        # a graph copies again, from the same memory, whenever it runs
        _captured.append((host, host.to(device, non_blocking=True)))
        return _captured[-1][1]
    key = (device, stream, rows)
    if key not in _tables:
        _tables[key] = host, host.to(device, non_blocking=True)
        if len(_tables) > _TABLES:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    return _tables[key][1]


def _finish(
    run: Launcher,
    values: list,
    plan: Plan,
    batch: int,
    scalar: float,
    factors: list[tuple[torch.Tensor, int]],
    device: torch.device,
    target: Target,
    named: Callable[[], dict[str, tuple[torch.Tensor, bool]]],
) -> None:
    stream = torch.cuda.current_stream(device).cuda_stream if target.backend == "cuda" else 0
    pointers = [(x.data_ptr(), stride) for x, stride in factors] + [(0, 0)] * (FACTORS - len(factors))
    values = [*values, scalar, *(x for pair in pointers for x in pair), batch, plan.workers, stream]
    _launch(run, values, device, lambda: named() | {f"factors[{i}]": (x, False) for i, (x, _) in enumerate(factors)})


def _types(config: GroupedConfig) -> tuple[type, ...]:
    """ctypes of the host function's arguments."""
    operands = (*OPERAND_TYPES, *OPERAND_TYPES, _I32)
    if config.maps == "parameters":
        head = operands * config.slots + (_I32, _I32, _I32, _POINTER, _I64) * config.slots
    elif config.maps == "workspace":
        head = (*operands, _POINTER, _I32, _POINTER)
    else:
        head = (*operands, _POINTER, _I32, _I32, _I32, _POINTER)
    return (*head, _POINTER, _I64, _F32, *(_POINTER, _I32) * FACTORS, _I32, _I32, _POINTER)


def _build(config: GroupedConfig) -> CompiledKernel:
    import cuda.bindings.driver as driver
    import cutlass

    from ..kernels.gemm.sm100.grouped import GroupedGemm
    from ..kernels.gemm.sm100.operands import ELEMENT_TYPES, OUT_TYPES

    i32, i64 = cutlass.Int32(1), cutlass.Int64(1)
    dtype = OUT_TYPES[config.out]
    out = example_pointer(dtype, 16 if config.vector else dtype.width // 8)
    int32, int64 = example_pointer(cutlass.Int32, 4), example_pointer(cutlass.Int64, _MAP_BYTES)
    groups = {
        "parameters": tuple((i32, i32, i32, out, i64) for _ in range(config.slots)),
        "workspace": (int64, i32, int64),
        "shared": (int32, i32, i32, i32, int32),
    }[config.maps]
    a, b = (example_operand(ELEMENT_TYPES[fmt]) for fmt in (config.a_format, config.b_format))
    args = [
        tuple((a, b, i32) for _ in range(max(config.slots, 1))),
        groups,
        out,
        i64,
        cutlass.Float32(1.0),
        tuple((example_pointer(cutlass.Float32, 4), i32) for _ in range(FACTORS)),
        i32,
        i32,
        driver.CUstream(0),
    ]
    return build(GroupedGemm(config), args, name="grouped_gemm", arch=config.arch.name)

"""grouped_gemm_contiguous with a stack of prepared weights: check, plan, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..errors import OperandError, OperandTypeError
from ..kernels.gemm.arguments import GroupFactor
from ..kernels.gemm.sm90.arguments import Activations, PackedWeight, Result
from ..kernels.gemm.sm90.grouped_arguments import GroupedWgmmaArguments, PackedGroup, RowsOfGroups
from ..kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig, can_implement_groups
from ..operand import BlockScaledTensor, row_alignment
from ..planning.packed import PackedPlan
from ..planning.packed_groups import PackedGroups, choose_groups
from ..prepared_weight import PreparedWeight
from ..reference import GATES
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.bounded import Bounded
from ..runtime.kernel import Kernel
from ..runtime.simulating import world
from ..target import Target
from .calls import GivenOutput, addresses, allocator, as_alpha, output_key, tensor_key
from .checks import DTYPE_NAMES, checked_output, refuse_config, split_alpha, tensors
from .grouped_rows import GroupedRows, checked_offsets, clamped, wrong_offset
from .groups import alpha_of_group
from .packed_operands import check_decodable, check_products, check_x, decoded, row_stride

Rows = torch.Tensor | GroupedRows


class Request(NamedTuple):
    """What ``grouped_gemm_contiguous`` is asked for with a stack of prepared weights."""

    a: Rows
    b: PreparedWeight
    offsets: torch.Tensor
    alpha: float | torch.Tensor | None
    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    status: torch.Tensor | None
    config: PackedPlan | None
    backend: Backend
    gate: str


def packed_rows(
    a: Rows,
    b: PreparedWeight,
    offsets: Sequence[int] | torch.Tensor | None,
    alpha: float | torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    status: torch.Tensor | None,
    config: PackedPlan | None,
    backend: Backend,
    gate: str = "",
) -> torch.Tensor:
    """``grouped_gemm_contiguous`` of a stack of prepared weights, or ``grouped_gated_gemm_contiguous``."""
    offsets = offsets_of(a, offsets)
    key = (
        *(a.key if isinstance(a, GroupedRows) else tensor_key(a), b.key, tensor_key(offsets), tensor_key(alpha)),
        *(output_key(out), out_dtype, tensor_key(status), gate, backend, config, world(b.key.on_cpu)),
    )
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(Request(a, b, offsets, alpha, out, out_dtype, status, config, backend, gate))
    return call(a, b, offsets, alpha, out, status)


def offsets_of(a: Rows, offsets: Sequence[int] | torch.Tensor | None) -> torch.Tensor:
    """The offsets of the groups, which ``GroupedRows`` have themselves, on their device."""
    if isinstance(a, GroupedRows):
        if offsets is not None:
            raise OperandError.of("offsets", got=type(offsets).__name__, expected="None: GroupedRows have their own")
        return a.offsets
    if not isinstance(a, torch.Tensor):
        raise OperandTypeError.of("a", got=type(a).__name__, expected="torch.Tensor or GroupedRows")
    if offsets is None:
        raise OperandError.of("offsets", got="None", expected="E + 1 numbers of rows, for a of numbers")
    return checked_offsets(offsets, a)


_calls = Bounded()


def _plan(request: Request) -> Callable[..., torch.Tensor]:
    """The call for these operands and all like them, which it checks."""
    a, b, offsets, alpha, out, out_dtype, status, config, backend, gate = request
    check_products(b, gate)
    if isinstance(a, GroupedRows):
        check_decodable(a, b)
        numbers = torch.empty((a.rows, a.k), dtype=b.dtype, device=a.device)
    else:
        numbers = a
    rows = check_x(numbers, b, stack=True)
    groups = offsets.shape[0] - 1
    if groups != b.batch:
        raise OperandError.of("groups of a and matrices of b", got=f"{groups} and {b.batch}", expected="the same")
    _, alpha = split_alpha(alpha, b.device, groups)
    out_dtype = b.dtype if out is None and out_dtype is None else out_dtype
    out = checked_output(_read(a, b, offsets, alpha), b.device, (rows, b.rows), out, out_dtype)
    if b.rows > 1 and out.stride(1) != 1:
        raise OperandError.of("stride of out along N", got=out.stride(1), expected="1")
    checked_status(status, b.device)
    target = resolve(backend, b.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference, dtype=out.dtype, gate=gate)
    return _Call(request._replace(alpha=alpha, out=out), numbers, target)


class _Call:
    """A planned call: the kernel, and what to check before it runs. ``request`` has a tensor as alpha or None, and its
    ``out`` is the output or one like it. x: the numbers of its rows, or some like them."""

    def __init__(self, request: Request, x: torch.Tensor, target: Target) -> None:
        a, b, offsets, alpha, out = request[:5]
        strides = [] if alpha is None else [int(alpha.shape[0] > 1)]
        strides += [0 for f in (getattr(a, "global_scale", None), b.global_scale) if f is not None]
        problem = PackedGroups(
            sizes=((x.shape[0], b.rows, b.k),),
            stack=b.batch,
            dtype=DTYPE_NAMES[b.dtype],
            out=DTYPE_NAMES[out.dtype],
            vector=row_alignment(out, 16) >= 16,
            factors=len(strides),
            gate=request.gate,
            packing=b.packing,
        )
        plan = choose_groups(problem, target.arch, sm_count(target, b.device), request.config)
        rows, k_tiles = x.shape[0], b.packed.shape[-2]
        arguments = GroupedWgmmaArguments(
            groups=RowsOfGroups(0, b.batch, 0),
            one=PackedGroup(
                PackedWeight(0, b.rows, k_tiles, b.packed.stride(0)),
                Activations(0, rows, row_stride(x.stride(0), rows, b.k), 0),
                Result(0, out.stride(0), 0),
                b.k,
            ),
            alpha=1.0,
            factors=(tuple(GroupFactor(0, stride) for stride in strides),) * plan.config.products,
            workers=plan.workers,
        )
        self._launch = KERNEL.launcher(plan.config, target, b.device, arguments, _touched)
        self._backend: Backend = target.backend
        self._new = allocator(torch.empty(out.shape, dtype=out.dtype, device=out.device))
        self._output = GivenOutput(_read(a, b, offsets, alpha), out)

    def __call__(
        self,
        a: Rows,
        b: PreparedWeight,
        offsets: torch.Tensor,
        alpha: Any,
        out: torch.Tensor | None,
        status: torch.Tensor | None,
    ) -> torch.Tensor:
        scalar, alpha = as_alpha(alpha)
        if out is None:
            out = self._new()
        else:
            self._output.check(_read(a, b, offsets, alpha), out)
        status = checked_status(None, b.device) if status is None else status
        x = decoded(a, b.dtype, self._backend)
        of_a = getattr(a, "global_scale", None)
        factors = [x for scale in b.global_scales for x in addresses(alpha, of_a, scale)]
        values = (*addresses(offsets, status, b.packed, x, out), scalar, *factors)
        self._launch(values, (a, x, b, offsets, alpha, out, status))
        return out


def _read(a: Rows, b: PreparedWeight, offsets: torch.Tensor, alpha: Any) -> dict[str, torch.Tensor | None]:
    x = {"a": a} if isinstance(a, torch.Tensor) else {"data of a": a.data, "scale of a": a.scale}
    scales = {"global scale of a": getattr(a, "global_scale", None)}
    scales |= {f"global scale {i} of b": scale for i, scale in enumerate(b.global_scales)}
    return x | {"b": b.packed, "offsets": offsets, "alpha": alpha} | scales


def _touched(a: Rows, x: torch.Tensor, b: Any, offsets: Any, alpha: Any, out: Any, status: Any) -> Any:
    return tensors(_read(a, b, offsets, alpha) | {"numbers of a": x}, {"out": out, "status": status})


def checked_status(status: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The word in which a kernel says what is wrong with offsets: the caller's, checked, or a new one."""
    if status is None:
        return torch.empty(1, dtype=torch.int32, device=device)
    if not isinstance(status, torch.Tensor) or status.dtype is not torch.int32:
        got = status.dtype if isinstance(status, torch.Tensor) else type(status).__name__
        raise OperandTypeError.of("status", got=got, expected="a torch.int32 tensor")
    if status.numel() != 1 or status.device != device:
        got = f"shape {tuple(status.shape)} on {status.device}"
        raise OperandError.of("status", got=got, expected=f"one element on {device}")
    return status


def _reference(
    a: Rows,
    b: PreparedWeight,
    offsets: torch.Tensor,
    alpha: Any,
    out: torch.Tensor | None,
    status: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    gate: str,
) -> torch.Tensor:
    """Group by group in float64. Reads the offsets, so it waits for the device."""
    scalar, alpha = as_alpha(alpha)
    rows = a.shape[0] if isinstance(a, torch.Tensor) else a.rows
    out = checked_output(_read(a, b, offsets, alpha), b.device, (rows, b.rows), out, dtype)
    weights = b.dequantize(torch.float64)
    if isinstance(a, torch.Tensor):
        x = a.double()
    else:
        x = BlockScaledTensor(a.data, a.rowmajor_scale(), a.global_scale, a.format).dequantize(torch.float64)
    for e, (start, end) in enumerate(pairwise(clamped(offsets, rows).tolist())):
        factor = alpha_of_group(scalar, alpha if alpha is None else alpha.reshape(-1), e)
        exact = x[start:end] @ weights[e].mT * factor
        out[start:end] = (GATES[gate](exact[0]) * exact[1] if gate else exact).to(dtype)
    checked_status(status, b.device).fill_(wrong_offset(offsets.tolist(), rows))
    return out


def _host(config: GroupedWgmmaConfig) -> Callable[..., Any]:
    if config.arch.generation == "sm120":
        from ..kernels.gemm.sm120.packed import GroupedPackedGemm

        return GroupedPackedGemm(config)
    from ..kernels.gemm.sm90.grouped import GroupedWgmma

    return GroupedWgmma(config)


KERNEL = Kernel("grouped_wgmma", GroupedWgmmaArguments, _host, can_implement_groups)
compile_grouped_wgmma = KERNEL.compile

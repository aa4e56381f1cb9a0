"""Launches of block-scaled operands: the checks, the records of operands and output, and the planned call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import OperandError
from ..formats import as_bytes
from ..kernels.gemm.arguments import Bias, GemmArguments, Operand, Output, data_alignment
from ..kernels.gemm.config import CTA_ROWS, UNPACKED_K, epilogue_threads, kind_of
from ..lazy import ByGeneration, Lazily
from ..operand import BlockScaledTensor, row_alignment
from ..planning.gemm import GemmProblem, Plan, plan_for
from ..runtime.backend import sm_count
from ..runtime.kernel import Kernel
from ..scale_layout import blocked_bytes
from ..target import Target
from .checks import DTYPE_NAMES
from .operation import Operation
from .planned import PlannedCall
from .scratch import partial_sums, scratch_for

K_MULTIPLE = 32
"""TMA needs rows of a multiple of sixteen bytes: 32 elements of four bits."""
HOST = ByGeneration(
    sm100=Lazily("kernels.gemm.sm100.host", "Tcgen05Gemm"), sm120=Lazily("kernels.gemm.sm120.host", "MmaSyncGemm")
)
"""The host function of a GEMM with one product or two."""


def check_operands(operands: Mapping[str, BlockScaledTensor], backend: str) -> None:
    """Raises unless the kernels can read these operands, whose formats one MMA instruction must multiply.

    The simulator also checks the signs of NVFP4's scales; on a GPU, that would wait for the device.
    """
    kind = kind_of(*(x.format.name for x in list(operands.values())[:2]))
    unpacked = {name: kind.unpacks(operand.format.name) for name, operand in operands.items()}
    multiple, why = K_MULTIPLE, ""
    if any(unpacked.values()):
        multiple, why = UNPACKED_K, ": TMA unpacks so many 4-bit elements at a time, beside 8-bit ones"
    for name, operand in operands.items():
        alignment = data_alignment(unpacked[name])
        if operand.scale_layout != "blocked":
            raise OperandError.of(
                f"scales of {name}",
                got=operand.scale_layout,
                expected="blocked: tensor memory takes them as 128x4 atoms",
                hint="scale_layout.to_blocked(scale) makes them so.",
            )
        if operand.k % multiple:
            raise OperandError.of(
                f"K of {name}", got=operand.k, expected=f"a multiple of {multiple}{why}", hint="Pad K with zeros."
            )
        if row_alignment(operand.data, alignment) < alignment:
            raise OperandError.of(
                f"alignment of {name}",
                got=f"address {operand.data.data_ptr():#x}, strides {operand.data.stride()}",
                expected=f"multiples of {alignment} bytes, which TMA needs",
                hint=".contiguous() or .clone() aligns.",
            )
        if backend == "sim":
            check_signs(name, operand)


def check_signs(name: str, operand: BlockScaledTensor) -> None:
    """Raises if a scale is negative. It reads values, so it runs in each call, and in the simulator only."""
    if operand.format.scale != "e4m3":
        return
    negative = int(((as_bytes(operand.blocked_scale()) & 0x80) != 0).sum())
    if negative:
        raise OperandError.of(
            f"scales of {name}",
            got=f"{negative} negative ones",
            expected="none: a block-scaled MMA reads them as unsigned (UE4M3)",
            hint="Move the sign into the elements.",
        )


def check_signs_of(a: BlockScaledTensor, *others: object) -> None:
    """Runs ``check_signs`` on the operands of a call, which are its first arguments."""
    weights = [x for x in others[:2] if isinstance(x, BlockScaledTensor)]
    names = ("b",) if len(weights) == 1 else ("b1", "b2")
    for name, operand in zip(("a", *names), (a, *weights)):
        check_signs(name, operand)


def operand_record(operand: BlockScaledTensor, name: str = "", after: tuple[int, int] = (0, 0)) -> Operand:
    """The kernel's record of an operand; strides of data count elements, strides of scales count bytes.

    name: the argument that holds the operand; without it the record has no addresses. after: bytes of data and of
    scales that lie before this operand in that argument.
    """
    data, each = operand.data, operand.format.elements_per_byte
    # the operand is one matrix for all of L, or it has L matrices
    repeated = operand.batch == 1 or data.stride(0) == 0
    return Operand(
        data=f"{name}.data + {after[0]}" if name else 0,
        scale=f"{name}.scale + {after[1]}" if name else 0,
        rows=operand.rows,
        row_stride=data.stride(-2) * each if operand.rows > 1 else operand.k,
        batch_stride=operand.rows * operand.k if repeated else data.stride(0) * each,
        batches=1 if repeated else operand.batch,
        scale_batch=blocked_bytes(operand.rows, operand.format.scale_columns(operand.k)),
    )


def gemm_call(
    operation: Operation,
    kernel: Kernel,
    r: Any,
    target: Target,
    weights: tuple[Operand, ...],
    output: tuple[Output, dict[str, Any]],
    scalar: float | str,
    factors: tuple[tuple[str, ...], ...],
    options: Mapping[str, Any],
    **problem: Any,
) -> PlannedCall:
    """The planned call of a request whose a is (L, M, K).

    weights: the records of the weights. output: from ``output_record``. scalar, factors: alpha, and the names of the
    device scalars of each product. options: those of ``Operation.planned``. problem: other fields of ``GemmProblem``.
    """
    a, bias, (out, described) = r.a, getattr(r, "bias", None), output
    if bias is not None:
        problem |= {"bias": "n", "bias_dtype": DTYPE_NAMES[bias.dtype]}
    sizes = {"m": a.rows, "k": a.k, "batch": a.batch, "factors": len(factors[0])}
    whole = GemmProblem(a_format=a.format.name, **sizes, **described, **problem)
    plan = plan_for(whole, target.arch, sm_count(target, a.device), r.config)
    left, size = (operand_record(a, "a"),), None
    if plan.config.scheduler == "stream_k":
        size = _stream_k_size(plan)
        options = {**options, "extra": scratch_for(size, target, a.device)}
    if target.backend == "sim":
        options = {**options, "before": check_signs_of}
    arguments = GemmArguments(
        a=weights if plan.swap else left,
        b=left if plan.swap else weights,
        out=out,
        bias=None if bias is None else Bias("bias", bias.stride(0) if bias.ndim == 2 else 0),
        alpha=scalar,
        factors=factors,
        partials=None if size is None else partial_sums(size),
        k=a.k,
        batch=a.batch,
        workers=plan.workers,
    )
    return operation.planned(kernel, plan.config, target, arguments, r, **options)


def strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The strides of M, N and L in (L, M, N) or (M, N); 0 for a dimension of one element."""
    m, n = (tensor.stride(i) if tensor.shape[i] > 1 else 0 for i in (-2, -1))
    batch = tensor.stride(0) if tensor.ndim == 3 and tensor.shape[0] > 1 else 0
    return m, n, batch


def output_record(out: torch.Tensor) -> tuple[Output, dict[str, Any]]:
    """The record of an output, and the fields of the problem that describe it: dtype, major dimension, alignment."""
    m, n, batch = strides(out)
    rows, columns = out.shape[-2:]
    if n in (0, 1):
        major, stride, lines, length = "n", m, rows, columns
    elif m in (0, 1):
        major, stride, lines, length = "m", n, columns, rows
    else:
        raise OperandError.of(
            "strides of out",
            got=out.stride(),
            expected="1 along M or along N",
            hint="Leave out to get a new tensor, and copy it.",
        )
    # a dimension of one element has no stride, but a tensor map needs one, a multiple of 16 bytes
    stride = stride or -(-length // 16) * 16
    batch = batch or -(-stride * lines // 16) * 16
    vector = (out.data_ptr() | (stride | batch | length) * out.element_size()) % 16 == 0
    described = {"out": DTYPE_NAMES[out.dtype], "out_major": major, "vector": vector}
    return Output("out", stride, batch, None, None), described


def _stream_k_size(plan: Plan) -> tuple[int, int]:
    """The floats of partial sums and the words of flags that a stream-K launch needs."""
    config = plan.config
    ctas = plan.workers * config.ctas
    # each warp of the epilogue has a flag
    return ctas * config.products * config.tile_n * CTA_ROWS, ctas * epilogue_threads(config) // 32

"""rmsnorm_quantize: adds the residual, norms, and quantizes for the product that follows, in one launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..errors import OperandError
from ..formats import Format
from ..kernels.quantize.fused import RmsnormArguments
from ..lazy import Lazily
from ..operand import BlockScaledTensor
from ..planning.fused import FusedPlan, RmsnormProblem, choose_rmsnorm
from ..planning.quantize import QuantizeProblem
from ..reference import rmsnorm_reference
from ..row_scaled import FP8, RowScaledTensor
from ..runtime.backend import Backend
from ..runtime.kernel import Kernel
from ..target import Architecture
from ..tensors import check_tensor
from .arguments import TYPED, Argument
from .checks import DTYPE_NAMES, check_rows_aligned
from .fused import FusedOperation, checked_matrix, dense_matrix, matrix
from .quantize_request import COUNT_RESULT, MATRIX, RESULT, SCALE


class RmsnormQuantized(NamedTuple):
    """quantized: the normed rows. residual: x + residual. normed: the rows before quantization. None if not wanted."""

    quantized: BlockScaledTensor | RowScaledTensor
    residual: torch.Tensor | None
    normed: torch.Tensor | None


def rmsnorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    global_scale: float | torch.Tensor | str | None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    format: str | Format = "nvfp4",
    rule: str = "max",
    scale_layout: str = "blocked",
    return_normed: bool = False,
    out: BlockScaledTensor | RowScaledTensor | None = None,
    residual_out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> BlockScaledTensor | RmsnormQuantized | RowScaledTensor:
    """Computes rmsnorm(x + residual) · weight and quantizes it, in one pass over x.

    Args:
        x: (M, K) or (K,), float32, float16 or bfloat16, any row stride. Autograd does not follow it.
        weight: (K,), of x's dtype or float32; None: none.
        global_scale: that of the result. A number, or a float32 tensor of one element on x's device, is used as it is
            (``nn.calibration`` finds one); None: none. "auto" needs the maximum over all rows first: a launch stores
            the normed rows, and ``quantize`` then quantizes them in launches of its own.
        eps: added to the mean of squares; at least 0.
        residual: shaped as x, of x's dtype. s = x + residual, rounded once to that dtype, is normed, and becomes the
            new residual.
        format, rule, scale_layout: as in ``quantize``; a rule that does not search. "fp8_e4m3" gives rows in E4M3, a
            ``RowScaledTensor``, for products with weights prepared for it: x (M, K), bfloat16 or float16, K a multiple
            of 16, weight of its dtype, global_scale None, no other option.
        return_normed: whether to return the rows before quantization, too.
        out: as in ``quantize``. If its global scale is the tensor given as ``global_scale``, nothing is copied.
        residual_out: the tensor for the new residual; it may be ``residual`` or ``x`` itself.
        backend: as in ``quantize``.

    Returns: the result; or, with ``residual`` or ``return_normed``, ``RmsnormQuantized``.

    **What is rounded.** normed = s · (1 / sqrt(mean(s²) + eps)) · weight in float32, each product rounded, and then
    once to x's dtype, as ``torch.nn.functional.rms_norm`` does in one kernel. The data and the scales are bit for bit
    what ``quantize(normed, …)`` gives; the new residual is exact. Sums of squares have an order: it depends on K,
    format and dtype alone, so a row's result does not depend on the other rows, and repeats bit for bit.

    **How near normed is.** All squares are positive, and a sum passes at most 28 roundings (a thread's chain, four
    sums, a warp, the warps); the mean and eps add two; the root halves the relative error; ``rsqrt.approx`` is off by
    2**-22.9, each product by 2**-24: altogether less than 2**-19 of the value. Float16 and bfloat16 results are
    therefore within 1 ulp (0.51) of the value computed without rounding; float32 ones within 2**-19 of it. The
    reference computes in float64 and rounds once. A sum of squares beyond float32 (|s| near 1e19) is infinity, and the
    row zeros, on every backend; squares below 2**-126 vanish, which does not matter if eps is 2**-100 or more. A NaN
    makes its row NaN; infinity makes its own block NaN, and the other blocks zeros.

    Raises:
        OperandError, OperandTypeError: an argument does not fit; results overlap.
        TargetError: the backend is unknown, or cannot run tensors of this device.
    """
    options = global_scale, eps, residual, format, rule, scale_layout, return_normed
    found = RMSNORM.call(x, weight, *options, out, residual_out, backend)
    if residual is None and not return_normed:
        return found.quantized
    new = found.residual
    if new is not None and new.shape != x.shape:
        new = new.reshape(x.shape)
    return RmsnormQuantized(found.quantized, new, found.values if return_normed else None)


class Normed(NamedTuple):
    """x, the residual, the output for the new residual, (M, K) each; and the weight (K,)."""

    x: torch.Tensor
    weight: torch.Tensor | None
    residual: torch.Tensor | None
    residual_out: torch.Tensor | None


def _matrices(r: Any) -> Normed:
    """The matrices of a request, checked to fit together."""
    rows = checked_matrix("x to norm", r.x)
    if r.weight is not None:
        dtypes = dict.fromkeys((rows.dtype, rows.dtype if r.format == FP8 else torch.float32))
        check_tensor("weight", r.weight, dtypes=dtypes, shapes=[rows.shape[1:]], device=rows.device)
    old = None if r.residual is None else checked_matrix("residual", r.residual, rows)
    if isinstance(r.eps, bool) or not isinstance(r.eps, (int, float)) or not (0 <= r.eps < math.inf):
        raise OperandError.of("eps", got=repr(r.eps), expected="a finite number that is not negative")
    new = r.residual_out
    if new is not None:
        if old is None:
            raise OperandError.of("residual_out", got="one, without a residual", expected="None")
        new = checked_matrix("residual_out", new, rows)
        check_rows_aligned("residual_out", new)
    weight = None if r.weight is None else r.weight.detach()
    return Normed(rows, weight, old, new)


def _choose(r: Any, problem: QuantizeProblem, arch: Architecture, sms: int) -> FusedPlan:
    weight = "" if r.weight is None else DTYPE_NAMES[r.weight.dtype]
    return choose_rmsnorm(RmsnormProblem(problem, r.return_normed, r.residual is not None, weight), arch, sms)


def _record(r: Any, m: Normed) -> dict[str, Any]:
    new = matrix(m.residual_out, "residual_out")
    return {
        "weight": None if m.weight is None else "weight",
        "residual": matrix(m.residual, "residual"),
        "residual_out": dense_matrix(m.x, "residual_out") if m.residual is not None and new is None else new,
        "eps": r.eps,
        "inverse_k": 1.0 / m.x.shape[1],
    }


def _compute(r: Any, m: Normed) -> tuple[torch.Tensor, torch.Tensor | None]:
    x, new = m.x, r.residual_out
    if m.residual is not None:
        x = x + m.residual
        new = torch.empty(r.x.shape, dtype=x.dtype, device=x.device) if new is None else new
        new.detach().copy_(x.reshape(new.shape))
    return rmsnorm_reference(x, m.weight, r.eps), new


KERNEL = Kernel("rmsnorm_quantize", RmsnormArguments, Lazily("kernels.quantize.rmsnorm", "RmsnormQuantize"))
_SAME = "{{x}}.data_ptr() == {0}.data_ptr() and {{x}}.stride() == {0}.stride()"
# the key says whether it is x or the old residual; without a residual it is refused
_RESIDUAL_OUT = f"(None if {{x}} is None else ({MATRIX.key}, {_SAME.format('x')}, {_SAME.format('residual')}))"
RMSNORM = FusedOperation(
    rmsnorm_quantize,
    {
        **{"x": MATRIX, "weight": MATRIX.or_none(), "residual": MATRIX.or_none(), "global_scale": SCALE, "eps": TYPED},
        **{"out": RESULT, "residual_out": Argument(_RESIDUAL_OUT)},
    },
    KERNEL,
    source="rmsnorm",
    values="return_normed",
    matrices=_matrices,
    choose=_choose,
    record=_record,
    compute=_compute,
    outs=("out", "residual_out"),
    count=f"(out and {COUNT_RESULT}, None if residual_out is None else increment_versions((residual_out,)))",
)

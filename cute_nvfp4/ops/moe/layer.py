"""moe: computes a mixture of experts, from the router's choice to the combined rows."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import OperandError, OperandTypeError
from ...grouped_rows import GroupedRows
from ...operand import BlockScaledTensor
from ...planning.packed_groups import sorts_slots
from ...planning.summed import sums_with_product
from ...runtime.backend import Backend, sm_count
from ...target import Target
from ...tensors import check_tensor
from ..arguments import TENSOR, TYPED, Argument
from ..checks import DTYPE_NAMES, check_overlap, check_rows_aligned, checked_output
from ..fused import readable
from ..grouped_gemm_contiguous import CONTIGUOUS
from ..operation import Operation
from ..quantize import quantize
from .experts import DTYPES, FP8, Experts
from .maps import ID_DTYPES, Maps, routing_maps
from .product import expert_product, in_16_bits
from .rows import activated, combined, gathered
from .summed import summed_product

MAX_EXPERTS = 1024


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Experts,
    *,
    offset: int = 0,
    shared: torch.Tensor | None = None,
    deterministic: bool = True,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """out[t] = Σ over the choices j of token t of topk_weights[t, j] · expert topk_ids[t, j] (x[t]), (T, H), + shared.

    Args:
        x: (T, H), bfloat16 or float16; of ``experts.dtype`` if that is one of them.
        topk_ids: (T, k), int32 or int64. A token may choose an expert twice, or none. Ids outside of ``offset`` to
            ``offset + E - 1`` are experts on other GPUs, and are left out.
        topk_weights: (T, k), float32, bfloat16 or float16.
        experts: from ``prepare_experts``.
        offset: the id of the first of these experts.
        shared: None, or the result of shared experts for the same rows: (T, H) of x's dtype.
        deterministic: whether the k summands of an element are added in the order of the choices. If not, prepared
            experts in 16 bits, without ``shared``, add them as they come, in three launches instead of four, and round
            after each. (On sm_90a, up to 32 choices of experts with few rows take three launches and add in order. One
            token whose weights fit into registers takes two, adds in a fixed order, and rounds once.)
        out: the tensor to write and return, (T, H) of x's dtype, rows at multiples of 16 bytes.
        backend: as for ``gemm``.

    The host reads no value of a tensor and never waits, and grids follow from shapes, so a CUDA graph may record a
    call. Each product is summed in float32 and rounded to x's dtype; the k summands of an element are added in float32,
    in the order of the choices, and rounded once. Equal inputs give equal bits. Experts without a dtype quantize rows
    before each product, to NVFP4 with one global scale for all rows. Autograd does not follow the call.

    Raises:
        OperandError, OperandTypeError: tensors do not fit together, or require a gradient.
        TargetError: the backend is unknown, or cannot run tensors of this device.
    """
    return MOE.call(x, topk_ids, topk_weights, experts, offset, shared, deterministic, out, backend)


def _check(r: Any) -> torch.Tensor:
    x, experts = r.x, r.experts
    if not isinstance(experts, Experts):
        raise OperandTypeError.of("experts", got=type(experts).__name__, expected="what prepare_experts makes")
    of_x = (experts.dtype,) if experts.dtype in DTYPES else DTYPES
    for name, dtypes in (("x", of_x), ("topk_ids", ID_DTYPES), ("topk_weights", DTYPE_NAMES)):
        check_tensor(name, getattr(r, name), dtypes=dtypes, device=experts.device)
    if x.ndim != 2 or x.shape[1] != experts.hidden or x.shape[0] < 1:
        raise OperandError.of("shape of x", got=tuple(x.shape), expected=f"(T, {experts.hidden}) with T ≥ 1")
    ids, weights = tuple(r.topk_ids.shape), tuple(r.topk_weights.shape)
    if len(ids) != 2 or ids[0] != len(x) or ids[1] < 1 or weights != ids:
        expected = f"({len(x)}, k) both"
        raise OperandError.of("shapes of topk_ids and topk_weights", got=f"{ids} and {weights}", expected=expected)
    if r.shared is not None:
        check_tensor("shared", r.shared, dtypes=[x.dtype], shapes=[x.shape], device=x.device)
    if not isinstance(r.deterministic, bool):
        raise OperandTypeError.of("deterministic", got=type(r.deterministic).__name__, expected="bool")
    if isinstance(r.offset, bool) or not isinstance(r.offset, int):
        raise OperandTypeError.of("offset", got=type(r.offset).__name__, expected="int")
    if not 0 <= r.offset < 2**31 - experts.count:
        raise OperandError.of("offset", got=r.offset, expected="the number of the first expert")
    if experts.count > MAX_EXPERTS:
        raise OperandError.of("experts", got=experts.count, expected=f"at most {MAX_EXPERTS}")
    out = checked_output(_read(r), x.device, (len(x), experts.hidden), r.out, x.dtype)
    check_rows_aligned("out", out)
    return out


def _read(r: Any) -> dict[str, torch.Tensor]:
    """Every tensor that a call reads, by name."""
    tensors = {"x": r.x, "topk_ids": r.topk_ids, "topk_weights": r.topk_weights}
    return tensors | ({} if r.shared is None else {"shared": r.shared}) | r.experts.tensors()


def quantized_product(
    rows: torch.Tensor,
    weight: BlockScaledTensor,
    offsets: torch.Tensor,
    factor: torch.Tensor | None,
    backend: Backend,
) -> torch.Tensor:
    """Quantizes rows to the format of the weights, and multiplies each by the matrix of its expert."""
    a = GroupedRows.of(quantize(rows, weight.format, scale_layout="rowmajor", backend=backend), offsets)
    return CONTIGUOUS.run(a, weight, None, "", factor, None, rows.dtype, None, None, backend)


def few_slots(r: Any, ids: torch.Tensor, shared: torch.Tensor | None, backend: Backend) -> torch.Tensor:
    """The result of a request with few slots, in three launches, which sort the slots themselves."""
    e, (_, top) = r.experts, ids.shape
    rows = slot_rows(readable(r.x.detach()), ids, r.topk_weights.detach().contiguous(), e, r.offset, backend)
    return combined(rows, None, None, ids.view(-1), e.count, top, shared, r.out, backend, r.offset)


def one_token(r: Any, ids: torch.Tensor, shared: torch.Tensor | None, backend: Backend) -> torch.Tensor:
    """The result of a request with one token, in two launches: the second product also adds."""
    e, weights = r.experts, r.topk_weights.detach().contiguous()
    inner = slot_inner(readable(r.x.detach()), ids, e, r.offset, backend)
    rest = e.down_factor, e.down_bias, shared, r.offset, r.out
    return summed_product(inner, e.down, ids.view(-1), weights, *rest, backend=backend)


def slot_rows(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, e: Experts, offset: int = 0, backend: Backend = "auto"
) -> torch.Tensor:
    """weight · down(activation(gate_up(x))) for each of few slots, (T · top, H), in the order of their experts."""
    inner = slot_inner(x, ids, e, offset, backend)
    second = e.down_factor, e.down_bias, None, weights
    options = {"first": offset, "backend": backend}
    return expert_product(inner, e.down, None, ids.view(-1), ids.shape[1], False, *second, **options)


def slot_inner(x: torch.Tensor, ids: torch.Tensor, e: Experts, offset: int, backend: Backend) -> torch.Tensor:
    """activation(gate_up(x)) for each of few slots, (T · top, I), in the order of their experts."""
    first, options = (e.gate_up_factor, e.gate_up_bias, e.activation), {"first": offset, "backend": backend}
    return expert_product(x, e.gate_up, None, ids.view(-1), ids.shape[1], True, *first, **options)


def layer(r: Any, out: torch.Tensor | None, backend: Backend) -> torch.Tensor:
    """The result of a checked request, by one operation after the other."""
    e, top = r.experts, r.topk_ids.shape[1]
    x, ids, weights = readable(r.x.detach()), r.topk_ids.contiguous(), r.topk_weights.detach().contiguous()
    shared = None if r.shared is None else readable(r.shared.detach())
    added = not r.deterministic and e.dtype in DTYPES and shared is None
    if added:
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    whole = routing_maps(ids, e.count, r.offset, None, backend, out if added else None)
    maps = Maps.of(whole, e.count)
    if e.dtype is not None:
        first = e.gate_up_factor, e.gate_up_bias, e.activation, None
        routed = maps.offsets, maps.slots, top
        inner = expert_product(x, e.gate_up, *routed, True, *first, backend=backend)
        if e.dtype is FP8 and not in_16_bits(e.down, ids.numel()):
            rows = expert_product(inner, e.down, *routed, False, e.down_factor, backend=backend)
            return combined(rows, weights, e.down_bias, whole, e.count, top, shared, out, backend)
        second = e.down_factor, e.down_bias, None, weights
        sums = out if added else None
        rows = expert_product(inner, e.down, *routed, False, *second, added=added, out=sums, backend=backend)
        if added:
            return rows
        return combined(rows, None, None, whole, e.count, top, shared, out, backend)
    rows = gathered(x, whole, e.count, top, None, backend)
    product = quantized_product(rows, e.gate_up, maps.offsets, e.gate_up_factor, backend)
    inner = activated(product, e.gate_up_bias, whole, e.count, e.activation, None, backend)
    rows = quantized_product(inner, e.down, maps.offsets, e.down_factor, backend)
    return combined(rows, weights, e.down_bias, whole, e.count, top, shared, out, backend)


def _streams(experts: Experts, slots: int) -> bool:
    """Whether both products of experts stream 16-bit rows, and sort their slots."""
    if experts.dtype is FP8 and not all(in_16_bits(x, slots) for x in (experts.gate_up, experts.down)):
        return False
    return experts.dtype is not None and sorts_slots(slots, experts.count)


def _sums(r: Any, target: Target) -> bool:
    """Whether the second product of experts that sort their slots also adds."""
    e, (tokens, top) = r.experts, r.topk_ids.shape
    if tokens > 1 or e.dtype not in DTYPES:
        return False
    return sums_with_product(e.hidden, top * e.down.packed.shape[-2], sm_count(target, e.device))


def _plan(r: Any, target: Target) -> Any:
    generation = target.arch.generation
    if r.experts.dtype is None and generation == "sm90":
        hint = "prepare_experts(…, dtype=torch.bfloat16) makes experts for it."
        expected = f"prepared ones on {generation}"
        raise OperandError.of("experts", got="block-scaled weights", expected=expected, hint=hint)

    few = generation == "sm90" and _streams(r.experts, r.topk_ids.numel())
    of_few = one_token if few and _sums(r, target) else few_slots

    def call(*args: Any) -> torch.Tensor:
        request = MOE.request(*args)
        if request.out is not None:
            check_overlap(_read(request), request.out)
        if few:
            shared = None if request.shared is None else readable(request.shared.detach())
            return of_few(request, request.topk_ids.contiguous(), shared, request.backend)
        return layer(request, request.out, request.backend)

    return call


MOE = Operation(
    moe,
    {
        "x": TENSOR,
        "topk_ids": TENSOR,
        "topk_weights": TENSOR,
        "shared": TENSOR,
        "experts": Argument("{x}.key", "", "", ""),
        "deterministic": TYPED,
    },
    check=_check,
    reference=lambda r: layer(r, r.out, "reference"),
    plan=_plan,
    overlaps=lambda r: check_overlap(_read(r), r.out),
)

"""gated_gemm: validate, choose a plan, compile once, launch; what it shares with gemm is in ``_gemm``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError, explain
from ..formats import FORMATS, NVFP4, as_bytes
from ..kernels.gemm.config import GATE_NAMES, INTERLEAVED_ROWS, QUANTIZED, GemmConfig, can_implement
from ..operand import BlockScaledTensor, check_pair
from ..planning.gemm import GemmProblem, Plan, choose
from ..reference import gemm_reference
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.compile import CompiledKernel, build, compile_cached
from ..runtime.launch import Launcher, launcher
from ..scale_layout import blocked_bytes, blocked_view
from ..target import Target
from .checks import check_format, check_overlap, checked_output, parts
from .gemm import _complete, _launch, _output_strides, _problem, _split_alpha, _strides, _tensors, _workspace
from .operands import FACTORS, OPERAND_TYPES, arguments_of, check_scales, example_operand, example_pointer

_POINTER, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
# a | b1 | b2 | c, its strides, scales, global scale | alpha, factors | workspace, flags | k, batch, workers | stream
_TYPES = (
    *OPERAND_TYPES * 3, _POINTER, _I64, _I64, _POINTER, _POINTER, _F32, *[_POINTER] * (2 * FACTORS + 2), *[_I32] * 3,
    _POINTER,
)  # fmt: skip
_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "relu": torch.relu,
    "identity": lambda x: x,
}


def gated_gemm(
    a: BlockScaledTensor,
    b1: BlockScaledTensor,
    b2: BlockScaledTensor | None = None,
    *,
    gate: str = "silu",
    alpha: float | torch.Tensor | None = None,
    interleaved: bool = False,
    out: torch.Tensor | BlockScaledTensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_global_scale: float | torch.Tensor | None = None,
    config: Plan | None = None,
    backend: Backend = "auto",
) -> torch.Tensor | BlockScaledTensor:
    """C = gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ) in one kernel that reads A once: (L, M, N), or (M, N).

    Args:
        a, b1, b2: (L, M, K), (L, N, K), (L, N, K), or without L, as ``gemm`` takes them; b1 and b2 of one format.
            b2 None: b1 is both, 2N rows with N a multiple of 128: first all rows of B1, then all of B2, or
            ``interleaved``: 128 rows of B1, 128 of B2, and so on (``interleave`` makes it). Neither is copied.
        gate: "silu" (SwiGLU), "gelu_tanh" or "gelu_erf" (GEGLU), "relu", or "identity" (the product alone).
        alpha: a number, or a float32 tensor of one element: multiplies A, and so both products before the gate; so do
            the global scales of a and b1, or of a and b2. None is 1.
        out: where to put the result, as ``gemm`` takes it; for a quantized result a ``BlockScaledTensor`` of NVFP4,
            (L,) M rows and K = N, contiguous along K, with blocked scales and the global scale to quantize with.
        out_dtype: dtype of a new result (float16 by default).
        out_global_scale: a number or a float32 tensor of one element, 2**-100 … 2**118: the result is quantized to
            NVFP4 with this global scale, bit for bit as ``quantize(c, rule="max", global_scale=…)`` would quantize the
            float32 result. N is a multiple of 16 (of 32 for the A of a next product). A tensor out of range makes all
            of it NaN.
        config: a plan of ``kernels.gemm_choose`` for two products; None has one chosen.
        backend: as for ``gemm``.

    Sums, gate and product are in float32 and rounded once; ``kernels.core.gates`` states the accuracy of the gates.
    The order of the sums depends on the plan, never on timing. Runs on the current stream, without synchronising the
    device.

    Raises:
        OperandError, OperandTypeError: operands that do not fit together or cannot be computed with; an impossible
            plan.
        TargetError: the backend cannot run tensors of this device, or is unknown.
    """
    weights = {"b": b1} if b2 is None else {"b1": b1, "b2": b2}
    n = _check(a, weights, gate, interleaved)
    scalar, alpha_tensor = _split_alpha(alpha, a.device)
    operands = {"a": a, **weights}
    inputs = parts(operands) | {"alpha": alpha_tensor}
    result = _result(a, n, inputs, out, out_dtype, out_global_scale)
    resolved = resolve(backend, a.device)
    if resolved.backend == "reference":
        factor = scalar if alpha_tensor is None else alpha_tensor.reshape(()).double()
        return _store_reference(_reference(a, weights, n, gate, interleaved, factor), result)
    check_scales(operands, resolved.backend)
    pair = [b1, b1] if b2 is None else [b1, b2]
    factors = [_factors(alpha_tensor, a.global_scale, b.global_scale) for b in pair]
    problem = _gated_problem(a, pair[0], n, result, gate, interleaved, len(factors[0]))
    plan, run = _plan(problem, resolved, sm_count(resolved, a.device), config)
    stream = torch.cuda.current_stream(a.device).cuda_stream if resolved.backend == "cuda" else 0
    scratch = _workspace(plan, a.device, stream)
    sides = [arguments_of(a), *(_sides(b1, n, interleaved) if b2 is None else [arguments_of(b1), arguments_of(b2)])]
    c, written = _output_arguments(plan, result)
    pointers = [x for product in factors for x in _pointers(product)]
    values = [*(x for side in sides for x in side), *c, scalar, *pointers,
              *(0 if x is None else x.data_ptr() for x in scratch), a.k, a.batch, plan.workers, stream]  # fmt: skip
    read = {"alpha": alpha_tensor}
    if isinstance(result, BlockScaledTensor):
        read["out.global_scale"] = result.global_scale
    _launch(run, values, a.device, lambda: _tensors(operands, written, read, *scratch))
    return result


def interleave(b1: BlockScaledTensor, b2: BlockScaledTensor) -> BlockScaledTensor:
    """One weight of 2N rows from two of N: blocks of 128 rows of b1 and b2 in turn. A copy; for loading a model.

    Both have N rows, a multiple of 128, blocked scales, and equal global scales or none. On a GPU, which is not waited
    for, global scales that differ make the result's NaN, and so every value.

    Raises:
        OperandError: operands that do not fit together; on the CPU also global scales that differ.
    """
    _check_weights(b1, {"b1": b1, "b2": b2})
    for name, b in (("b1", b1), ("b2", b2)):
        _check_halves(f"rows of {name}", b.rows, INTERLEAVED_ROWS)
    global_scale = _common_global_scale(b1.global_scale, b2.global_scale)
    block = (-1, INTERLEAVED_ROWS)
    data = torch.stack([as_bytes(b.data).unflatten(-2, block) for b in (b1, b2)], -3).flatten(-4, -2)
    # (32, 4, rest_m, 4, rest_k, L): whole atoms along the rows, which are the slowest but the batch
    scale = torch.stack([as_bytes(b.blocked_scale()) for b in (b1, b2)], 3).flatten(2, 3)
    flat = scale.permute(5, 2, 4, 0, 1, 3).contiguous()
    columns = b1.format.scale_columns(b1.k)
    return BlockScaledTensor(data, blocked_view(flat, 2 * b1.rows, columns, b1.batch), global_scale, b1.format)


def _common_global_scale(one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor | None:
    """The global scale of two weights that become one, both of which have one or neither."""
    if one is None or one.data_ptr() == two.data_ptr():
        return one
    if one.device.type != "cpu":
        return torch.where(one.reshape(()) == two.reshape(()), one.reshape(()), torch.nan)
    if float(one) != float(two):
        raise OperandError(
            explain(
                "global scales of b1 and b2",
                got=f"{float(one)} and {float(two)}",
                expected="equal ones",
                hint="Quantize both with the larger amax's: quantize(…, global_scale=…).",
            )
        )
    return one


def compile_gated_gemm(config: GemmConfig) -> CompiledKernel:
    """The kernel of ``config``, which has two products, compiled once. Needs no GPU and no tensors.

    Raises:
        OperandError: the configuration cannot be; the message says which limit, and by how much.
    """
    reason = can_implement(config)
    if not reason and config.products != 2:
        reason = explain("products of a gated GEMM", got=config.products, expected="2")
    if not reason and config.bias:
        reason = explain("bias of a gated GEMM", got=config.bias, expected="none")
    if reason:
        raise OperandError(reason)
    return compile_cached(("gated_gemm", config), lambda: _build(config))


@functools.lru_cache(maxsize=4096)
def _plan(problem: GemmProblem, target: Target, sm_count: int, given: Plan | None) -> tuple[Plan, Launcher]:
    plan = choose(problem, target.arch, sm_count) if given is None else _complete(given, problem, target, sm_count)
    return plan, launcher(compile_gated_gemm(plan.config), target, _TYPES)


def _check(a: BlockScaledTensor, weights: dict[str, BlockScaledTensor], gate: str, interleaved: bool) -> int:
    """Raises unless the operands can be multiplied; N."""
    if gate not in GATE_NAMES:
        raise OperandError(explain("gate", got=repr(gate), expected=f"one of {', '.join(GATE_NAMES)}"))
    if not isinstance(interleaved, bool):
        raise OperandTypeError(explain("interleaved", got=type(interleaved).__name__, expected="bool"))
    _check_weights(a, weights)
    if len(weights) == 2:
        if interleaved:
            raise OperandError(explain("interleaved", got="True with b2", expected="one weight b1 that has all rows"))
        return weights["b1"].rows
    rows = weights["b"].rows
    _check_halves("rows of b1, which is both weights", rows, 2 * INTERLEAVED_ROWS)
    return rows // 2


def _check_halves(what: str, rows: int, multiple: int) -> None:
    if rows % multiple:
        expected = f"a multiple of {multiple}: scales come in atoms of {INTERLEAVED_ROWS} rows"
        raise OperandError(explain(what, got=rows, expected=expected, hint="Give b1 and b2 as two tensors."))


def _check_weights(a: BlockScaledTensor, weights: dict[str, BlockScaledTensor]) -> None:
    for b in weights.values():
        check_pair(a, b)
    for name, operand in {"a": a, **weights}.items():
        check_format(name, operand, tuple(FORMATS.values()))
        if operand.is_batched != a.is_batched:
            got = f"a {a.data.ndim}-d, {name} {operand.data.ndim}-d"
            raise OperandError(explain("batch dimension", got=got, expected="the same"))
    first, last = weights.values() if len(weights) == 2 else [*weights.values()] * 2
    both = {
        "rows": [b.rows for b in (first, last)],
        "formats": [b.format.name for b in (first, last)],
        "global scales": ["none" if b.global_scale is None else "one" for b in (first, last)],
    }
    for what, (one, two) in both.items():
        if one != two:
            raise OperandError(explain(f"{what} of b1 and b2", got=f"{one} and {two}", expected="the same"))


def _result(
    a: BlockScaledTensor, n: int, inputs: dict, out: Any, dtype: torch.dtype | None, global_scale: Any
) -> torch.Tensor | BlockScaledTensor:
    """The output, checked or new."""
    shape = (a.batch, a.rows, n) if a.is_batched else (a.rows, n)
    if global_scale is None and not isinstance(out, BlockScaledTensor):
        return checked_output({} if out is None else inputs, a.device, shape, out, dtype)
    if dtype is not None:
        raise OperandTypeError(explain("out_dtype", got=dtype, expected="None for a quantized result"))
    if n % NVFP4.block:
        raise OperandError(explain("N of a quantized result", got=n, expected=f"a multiple of {NVFP4.block}"))
    if out is None:
        return _new_quantized(a, shape, global_scale)
    if not isinstance(out, BlockScaledTensor):
        raise OperandTypeError(
            explain("out", got=type(out).__name__, expected="BlockScaledTensor, for a quantized result")
        )
    if global_scale is not None:
        raise OperandError(explain("out_global_scale", got="one, with out", expected="None: that of out is used"))
    check_format("out", out, (NVFP4,))
    if (*out.data.shape[:-1], out.k) != shape:
        raise OperandError(explain("shape of out", got=(*out.data.shape[:-1], out.k), expected=shape))
    if out.scale_layout != "blocked" or out.global_scale is None or out.device != a.device:
        got = f"{out.scale_layout} scales, {'no' if out.global_scale is None else 'a'} global scale, {out.device}"
        raise OperandError(explain("out", got=got, expected=f"blocked scales and a global scale on {a.device}"))
    for name in ("data", "scale"):
        others = {"out.data": out.data} if name == "scale" else {}
        check_overlap({**inputs, **others, "out.global_scale": out.global_scale}, as_bytes(getattr(out, name)))
    return out


def _new_quantized(a: BlockScaledTensor, shape: tuple, global_scale: Any) -> BlockScaledTensor:
    from .quantize_request import checked_global_scale

    value = checked_global_scale(global_scale, a.device)
    data = torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=a.device)
    scale = torch.empty(blocked_bytes(a.rows, shape[-1] // NVFP4.block, a.batch), dtype=torch.uint8, device=a.device)
    return BlockScaledTensor(data, blocked_view(scale, a.rows, shape[-1] // NVFP4.block, a.batch), value, NVFP4)


def _factors(*numbers: torch.Tensor | None) -> list[torch.Tensor]:
    return [x for x in numbers if x is not None]


def _pointers(factors: list[torch.Tensor]) -> list[int]:
    return [x.data_ptr() for x in factors] + [0] * (FACTORS - len(factors))


def _sides(b: BlockScaledTensor, n: int, interleaved: bool) -> list[list[int]]:
    """Arguments of B1 and B2, which both lie in ``b``: their first rows and atoms are some way apart."""
    data, scale, _, row, batch, matrices, scale_batch = arguments_of(b)
    rows = INTERLEAVED_ROWS if interleaved else n
    data_bytes = rows * row // b.format.elements_per_byte
    scale_bytes = blocked_bytes(rows, b.format.scale_columns(b.k))
    return [[data + i * data_bytes, scale + i * scale_bytes, n, row, batch, matrices, scale_batch] for i in (0, 1)]


def _gated_problem(
    a: BlockScaledTensor, b: BlockScaledTensor, n: int, result: Any, gate: str, interleaved: bool, factors: int
) -> GemmProblem:
    more = {"products": 2, "gate": gate, "interleaved": interleaved}
    if not isinstance(result, BlockScaledTensor):
        return _problem(a, b, result, None, factors, **more)
    row, batch = result.data.stride(-2), result.data.stride(0) if result.batch > 1 else 0
    vector = (result.data.data_ptr() | (row if result.rows > 1 else 0) | batch) % 16 == 0
    return GemmProblem(
        a.rows, n, a.k, a.batch, a.format.name, b.format.name, QUANTIZED, vector=vector, factors=factors, **more
    )


def _output_arguments(plan: Plan, result: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The output's pointer, strides, scales and global scale, and the tensors that are written."""
    if isinstance(result, BlockScaledTensor):
        m, _, batch = _strides(result.data)
        pointers = [result.scale.data_ptr(), result.global_scale.data_ptr()]
        return [result.data.data_ptr(), m, batch, *pointers], {"out.data": result.data, "out.scale": result.scale}
    return [result.data_ptr(), *_output_strides(plan, result), 0, 0], {"out": result}


def _reference(a, weights: dict, n: int, gate: str, interleaved: bool, alpha: Any) -> torch.Tensor:
    """In float64, of operands of any layout."""
    products = [gemm_reference(a, b, alpha=alpha, out_dtype=torch.float64) for b in weights.values()]
    if len(products) == 1:
        rows = INTERLEAVED_ROWS if interleaved else n
        both = products[0].unflatten(-1, (-1, 2, rows))
        products = [both[..., i, :].flatten(-2) for i in (0, 1)]
    return _GATES[gate](products[0]) * products[1]


def _store_reference(exact: torch.Tensor, result: Any) -> torch.Tensor | BlockScaledTensor:
    if not isinstance(result, BlockScaledTensor):
        return result.copy_(exact)
    from .quantize import quantize

    made = quantize(exact.float(), NVFP4, "max", global_scale=result.global_scale, backend="reference")
    as_bytes(result.data).copy_(made.data)
    as_bytes(result.blocked_scale()).copy_(made.blocked_scale())
    return result


def _build(config: GemmConfig) -> CompiledKernel:
    import cuda.bindings.driver as driver
    import cutlass

    from ..kernels.gemm.sm100.gated import GatedGemm
    from ..kernels.gemm.sm100.operands import ELEMENT_TYPES, OUT_TYPES

    i32, i64 = cutlass.Int32(1), cutlass.Int64(1)
    out = OUT_TYPES[config.out]
    least = NVFP4.block_bytes if config.out == QUANTIZED else out.width // 8
    number, byte = example_pointer(cutlass.Float32, 4), example_pointer(cutlass.Uint8, 16)
    one, two = (ELEMENT_TYPES[x] for x in (config.a_format, config.b_format)[:: 1 if config.shared == "a" else -1])
    args = [
        example_operand(one),
        (example_operand(two), example_operand(two)),
        (example_pointer(out, 16 if config.vector else least), i64, i64, byte, number),
        cutlass.Float32(1.0),
        ((number,) * FACTORS,) * 2,
        (example_pointer(cutlass.Float32, 16), example_pointer(cutlass.Int32, 4)),
        (i32, i32, i32),
        driver.CUstream(0),
    ]
    return build(GatedGemm(config), args, name="gated_gemm", arch=config.arch.name)

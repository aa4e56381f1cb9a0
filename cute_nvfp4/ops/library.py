"""The table of operators ``torch.ops.cute_nvfp4``: a row for each operation (docs/how-to/torch.md).

Importing this module, or any other of ``ops``, registers all operators.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch

from ..errors import OperandError
from ..formats import NVFP4
from ..operand import BlockScaledTensor
from ..prepared_weight import PreparedWeight
from ..row_scaled import FP8, RowScaledTensor
from ..scale_layout import blocked_view
from . import gradients
from .dequantize import DEQUANTIZE
from .dispatch import requires_grad
from .gated_gemm import GATED
from .gemm import GEMM
from .gemv import GEMV
from .grouped_gemm import GROUPED, is_prepared
from .grouped_gemm_contiguous import CONTIGUOUS
from .moe.layer import MOE
from .moe.operator import ARGUMENTS, ExpertsOperator
from .moe.route import ROUTE, Routes
from .operator import Operator, RecordOutput, flat_scale, rebuilt, refuse_gradients, weight_of
from .prepared_weight.gemm import PREPARED_GEMM, quantized_scale
from .quantize import QUANTIZE
from .quantize_request import checked_global_scale, choose_backend
from .quantize_rows import QUANTIZE_ROWS
from .quantized_operators import DequantizedValues, QuantizedParts, Quantizer
from .rmsnorm_quantize import RMSNORM
from .silu_mul_quantize import SILU_MUL


class QuantizedOutput(RecordOutput):
    """An operator that returns NVFP4 data and scales, for a global scale that the caller gives."""

    def adapted(self, request: Any) -> Any:
        scale = quantized_scale(request, 0)
        if request.out is None and torch.is_grad_enabled():
            refuse_gradients({"out_global_scale": scale})
        return request._replace(out_global_scale=checked_global_scale(scale, request.a.device))

    def result(self, request: Any, found: Any) -> BlockScaledTensor:
        if request.out is not None:
            return request.out
        data, scale = found
        rows, batch = data.shape[-2], data.shape[0] if data.ndim == 3 else 1
        view = blocked_view(scale, rows, data.shape[-1] // NVFP4.block_bytes, batch)
        return BlockScaledTensor(data, view, request.out_global_scale, NVFP4)

    def restore(self, values: dict[str, Any]) -> None:
        if values["out"] is not None:
            scale = values["out_global_scale"]
            values["out"] = BlockScaledTensor(values["out"], values["out_scale"], scale, NVFP4)
            values["out_global_scale"] = None

    def _parts(self, record: BlockScaledTensor) -> tuple[torch.Tensor, ...]:
        return record.data, flat_scale(record)


class ListOutput(Operator):
    """An operator that computes a list of products: its arguments are lists."""

    def adapted(self, request: Any) -> Any:
        sides = [list(side) for side in zip(*request.problems)]
        self.check(request, *sides)
        named = namedtuple("Sides", ("a", "b", *request._fields))
        return named(*sides, *request)

    def check(self, request: Any, a: list, b: list) -> None:
        """Raises unless the operands have one format on each side."""
        if all(x is None for x in (a[0], b[0])):
            raise OperandError.of("problems", got="none with rows", expected="at least one operand")
        for name, side in (("a", a), ("b", b)):
            check_one_format(name, side)

    def alpha_of(self, request: Any) -> tuple[torch.device, int]:
        first = next(x for pair in request.problems for x in pair if x is not None)
        return first.device, len(request.problems)

    def written(self, request: Any) -> dict[str, Any] | None:
        return None if request.out is None else {"out": list(request.out)}

    def result(self, request: Any, found: Any) -> list[torch.Tensor]:
        return list(found)

    def returned(self, request: Any, made: list[torch.Tensor]) -> list[torch.Tensor]:
        # results of the function share memory; results of an operator must not
        return [torch.empty_like(x).copy_(x) for x in made] if request.out is None else made

    def restore(self, values: dict[str, Any]) -> None:
        names = [x for x in self.tensors if x != "alpha_tensor"] + [x for x in ("rows", "k") if x in values]
        lengths = [len(values[x]) for x in names]
        if len(set(lengths)) != 1:
            raise OperandError.of("lists of groups", got=f"lengths {lengths}", expected="equal ones")
        values["problems"] = [self.pair(values | dict(zip(names, x))) for x in zip(*(values[name] for name in names))]

    def pair(self, values: dict[str, Any]) -> tuple[Any, Any]:
        """The operands of one group, rebuilt from its parts."""
        return rebuilt("a", values), rebuilt("b", values)


def check_one_format(name: str, side: list) -> None:
    """Raises unless the operands of one side, those that are not None, have one format."""
    formats = list(dict.fromkeys(x.format.name for x in side if x is not None))
    if len(formats) > 1:
        raise OperandError.of(f"format of {name}", got=formats[1], expected=formats[0])


class PreparedListOutput(ListOutput):
    """An operator that computes a list of products with prepared weights."""

    def check(self, request: Any, a: list, b: list) -> None:
        formats = {x.format.name for x in a if isinstance(x, BlockScaledTensor)}
        if len(formats) > 1:
            raise OperandError.of("formats of a", got=" and ".join(sorted(formats)), expected="one in an operator")
        if requires_grad(a):
            for i, (x, w) in enumerate(zip(a, b)):
                a[i] = w.packed.new_empty((0, w.k), dtype=w.dtype) if x is None else x

    def restore(self, values: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and requires_grad(values["a"]):
            # torch takes a list that has None in it for a constant
            raise OperandError.of("a", got="None", expected="tensors in all groups, where one requires a gradient")
        super().restore(values)

    def pair(self, values: dict[str, Any]) -> tuple[Any, Any]:
        scales = values["b_global_scale"], values["up_global_scale"]
        return rebuilt("a", values), weight_of(values["b"], values["rows"], values["k"], *scales, values)


class StatusOutput(Operator):
    """An operator whose second result reports wrong offsets."""

    def alpha_of(self, request: Any) -> tuple[torch.device, int]:
        return request.b.device, request.b.batch

    def adapted(self, request: Any) -> Any:
        if request.out is None and request.status is not None:
            request = request._replace(out=self._operation.checked(request))
        return request._replace(offsets=request.a.offsets) if request.offsets is None else request

    def written(self, request: Any) -> dict[str, Any] | None:
        if request.out is None:
            return None
        status = request.offsets.new_empty(1) if request.status is None else request.status
        return {"out": request.out, "status": status}

    def result(self, request: Any, found: Any) -> torch.Tensor:
        return found[0]

    def returned(self, request: Any, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return made, request.status

    def restore(self, values: dict[str, Any]) -> None:
        if values["status"] is None:
            values["status"] = values["offsets"].new_empty(1)
        if "rows" not in values:
            # a holds the offsets
            values["a"], values["offsets"] = rebuilt("a", values), None


_OUT_STATUS = {"out": "Tensor(a!)", "status": "Tensor(b!)"}
_PAIR = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? a_global_scale=None, Tensor? b_global_scale=None"
_FORMATS = 'str a_format="nvfp4", str b_format="nvfp4"'
_LAST = 'ScalarType? out_dtype=None, str backend="auto"'
_GATED = (
    "Tensor a, Tensor a_scale, Tensor b1, Tensor b1_scale, Tensor? b2=None, Tensor? b2_scale=None, "
    "Tensor? a_global_scale=None, Tensor? b1_global_scale=None, Tensor? b2_global_scale=None, "
    "Tensor? alpha_tensor=None"
)
_GATED_OPTIONS = f'float alpha=1.0, str gate="silu", bool interleaved=False, {_FORMATS}, str backend="auto"'
_PREPARED_OPTIONS = (
    'int rows, ScalarType dtype, float alpha=1.0, str gate="", str packing="nvfp4", ScalarType? out_dtype=None, '
    'str a_format="nvfp4", str backend="auto"'
)
_PREPARED_SCALES = (
    "Tensor? a_global_scale=None, Tensor? b_global_scale=None, Tensor? up_global_scale=None, Tensor? alpha_tensor=None"
)

_QUANTIZATION = (
    'bool compute_global_scale=False, str format="nvfp4", str rule="max", {}str scale_layout="blocked", '
    '{}str backend="auto"'
)
_FUSED = _QUANTIZATION.format("", "bool return_values=False, ")

TABLE = {
    "quantize": Quantizer(
        "quantize",
        QUANTIZE,
        "Tensor x, Tensor? global_scale=None, *, "
        + _QUANTIZATION.format("SymInt? seed=None, int[]? signs=None, bool block_2d=False, ", ""),
    ),
    "quantize_rows": RecordOutput(
        "quantize_rows", QUANTIZE_ROWS, 'Tensor x, *, str backend="auto"', RowScaledTensor, ("out", "out_scale")
    ),
    "rmsnorm_quantize": QuantizedParts(
        "rmsnorm_quantize",
        RMSNORM,
        "Tensor x, Tensor? weight=None, Tensor? residual=None, Tensor? global_scale=None, *, float eps=1e-06, "
        + _FUSED,
        ("residual_out", "values_out"),
    ),
    "silu_mul_quantize": QuantizedParts(
        "silu_mul_quantize",
        SILU_MUL,
        f"Tensor gate, Tensor? up=None, Tensor? global_scale=None, *, {_FUSED}",
        ("values_out",),
    ),
    "dequantize": DequantizedValues(
        "dequantize",
        DEQUANTIZE,
        'Tensor data, Tensor scale, Tensor? global_scale=None, *, str format="nvfp4", ScalarType? out_dtype=None',
        gradient=gradients.GLOBAL_SCALE,
    ),
    "gemv": Operator("gemv", GEMV, f"{_PAIR}, *, float alpha=1.0, {_LAST}"),
    "gemm": Operator(
        "gemm",
        GEMM,
        f"{_PAIR}, Tensor? alpha_tensor=None, Tensor? bias=None, *, float alpha=1.0, {_FORMATS}, {_LAST}",
        gradient=gradients.BIAS,
    ),
    "gated_gemm": Operator("gated_gemm", GATED, f"{_GATED}, *, {_GATED_OPTIONS}, ScalarType? out_dtype=None"),
    "gated_gemm_quantized": QuantizedOutput(
        "gated_gemm_quantized",
        GATED,
        _GATED.replace("=None", "") + f", Tensor out_global_scale, *, {_GATED_OPTIONS}",
        BlockScaledTensor,
        ("out", "out_scale"),
    ),
    "packed_gemm": Operator(
        "packed_gemm",
        PREPARED_GEMM,
        f"Tensor a, Tensor? a_scale, Tensor b, {_PREPARED_SCALES}, Tensor? bias=None, "
        f"Tensor? row_factor=None, *, {_PREPARED_OPTIONS}, bool promoted=False",
        gradient=gradients.PREPARED,
    ),
    "grouped_gemm": ListOutput(
        "grouped_gemm",
        GROUPED,
        "Tensor?[] a, Tensor?[] a_scale, Tensor?[] b, Tensor?[] b_scale, Tensor?[] a_global_scale, "
        f"Tensor?[] b_global_scale, Tensor? alpha_tensor=None, *, float alpha=1.0, {_FORMATS}, {_LAST}",
        "Tensor[]",
        {"out": "Tensor(a!)[]"},
    ),
    "packed_grouped_gemm": PreparedListOutput(
        "packed_grouped_gemm",
        GROUPED,
        "Tensor?[] a, Tensor?[] a_scale, Tensor[] b, Tensor?[] a_global_scale, Tensor?[] b_global_scale, "
        "Tensor?[] up_global_scale, Tensor? alpha_tensor=None, *, int[] rows, int[] k, ScalarType dtype, "
        'str packing="nvfp4", float alpha=1.0, str gate="", ScalarType? out_dtype=None, str a_format="nvfp4", '
        'str backend="auto"',
        "Tensor[]",
        {"out": "Tensor(a!)[]"},
        gradients.LIST,
    ),
    "grouped_gemm_contiguous": StatusOutput(
        "grouped_gemm_contiguous",
        CONTIGUOUS,
        "Tensor a, Tensor a_scale, Tensor offsets, Tensor b, Tensor b_scale, Tensor? a_global_scale=None, "
        f"Tensor? b_global_scale=None, Tensor? alpha_tensor=None, *, float alpha=1.0, {_FORMATS}, {_LAST}",
        "(Tensor, Tensor)",
        _OUT_STATUS,
    ),
    "packed_grouped_gemm_contiguous": StatusOutput(
        "packed_grouped_gemm_contiguous",
        CONTIGUOUS,
        f"Tensor a, Tensor? a_scale, Tensor offsets, Tensor b, {_PREPARED_SCALES}, *, {_PREPARED_OPTIONS}",
        "(Tensor, Tensor)",
        _OUT_STATUS,
        gradients.ROWS,
    ),
    "moe": ExpertsOperator("moe", MOE, ARGUMENTS),
    "route": RecordOutput(
        "route",
        ROUTE,
        'Tensor logits, Tensor? correction=None, *, int top_k, str scoring="softmax", bool renormalize=True, '
        'float scale=1.0, ScalarType? dtype=None, ScalarType? ids_dtype=None, str backend="auto"',
        Routes,
        ("out_ids", "out_weights"),
    ),
}


def _gated(request: Any) -> Operator:
    quantized = request.out_global_scale is not None or isinstance(request.out, BlockScaledTensor)
    return TABLE["gated_gemm_quantized" if quantized else "gated_gemm"]


def _quantize(request: Any) -> Operator | None:
    """The operator, or None if exact torch runs: a graph then records its operations one by one."""
    kernels = choose_backend(request.backend, request.described).backend != "reference"
    return TABLE["quantize"] if kernels else None


for _row in TABLE.values():
    _row.serve()
QUANTIZE.operator = _quantize
for _fused in (RMSNORM, SILU_MUL):
    # for rows in FP8 a graph records two steps: what computes the values, and what quantizes them
    _fused.operator = lambda r, name=_fused.name: None if r.format == FP8 else TABLE[name]
DEQUANTIZE.operator = lambda request: None
GATED.operator = _gated
CONTIGUOUS.operator = lambda r: TABLE[
    "packed_grouped_gemm_contiguous" if isinstance(r.b, PreparedWeight) else "grouped_gemm_contiguous"
]
GROUPED.operator = lambda r: TABLE["packed_grouped_gemm" if is_prepared(r.problems) else "grouped_gemm"]

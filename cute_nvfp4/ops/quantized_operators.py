"""Operators of torch for the operations that return or read a block-scaled tensor."""

from __future__ import annotations

from typing import Any

import torch

from ..operand import BlockScaledTensor
from ..quantization.hadamard import Hadamard
from ..quantization.rules import resolve_format
from ..runtime.torch_private import is_exporting
from ..scale_layout import blocked_bytes, blocked_view
from .fused import Fused
from .operator import Operator, flat_scale, operand
from .quantize_request import checked_global_scale, kind_of_scale


class QuantizedParts(Operator):
    """An operator that returns data, scales (blocked ones in one dimension), the global scale, and ``more``.

    more: "residual_out" for the new residual, "values_out" for the values that were quantized. A result that the caller
    does not ask for is an empty tensor.
    """

    def __init__(self, name: str, operation: Any, arguments: str, more: tuple[str, ...] = ()) -> None:
        self.results, self._wanted = ("out", "out_scale", "out_global_scale", *more), getattr(operation, "wanted", "")
        written = {x: f"Tensor({'abcde'[i]}!)" + "?" * (i > 1) for i, x in enumerate(self.results)}
        super().__init__(name, operation, arguments, f"({', '.join(['Tensor'] * len(written))})", written)

    def call(self, request: Any) -> Any:
        """The result of a request, computed through torch's dispatcher, which records the call."""
        out, residual, residual_out = (getattr(request, x, None) for x in ("out", "residual", "residual_out"))
        self._operation.checked(request)
        values = self.described(request)
        tensors = [None if (x := values[name]) is None else x.detach() for name in self.tensors]
        options = {name: values[name] for name in self._options if values[name] is not None}
        if out is None and residual_out is None:
            parts = dict(zip(self.results, self._packet.default(*tensors, **options)))
        else:
            parts = self.new(request, values)
            if out is not None:
                data, scale = (x[None] if x.ndim == 2 < values["ndim"] else x for x in (out.data, flat_scale(out)))
                parts |= {"out": data, "out_scale": scale, "out_global_scale": out.global_scale}
            if residual_out is not None:
                parts["residual_out"] = residual_out
            # the caller's global scale may be that of out, which is then read and not written
            stored = values["compute_global_scale"] or (out and out.global_scale is not request.global_scale)
            written = parts | ({} if stored else {"out_global_scale": None})
            unwanted = {"residual_out": residual, "values_out": values["return_values"] or None}
            written = {name: None if unwanted.get(name, True) is None else x for name, x in written.items()}
            self._packet.out(*tensors, **options, **written)
        return self.found(request, values, parts)

    def described(self, request: Any) -> dict[str, Any]:
        """The operator's arguments for a request, and what else later steps need to know."""
        values, x = request._asdict(), request[0]
        format = resolve_format(request.format)
        kind = kind_of_scale(format, request.global_scale, x.device)
        values["global_scale"] = checked_global_scale(request.global_scale, x.device) if kind == "given" else None
        values["return_values"] = getattr(request, self._wanted, False)
        return values | {"format": format.name, "compute_global_scale": kind == "computed", "ndim": 2}

    def found(self, request: Any, values: dict[str, Any], parts: dict[str, torch.Tensor]) -> Any:
        """The result of the public function."""
        quantized = request.out
        if quantized is None:
            factor = parts["out_global_scale"] if values["compute_global_scale"] else values["global_scale"]
            data, scale, format = parts["out"], parts["out_scale"], resolve_format(values["format"])
            # exporting a view in six dimensions would need a separate program for up to 128 rows
            if request.scale_layout == "blocked" and not is_exporting():
                batch = data.shape[0] if data.ndim == 3 else 1
                columns = data.shape[-1] // format.block_bytes
                scale = blocked_view(scale, data.shape[-2], columns, batch)
            if data.ndim == 3 and request[0].ndim < 3:
                data, scale = data[0], scale if request.scale_layout == "blocked" else scale[0]
            quantized = BlockScaledTensor(data, scale, factor, format)
        if "values_out" not in self.results:
            return quantized
        residual = parts.get("residual_out") if getattr(request, "residual", None) is not None else None
        return Fused(quantized, residual, parts["values_out"] if values["return_values"] else None)

    def shape(self, request: Any, values: dict[str, Any]) -> tuple[int, ...]:
        """The shape of the values that are quantized."""
        return self._operation.shape_of(request)

    def new(self, request: Any, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        """New results, by name."""
        x, shape, format = request[0], self.shape(request, values), resolve_format(values["format"])
        *batch, rows, k = shape if len(shape) > 1 else (1, *shape)
        columns = format.scale_columns(k)
        blocked = values["scale_layout"] == "blocked"
        scales = blocked_bytes(rows, columns, *batch) if blocked else (*batch, rows, columns)
        return {
            "out": x.new_empty((*batch, rows, format.data_columns(k)), dtype=torch.uint8),
            "out_scale": x.new_empty(scales, dtype=torch.uint8),
            "out_global_scale": x.new_empty(() if values["compute_global_scale"] else 0, dtype=torch.float32),
            "residual_out": x.new_empty(0 if values.get("residual") is None else x.shape),
            "values_out": x.new_empty(shape if values.get("return_values") else 0),
        }

    def restore(self, values: dict[str, Any]) -> None:
        if values["out"] is not None:
            own = values.get("out_global_scale")
            own = values["global_scale"] if own is None else own
            values["out"] = operand(values["out"], values["out_scale"], own, values["format"])
        values["global_scale"] = "auto" if values["compute_global_scale"] else values["global_scale"]
        values[self._wanted] = values.get("return_values", False) or values.get("values_out") is not None

    def _run(self, *args: Any, **options: Any) -> Any:
        request = self._request(args, options)
        found = self._operation.run(*request)
        quantized, residual, values = found if isinstance(found, Fused) else (found, None, None)
        if request.out is not None:
            if options.get("values_out") is not None:
                options["values_out"].copy_(values)
            return None
        x = request[0]
        computed = quantized.global_scale if options.get("compute_global_scale") else None
        computed = x.new_empty(0, dtype=torch.float32) if computed is None else computed
        values = values if getattr(request, self._wanted, False) else None
        rest = (x.new_empty(0) if part is None else part for part in (residual, values))
        named = dict(zip(("residual_out", "values_out"), rest))
        return (quantized.data, flat_scale(quantized), computed, *(named[name] for name in self.results[3:]))

    def _fake(self, *args: Any, **options: Any) -> Any:
        values = self._defaults | dict(zip(self.tensors, args)) | options
        request = self._request(args, options)
        self._operation.checked(request)
        made = self.new(request, values)
        return tuple(made[name] for name in self.results)


class Quantizer(QuantizedParts):
    """The operator of ``quantize``: x has three dimensions, and a rotation is a list of signs."""

    def described(self, request: Any) -> dict[str, Any]:
        described = request.described
        rotation, source = described.source.rotation, described.source
        values = super().described(request) | {"x": source.matrices, "rule": described.rule.name, "ndim": 3}
        values["seed"] = request.generator if described.rounding == "stochastic" else None
        return values | {"block_2d": described.tile, "signs": None if rotation is None else list(rotation.signs)}

    def shape(self, request: Any, values: dict[str, Any]) -> tuple[int, ...]:
        return values["x"].shape

    def restore(self, values: dict[str, Any]) -> None:
        super().restore(values)
        # "auto" may find only here that a GPU has no kernels; torch then gives the same bits
        seed, signs = values["seed"], values["signs"]
        values |= {"rounding": "nearest" if seed is None else "stochastic", "generator": seed}
        values["hadamard"] = None if signs is None else Hadamard(tuple(signs))


class DequantizedValues(Operator):
    """The operator of ``dequantize``."""

    def restore(self, values: dict[str, Any]) -> None:
        values["x"] = operand(values["data"], values["scale"], values["global_scale"], values["format"])
        out, dtype = values["out"], values["out_dtype"]
        values["dtype"] = out.dtype if out is not None else torch.float32 if dtype is None else dtype

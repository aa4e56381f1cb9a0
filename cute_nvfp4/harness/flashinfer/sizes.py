"""Shapes and dtypes of a definition's tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .records import Definition, TensorOf

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float4_e2m1": torch.float4_e2m1fn_x2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def sizes(definition: Definition, axes: Mapping[str, int]) -> dict[str, int]:
    """The size of every axis of the definition. axes: those that a workload gives."""
    constant = {name: axis.value for name, axis in definition.axes.items() if axis.type == "const"}
    return constant | dict(axes)


def shape_of(tensor: TensorOf, known: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor in memory. Two elements of float4_e2m1 share a byte along the last axis."""
    shape = [known[name] for name in tensor.shape or ()]
    if tensor.dtype == "float4_e2m1":
        shape[-1] //= 2
    return tuple(shape)

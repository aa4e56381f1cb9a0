"""Tensors of every kind that torch has, made of a plain one; and what is no tensor."""

from __future__ import annotations

import warnings
from typing import Any

import torch


class Subclass(torch.Tensor):
    """A class of somebody's own, which changes nothing."""


def of_kind(x: torch.Tensor, kind: str) -> Any:
    """``x`` as that kind.

    Raises:
        Exception: torch has no such tensor of these numbers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _MADE[kind](x)


def _quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8)


def _vmap(x: torch.Tensor) -> torch.Tensor:
    functorch = torch._C._functorch
    return functorch._add_batch_dim(torch.stack([x, x]), 0, functorch._vmap_increment_nesting(2, "different"))


def _strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


_MADE = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x.reshape(-1), x.reshape(-1)[:1]], layout=torch.jagged),
    "quantized": _quantized,
    "complex": lambda x: x.to(torch.complex64),
    "conj": lambda x: x.to(torch.complex64).conj(),
    "negative": torch._neg_view,
    "functional": torch._to_functional_tensor,
    "vmap": _vmap,
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "empty": lambda x: x[:0],
    "parameter": lambda x: torch.nn.Parameter(x.clone(), requires_grad=False),
    "gradient": lambda x: x.clone().requires_grad_(),
    "subclass": lambda x: x.clone().as_subclass(Subclass),
    "strided": _strided,
    "expanded": lambda x: x[:1].expand(x.shape),
    "reversed": lambda x: x.mT.contiguous().mT,
    "wider": lambda x: x.unsqueeze(0).unsqueeze(0),
    "scalar": lambda x: x.reshape(-1)[0],
    "double": lambda x: x.double(),
    "boolean": lambda x: x.bool(),
    "half": lambda x: x.to(torch.float16),
    "integer": lambda x: x.to(torch.int64),
    "none": lambda x: None,
    "text": lambda x: "tensor",
    "number": lambda x: 7,
    "array": lambda x: x.tolist(),
}


def moved(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same numbers, ``offset`` bytes after an address that is a multiple of 64.

    Raises:
        Exception: the offset is no whole number of elements.
    """
    room = torch.zeros(x.numel() * x.element_size() + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + offset
    flat = room[start : start + x.numel() * x.element_size()].view(x.dtype)
    dense = torch.as_strided(flat, x.shape, x.stride())
    dense.copy_(x)
    return dense

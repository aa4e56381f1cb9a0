"""Humming's products of experts, which ``moe.py`` times beside its layers where humming-kernels is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from gemm_contestants import HUMMING_RULES, NotAvailableError

from cute_nvfp4 import BlockScaledTensor

if TYPE_CHECKING:
    from moe import Routing

NAMES = {"humming": None, "humming-w4a8": "mxfp4"}
"""The contestants, and the weight format that they need; None: the layer's format."""
MOST_OFF = {"humming": 0.02, "humming-w4a8": 0.12}


class Rows(NamedTuple):
    """The inputs of the two products of a routing: rows for both, in the order of the experts, and the experts'
    offsets."""

    routing: Routing
    x: torch.Tensor
    inner: torch.Tensor
    offsets: torch.Tensor


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Makes what Humming raises a ``NotAvailableError``."""
    try:
        yield
    except ImportError as error:
        raise NotAvailableError(f"humming-kernels: {error}") from error
    except (AssertionError, RuntimeError, ValueError) as error:
        raise NotAvailableError(f"humming-kernels refuses: {type(error).__name__} {error}") from error


class HummingProducts:
    """The two products of a layer's experts, in the configurations that Humming chooses, and nothing else. Rows are
    gathered and sorted in advance, and the operations between and after the products are left out: a whole layer takes
    longer.

    stacks: weights (E, 2 I, H) and (E, H, I). Rows are in bf16; for ``humming-w4a8`` the call quantizes them.

    Raises:
        NotAvailableError: humming-kernels is not installed, or refuses the weights; or its products are wrong.
    """

    def __init__(self, name: str, stacks: list[BlockScaledTensor], top: int) -> None:
        self.name, self.stacks, self.top = name, stacks, top
        self._rows: list[Rows] = []
        with _refusals():
            self.products = [self._layer(stack) for stack in stacks]

    def _layer(self, stack: BlockScaledTensor):
        from humming.layer import HummingLayer

        form = stack.format.name
        weight_rule = HUMMING_RULES[form][0]
        rows = dict(HUMMING_RULES["mxfp4"][1]) if self.name == "humming-w4a8" else None
        made = HummingLayer(
            stack.rows, stack.k, dict(weight_rule), rows, num_experts=stack.batch, torch_dtype=torch.bfloat16
        ).to(stack.data.device)
        dtype = torch.float8_e4m3fn if form == "nvfp4" else torch.uint8
        scale = stack.rowmajor_scale().view(torch.uint8).view(dtype)
        tensors = {"weight": stack.data.view(torch.uint8), "weight_scale": scale}
        if form == "nvfp4":
            tensors["weight_scale_2"] = torch.ones_like(made.weight_scale_2)
        made.load_from_tensors(tensors)
        made.transform()
        return made

    def rows(self, r: Routing) -> Rows:
        """Gathers and sorts the rows of a routing, once."""
        for found in self._rows:
            if found.routing is r:
                return found
        experts, device = self.stacks[0].batch, r.x.device
        order = r.ids.flatten().argsort(stable=True)
        offsets = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        offsets[1:] = torch.bincount(r.ids.flatten(), minlength=experts).cumsum(0)
        generator = torch.Generator(device).manual_seed(36)
        inner = torch.randn(len(order), self.stacks[1].k, generator=generator, device=device).bfloat16()
        self._rows.append(Rows(r, r.x[order // self.top].contiguous(), inner, offsets))
        return self._rows[-1]

    def __call__(self, r: Routing) -> torch.Tensor:
        rows = self.rows(r)
        places = {"expert_layout": rows.offsets, "compute_config": {"gemm_type": "grouped_contiguous"}}
        self.products[0](rows.x, **places)
        return self.products[1](rows.inner, **places)

    def check(self, r: Routing) -> None:
        """Raises NotAvailableError unless the second product is exact up to rounding. Reads on the host which experts
        are used."""
        rows, stack = self.rows(r), self.stacks[1]
        with _refusals():
            got, edges = self(r).double(), rows.offsets.tolist()
        for e, (start, end) in enumerate(pairwise(edges)):
            if end > start:
                one = BlockScaledTensor(stack.data[e], stack.scale[e], None, stack.format)
                want = rows.inner[start:end].double() @ one.dequantize(torch.float64).T
                off = float((got[start:end] - want).norm() / want.norm())
                if not off < MOST_OFF[self.name]:
                    raise NotAvailableError(f"{self.name}: off by {off:.3f} of the norm")
                return

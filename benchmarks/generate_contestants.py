"""The contestants of ``generate.py``: the modules that each of them makes of the model's matrices, in bf16 or in
NVFP4."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from between_torch import Between
from slots import Slots
from torch.nn import functional as F

from cute_nvfp4 import (
    BlockScaledTensor,
    NVFP4Linear,
    RowScaledTensor,
    gated_gemm,
    gemm,
    moe,
    prepare_experts,
    prepare_weight,
    route,
)
from cute_nvfp4.ops.moe.experts import Experts
from cute_nvfp4.ops.moe.layer import slot_rows

INPUT_SCALE = 8 / 2688
"""The global scale of quantized activations: magnitudes up to 8 fit."""
PART = 2048
"""Rows that an MLP takes at a time."""


class Plain(torch.nn.Module):
    """x · Wᵀ in bf16."""

    def __init__(self, weight: BlockScaledTensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.dequantize(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class GatedPlain(torch.nn.Module):
    """silu(x · Gᵀ) · (x · Uᵀ) in bf16: one product, and one operation after it."""

    def __init__(self, gate: BlockScaledTensor, up: BlockScaledTensor, between: Between) -> None:
        super().__init__()
        self.register_buffer("weight", torch.cat([x.dequantize(torch.bfloat16) for x in (gate, up)]))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between.silu_mul(F.linear(x, self.weight))


class GatedPrepared(torch.nn.Module):
    """silu(x · Gᵀ) · (x · Uᵀ) with prepared NVFP4 weights: ``gated_gemm``, one launch. dtype: in which products are
    computed."""

    def __init__(self, gate: BlockScaledTensor, up: BlockScaledTensor, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = prepare_weight(gate, up, dtype=dtype)

    def forward(self, x: torch.Tensor | RowScaledTensor) -> torch.Tensor:
        if isinstance(x, RowScaledTensor):
            return gated_gemm(x, self.weight, out_dtype=torch.bfloat16)
        return gated_gemm(x.reshape(-1, x.shape[-1]), self.weight, out_dtype=x.dtype).reshape(*x.shape[:-1], -1)


class PreparedRows(torch.nn.Module):
    """x · Wᵀ with a weight that is prepared for FP8. x: in bf16, or rows (M, K) in FP8, for which the result is (M,
    N)."""

    def __init__(self, weight: BlockScaledTensor) -> None:
        super().__init__()
        self.weight = prepare_weight(weight, dtype=torch.float8_e4m3fn)

    def forward(self, x: torch.Tensor | RowScaledTensor) -> torch.Tensor:
        if isinstance(x, RowScaledTensor):
            return gemm(x, self.weight, out_dtype=torch.bfloat16)
        return gemm(x.reshape(-1, x.shape[-1]), self.weight, out_dtype=x.dtype).view(*x.shape[:-1], -1)


class GatedQuantized(torch.nn.Module):
    """silu(x · Gᵀ) · (x · Uᵀ) with x quantized to NVFP4: a product of all columns, and one operation after it."""

    def __init__(self, gate: BlockScaledTensor, up: BlockScaledTensor, between: Between) -> None:
        super().__init__()
        data = torch.cat([x.data for x in (gate, up)])
        scale = torch.cat([x.rowmajor_scale()[0] for x in (gate, up)])
        self.product = nvfp4(BlockScaledTensor(data, scale, gate.global_scale), "max")
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between.silu_mul(self.product(x))


class Dense(torch.nn.Module):
    """The MLP of a Llama: the gated product, and down. rows: for rows in FP8, how many it takes at a time; None:
    all."""

    def __init__(self, gated: torch.nn.Module, down: torch.nn.Module, rows: int | None) -> None:
        super().__init__()
        self.gated, self.down, self.rows = gated, down, rows

    def forward(self, x: torch.Tensor | RowScaledTensor) -> torch.Tensor:
        if self.rows is None or not isinstance(x, RowScaledTensor) or x.rows <= self.rows:
            return self.down(self.gated(x))
        out = torch.empty(x.rows, self.down.weight.rows, dtype=torch.bfloat16, device=x.data.device)
        for data, scale, part in zip(*(t.split(self.rows) for t in (x.data, x.scale, out))):
            gemm(self.gated(RowScaledTensor(data, scale)), self.down.weight, out=part)
        return out


class Routed(torch.nn.Module):
    """A mixture of experts: ``Pair`` in bf16, or the result of ``prepare_experts``. The router (E, H) is in bf16."""

    def __init__(self, router: torch.Tensor, experts: Experts | Pair, top: int, between: Between, routes: bool) -> None:
        super().__init__()
        self.register_buffer("router", router)
        self.top, self.between, self.experts = top, between, None
        self.routes = routes
        if isinstance(experts, Pair):
            for name, stack in experts._asdict().items():
                self.register_buffer(name, stack)
        else:
            self.experts = experts

    def slots(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Slots:
        """The rows of the experts of one token (1, H), before their sum."""
        if self.experts is None:
            return Slots(*self.between.slots(x, ids, weights, self.gate_up.mT, self.down.mT))
        return Slots(slot_rows(x, ids, weights, self.experts), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.routes:
            ids, weights = route(self.between.scores(rows, self.router), self.top)
        else:
            ids, weights = self.between.route(rows, self.router, self.top)
        if self.experts is None:
            # torch takes (E, K, N): these are views of rows along K
            y = self.between.experts(rows, ids, weights, self.gate_up.mT, self.down.mT)
        else:
            y = moe(rows, ids, weights, self.experts)
        return y.view(x.shape)


class Stack(NamedTuple):
    """A matrix (N, K) of each of E experts, stored as the rows of all of them, one after the other."""

    weight: BlockScaledTensor
    experts: int

    def matrices(self) -> list[BlockScaledTensor]:
        """One matrix for each expert, with its global scale, as checkpoints have them."""
        parts = (x.chunk(self.experts) for x in (self.weight.data, self.weight.rowmajor_scale()[0]))
        return [BlockScaledTensor(data, scale, self.weight.global_scale) for data, scale in zip(*parts)]

    def decoded(self) -> torch.Tensor:
        """The matrices (E, N, K) in bf16."""
        return self.weight.dequantize(torch.bfloat16).unflatten(0, (self.experts, -1))


class Pair(NamedTuple):
    """Both matrices of all experts in bf16: gate and up (E, 2 I, H), and down (E, H, I)."""

    gate_up: torch.Tensor
    down: torch.Tensor


class Stacks(NamedTuple):
    """Both matrices of all experts in NVFP4."""

    gate_up: Stack
    down: Stack

    def made(self, dtype: torch.dtype | None) -> Experts | Pair:
        """The experts as a contestant has them. dtype: in which products are computed; None: matrices in bf16 for
        torch."""
        if dtype is None:
            return Pair(*(stack.decoded() for stack in self))
        return prepare_experts(*(stack.matrices() for stack in self), dtype=dtype)


def nvfp4(weight: BlockScaledTensor, input_rule: str | None) -> NVFP4Linear:
    scale = None if input_rule != "max" else torch.tensor(INPUT_SCALE, device=weight.device)
    return NVFP4Linear(weight, input_rule=input_rule, input_global_scale=scale).prepare()


class Contestant(NamedTuple):
    """How a contestant makes modules of the model's matrices.

    The functions make a module of a matrix, of gate and up, and of the head. The other fields say: in which dtype
    experts are multiplied (None: torch's bf16); whether products take normalized rows in FP8; whether ``route`` chooses
    experts, or torch's operations do; how many rows of a prompt an MLP takes at a time, so that its activations stay in
    L2.
    """

    linear: Callable[[BlockScaledTensor], torch.nn.Module]
    gated: Callable[[BlockScaledTensor, BlockScaledTensor], torch.nn.Module]
    head: Callable[[BlockScaledTensor], torch.nn.Module]
    experts: torch.dtype | None
    fp8: bool = False
    routes: bool = True
    rows: int | None = None


def contestants(between: Between) -> dict[str, Contestant]:
    def w4a16(weight: BlockScaledTensor) -> NVFP4Linear:
        return nvfp4(weight, None)

    def w4a4(weight: BlockScaledTensor) -> NVFP4Linear:
        return nvfp4(weight, "max")

    fp8, bf16 = torch.float8_e4m3fn, Contestant(Plain, lambda g, u: GatedPlain(g, u, between), Plain, None)
    w4a8 = Contestant(PreparedRows, lambda g, u: GatedPrepared(g, u, fp8), Plain, fp8, True)
    return {
        "bf16": bf16._replace(routes=False),
        "bf16, our router": bf16,
        "w4a16": Contestant(w4a16, GatedPrepared, Plain, torch.bfloat16),
        "w4a16, torch's router": Contestant(w4a16, GatedPrepared, Plain, torch.bfloat16, routes=False),
        "w4a16, head too": Contestant(w4a16, GatedPrepared, w4a16, torch.bfloat16),
        "w4a8": w4a8,
        "w4a8, MLP in parts": w4a8._replace(rows=PART),
        "w4a4": Contestant(w4a4, lambda g, u: GatedQuantized(g, u, between), Plain, torch.bfloat16),
    }

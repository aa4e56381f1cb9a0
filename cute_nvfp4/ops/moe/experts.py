"""prepare_experts: prepares the weights of a mixture of experts, once, when a model is loaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import OperandError, OperandTypeError
from ...formats import MXFP4, NVFP4, as_bytes
from ...kernels.moe.config import ACTIVATIONS
from ...operand import BlockScaledTensor
from ...prepared_weight import PreparedWeight
from ...scale_layout import to_blocked
from ...tensors import check_tensor
from ..checks import check_format, number
from ..prepare_weight import prepare_weight

Matrix = BlockScaledTensor
Matrices = Matrix | Sequence[Matrix] | Sequence[tuple[Matrix, Matrix]]
"""A stack (E, N, K); or a matrix (N, K) for each expert; or gate and up for each, (I, K) both."""
DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class ActivationFunction:
    """The activation between the two products of an expert: one of ``ACTIVATIONS``, by name.

    alpha, limit: constants of "clamped_swiglu".
    """

    name: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            expected = f"one of {', '.join(ACTIVATIONS)}"
            raise OperandError.of("activation of experts", got=repr(self.name), expected=expected)
        for name in ("alpha", "limit"):
            value = number(f"{name} of an activation", getattr(self, name))
            if not 0.0 < value < float("inf"):
                raise OperandError.of(f"{name} of an activation", got=value, expected="a positive number")

    @property
    def halves(self) -> int:
        """The number of matrices in the first product: two for gate and up, or one."""
        return 1 if self.name == "relu2" else 2

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        """The activation (…, I) of [gate, up] (…, 2 I), or of one matrix (…, I), in the dtype of the product."""
        if self.name == "relu2":
            return product.relu().square()
        gate, up = product.chunk(2, dim=-1)
        if self.name == "silu":
            return gate / (1.0 + torch.exp(-gate)) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1.0)


@dataclass(frozen=True, eq=False, repr=False)
class Experts:
    """The experts of ``moe``, as ``prepare_experts`` makes them.

    gate_up: a stack of E matrices [gate; up] (2 I, H), or (I, H) if the activation takes one. down: a stack (E, H, I).
    Both are prepared for one dtype, with gate and up in one gated weight; or both are block-scaled.
    gate_up_factor, down_factor: None, or float32 (E,); they multiply the products. gate_up_bias, down_bias: None, or
    float32, (E, 2 I) or (E, I), and (E, H).
    """

    gate_up: PreparedWeight | BlockScaledTensor
    down: PreparedWeight | BlockScaledTensor
    gate_up_factor: torch.Tensor | None
    down_factor: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: ActivationFunction

    @property
    def count(self) -> int:
        """The number of experts."""
        return self.down.batch

    @property
    def hidden(self) -> int:
        """H, the elements of a row of x."""
        return self.gate_up.k

    @property
    def inner(self) -> int:
        """I, the elements between the two products."""
        return self.down.k

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that weights are decoded to, which x must have, or float8_e4m3fn; None for block-scaled weights."""
        return self.down.dtype if isinstance(self.down, PreparedWeight) else None

    @property
    def gated(self) -> bool:
        """Whether gate and up are prepared as one weight."""
        return isinstance(self.gate_up, PreparedWeight) and self.gate_up.gated

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.down.device

    @functools.cached_property
    def key(self) -> tuple:
        """The cache key of these experts: everything that a plan depends on, without addresses and values."""
        optional = (self.gate_up_factor, self.down_factor, self.gate_up_bias, self.down_bias)
        return (self.gate_up.key, self.down.key, self.activation, *(x is not None for x in optional))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the experts, by name."""
        found: dict[str, Any] = {}
        for name in ("gate_up", "down"):
            weight = getattr(self, name)
            parts = ("packed", "data", "scale", "global_scale", "up_global_scale", "row_factor")
            found |= {f"experts.{name}.{part}": getattr(weight, part, None) for part in parts}
        for name in ("gate_up_factor", "down_factor", "gate_up_bias", "down_bias"):
            found[f"experts.{name}"] = getattr(self, name)
        return {name: x for name, x in found.items() if x is not None}

    def __repr__(self) -> str:
        """Sizes and dtypes, never values: printing must not wait for the device."""
        sizes = f"{self.count} experts, hidden {self.hidden}, inner {self.inner}, {self.activation.name}"
        return f"Experts({sizes}, {self.down!r})"


def prepare_experts(
    gate_up: Matrices,
    down: Matrices,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Experts:
    """Prepares the weights of E experts for ``moe``, from NVFP4 or MXFP4. It copies, and waits for the device.

    Args:
        gate_up: rows of gate and then of up, (E, 2 I, H); or E matrices (2 I, H), or E pairs (I, H), each with a global
            scale of its own. Without a gate (E, I, H). Global scales of gate and up of an expert may differ for
            "silu", which is linear in up: their ratio then multiplies the product of down.
        down: (E, H, I), or E matrices (H, I).
        activation: "silu" (SwiGLU), "clamped_swiglu" (that of gpt-oss, with alpha and limit: gate at most limit, up
            within ± limit, gate · sigmoid(alpha · gate) · (up + 1)), or "relu2" (relu², without a gate).
        gate_up_bias, down_bias: added to the products, (E, 2 I) in the order of the rows of gate_up, and (E, H).
        interleaved: whether rows of gate_up and its bias are gate, up, gate, up, as in gpt-oss.
        dtype: bfloat16 or float16, the dtype of x: kernels decode the 4-bit weights to it. float8_e4m3fn, on sm_90a:
            rows are quantized to FP8, each with a scale, before each product; if experts have few rows, these stay in
            16 bits. None: each call quantizes x to the format of the weights, for sm_100a, sm_103a and sm_120a.

    Raises:
        OperandError, OperandTypeError: tensors do not fit together, or global scales of gate and up differ.
    """
    function = ActivationFunction(activation, alpha, limit)
    if dtype is not None and dtype not in (*DTYPES, FP8):
        expected = "torch.bfloat16, torch.float16, torch.float8_e4m3fn or None"
        raise OperandTypeError.of("dtype of experts", got=dtype, expected=expected)
    first, first_factor = _stack("gate_up", gate_up)
    second, second_factor = _stack("down", down)
    _check_sizes(first, second, function, interleaved)
    first_factor, second_factor = _moved(first_factor, second_factor, function)
    biases = [
        _bias(name, bias, weight)
        for name, bias, weight in (("gate_up_bias", gate_up_bias, first), ("down_bias", down_bias, second))
    ]
    if interleaved:
        order = torch.arange(first.rows, device=first.device).view(-1, 2).t().reshape(-1)
        first = BlockScaledTensor(first.data[:, order], first.scale[:, order], first.global_scale, first.format)
        biases[0] = None if biases[0] is None else biases[0][:, order].contiguous()
    if dtype is None:
        weights = [
            BlockScaledTensor(as_bytes(x.data).contiguous(), to_blocked(x.scale), x.global_scale, x.format)
            for x in (first, second)
        ]
    elif function.halves == 2:
        weights = [prepare_weight(*_halves(first), dtype=dtype), prepare_weight(second, dtype=dtype)]
    else:
        weights = [prepare_weight(x, dtype=dtype) for x in (first, second)]
    return Experts(*weights, first_factor, second_factor, *biases, function)


def _stack(name: str, matrices: Matrices) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """A stack with row-major scales; and the factors (E, matrices), if the matrices have global scales of their own."""
    if isinstance(matrices, BlockScaledTensor):
        check_format(name, matrices, (NVFP4, MXFP4))
        if not matrices.is_batched:
            raise OperandError.of(name, got=f"data of {matrices.data.ndim} dimensions", expected="a stack (E, N, K)")
        scale = None if matrices.global_scale is None else matrices.global_scale.detach()
        return BlockScaledTensor(matrices.data, as_bytes(matrices.rowmajor_scale()), scale, matrices.format), None
    if not isinstance(matrices, (list, tuple)) or not matrices:
        expected = "a BlockScaledTensor, or one or two of each expert"
        raise OperandTypeError.of(name, got=f"{type(matrices).__name__}", expected=expected)
    groups = [x if isinstance(x, (list, tuple)) else (x,) for x in matrices]
    for i, group in enumerate(groups):
        _check_group(f"{name}[{i}]", group, groups[0])
    data = torch.stack([torch.cat([as_bytes(x.data) for x in group]) for group in groups])
    scale = torch.stack([torch.cat([as_bytes(x.rowmajor_scale()[0]) for x in group]) for group in groups])
    factors = None
    if groups[0][0].global_scale is not None:
        each = [torch.stack([x.global_scale.detach().reshape(()) for x in group]) for group in groups]
        factors = torch.stack(each)
    return BlockScaledTensor(data, scale, None, groups[0][0].format), factors


def _moved(
    first: torch.Tensor | None, second: torch.Tensor | None, function: ActivationFunction
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The factors (E,) of both products: gate's for the first, and up's relative to gate's times down's for the second.

    first: (E, matrices), those of gate_up. second: (E, 1), those of down.

    Raises:
        OperandError: factors of gate and up differ, and the activation is not linear in up.
    """
    if second is not None:
        second = second[:, 0].contiguous()
    if first is None:
        return None, second
    gate, up = first[:, 0].contiguous(), first[:, -1]
    unequal = (gate != up).nonzero().flatten().tolist()
    if not unequal:
        return gate, second
    if function.name != "silu":
        raise OperandError.of(
            f"global scales of gate and up of gate_up[{unequal[0]}]",
            got=" and ".join(map(str, first[unequal[0]].tolist())),
            expected=f"equal ones: {function.name} is not linear in up",
            hint="Quantize both with the larger amax's: quantize(…, global_scale=…).",
        )
    ratio = up / gate
    return gate, ratio if second is None else second * ratio


def _check_group(what: str, group: Sequence[Any], first: Sequence[Any]) -> None:
    """Raises unless the matrices of an expert are like those of the first expert."""
    for x in group:
        if not isinstance(x, BlockScaledTensor):
            raise OperandTypeError.of(what, got=type(x).__name__, expected="BlockScaledTensor")
        check_format(what, x, (NVFP4, MXFP4))
    got, want = (
        [(x.format.name, tuple(x.data.shape), x.global_scale is not None, x.device) for x in y] for y in (group, first)
    )
    if got != want or len(group) > 2 or any(x.is_batched for x in group):
        raise OperandError.of(what, got=got, expected=f"one or two matrices like those of the first expert: {want}")


def _check_sizes(first: Matrix, second: Matrix, function: ActivationFunction, interleaved: bool) -> None:
    """Raises unless the two stacks of weights fit together."""
    if function.halves == 1 and interleaved:
        raise OperandError.of("interleaved", got="True", expected=f"False: {function.name} has no gate")
    got = (first.batch, first.rows, first.k), (second.batch, second.rows, second.k)
    experts, hidden, inner = second.batch, second.rows, second.k
    want = (experts, function.halves * inner, hidden), got[1]
    if got != want:
        expected = f"(E, {'2 ' * (function.halves == 2)}I, H) and (E, H, I)"
        raise OperandError.of("shapes of gate_up and down", got=f"{got[0]} and {got[1]}", expected=expected)
    for what, one, two in (
        ("formats of gate_up and down", first.format.name, second.format.name),
        ("devices of gate_up and down", first.device, second.device),
    ):
        if one != two:
            raise OperandError.of(what, got=f"{one} and {two}", expected="the same")


def _bias(name: str, bias: torch.Tensor | None, weight: Matrix) -> torch.Tensor | None:
    """A copy of a bias in float32, contiguous, without a gradient."""
    if bias is None:
        return None
    check_tensor(name, bias, shapes=[(weight.batch, weight.rows)], device=weight.device)
    if not bias.is_floating_point():
        raise OperandTypeError.of(f"dtype of {name}", got=bias.dtype, expected="a floating-point dtype")
    return bias.detach().to(torch.float32, copy=True).contiguous()


def _halves(weight: Matrix) -> list[BlockScaledTensor]:
    """Gate and up, from a stack that holds both."""
    half = weight.rows // 2
    sides = slice(0, half), slice(half, None)
    return [
        BlockScaledTensor(weight.data[:, side], weight.scale[:, side], weight.global_scale, weight.format)
        for side in sides
    ]

"""``PackedExperts``: the experts of a mixture with NVFP4 or MXFP4 weights, run as one ``moe``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4, Format, as_bytes
from cute_nvfp4.nn.expert_modules import GATED
from cute_nvfp4.nn.explain import KernelChoice
from cute_nvfp4.nn.input_rules import takes_4_bits
from cute_nvfp4.nn.linear import NVFP4Linear, linear_class
from cute_nvfp4.nn.released import Rewritten, rewritten, unpacked_rowmajor
from cute_nvfp4.nn.shard import LinearShard
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.moe.experts import ActivationFunction, Experts, prepare_experts
from cute_nvfp4.ops.moe.layer import moe
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.runtime.backend import Backend, resolve
from cute_nvfp4.target import Target

if TYPE_CHECKING:
    from typing_extensions import Self

Stored = dict[tuple[int, str], tuple[str, dict[str, torch.Tensor]]]
"""The layout and small tensors of each expert's matrix, as ``NVFP4Linear.stored`` has them for a layer."""
STACKS = ("gate_up", "down")


class Stack(NamedTuple):
    """One matrix of every expert, as a checkpoint stores them.

    data: uint8 (E, N, K / 2). scale: uint8, row-major, (E, N, K / block). factor: None, or float32 (E, parts): the
    global scales of the parts of its rows (gate and up, or one).
    """

    data: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor | None

    @classmethod
    def of(cls, experts: list[list[BlockScaledTensor]]) -> Stack:
        """The stack of one or two matrices (N, K) of each expert; the rows of the second follow those of the first."""
        data = torch.stack([torch.cat([as_bytes(x.data) for x in parts]) for parts in experts])
        scale = torch.stack([torch.cat([as_bytes(x.rowmajor_scale()[0]) for x in parts]) for parts in experts])
        if experts[0][0].global_scale is None:
            return cls(data, scale, None)
        return cls(data, scale, torch.stack([torch.stack([x.global_scale.reshape(()) for x in y]) for y in experts]))


@dataclass(frozen=True)
class ExpertForm:
    """The properties of experts besides their weights. interleaved: whether gate and up alternate by rows."""

    format: Format = NVFP4
    activation: ActivationFunction = field(default_factory=ActivationFunction)
    interleaved: bool = False


class PackedExperts(torch.nn.Module):
    """Σ over a token's experts of weight · down(activation(gate_up(x))), called as transformers calls experts.

    Weights are buffers: ``gate_up_data`` (E, 2 I, H / 2) (without a gate (E, I, H / 2)) and ``gate_up_scale``,
    ``down_data`` (E, H, I / 2) and ``down_scale``, with row-major scales; ``…_factor`` and ``…_bias``. On a GPU, and on
    a simulated one, a call is one ``moe`` of experts that the first call, or ``prepare``, prepares: the host reads no
    value, and a CUDA graph may record it. Elsewhere exact torch runs, one expert after the other.

    input_rule: None leaves rows in 16 bits if kernels take them so (sm_90a, sm_120a); sm_100a quantizes them to the
    weights' format in any case. On sm_90a they always stay in 16 bits; on sm_120a also for "fp8" and "auto". backend:
    as for ``moe``.

    ``stored`` has the small tensors of each matrix that a checkpoint had, by expert and name (``nn.layouts``).
    ``shard`` is set if each rank has a part of I of every expert, or some of the experts (``nn.loaded_shards``);
    results are then added. ``first`` is the id of this rank's first expert.
    """

    shard: LinearShard | None = None
    first: int = 0
    _experts: Experts | None = None
    _lost: tuple[Rewritten | None, ...] = (None, None)
    _wanted: torch.dtype | None = None

    def __init__(
        self,
        gate_up: Stack,
        down: Stack,
        form: ExpertForm,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        input_rule: str | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.form, self.input_rule, self.backend = form, input_rule, backend
        self.num_experts, self.hidden = down.data.shape[:2]
        self.inner = 2 * down.data.shape[2]
        self.stored: Stored = {}
        for name, stack in zip(STACKS, (gate_up, down)):
            for part, tensor in zip(("data", "scale", "factor"), stack):
                self.register_buffer(f"{name}_{part}", tensor)
        self.register_buffer("gate_up_bias", gate_up_bias)
        self.register_buffer("down_bias", down_bias)
        want = (self.num_experts, form.activation.halves * self.inner, self.hidden // 2)
        if tuple(gate_up.data.shape) != want:
            raise OperandError.of("stack of gate and up", got=tuple(gate_up.data.shape), expected=want)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, H) from rows (T, H), their experts' ids (T, k) and weights (T, k); ids of no expert are left out."""
        target = resolve(self.backend, hidden_states.device)
        if target.backend == "reference":
            y = self._by_torch(hidden_states, top_k_index, top_k_weights)
        else:
            experts = self._made(target, hidden_states.dtype)
            y = moe(hidden_states, top_k_index, top_k_weights, experts, offset=self.first, backend=self.backend)
        return y if self.shard is None else self.shard.summed(y)

    def prepare(self, dtype: torch.dtype = torch.bfloat16, *, release: bool = True) -> Self:
        """Prepares the experts now if their device has a kernel, else when they move to one. Returns the module.

        dtype: that of rows in 16 bits. release: frees the checkpoint's bytes; ``state_dict`` restores them.
        """
        self._wanted = dtype if release else None
        target = resolve(self.backend, self._device())
        if target.backend != "reference":
            made = self._made(target, dtype)
            if release and self._buffers["down_data"] is not None:
                self._release(made)
        return self

    def explain_backend(self, rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> KernelChoice:
        """What a call with ``rows`` rows of ``dtype`` runs, and why."""
        target = resolve(self.backend, self._device())
        if target.backend == "reference":
            return KernelChoice("reference", "exact torch", "no GPU, and no simulator: expert by expert")
        name = target.arch.name
        if self._quantizes(target):
            return KernelChoice(
                target.backend, "moe", f"rows quantized to {self.form.format.name} by each call, {name}"
            )
        return KernelChoice(target.backend, "moe", f"rows in 16 bits, weights prepared for them, {name}")

    def matrix(self, expert: int, name: str) -> NVFP4Linear:
        """One matrix of an expert, "gate_proj", "up_proj" or "down_proj", as a layer, with the small tensors it had."""
        return next(layer for (i, part), layer in self.matrices() if (i, part) == (expert, name))

    def matrices(self) -> Iterator[tuple[tuple[int, str], NVFP4Linear]]:
        """All matrices as layers, by expert and name; raises for interleaved rows, which layers cannot have."""
        if self.form.interleaved:
            raise OperandError.of("experts", got="gate and up in interleaved rows", expected="gate, then up")
        names = GATED if self.form.activation.halves == 2 else GATED[1:]
        first, second = self.stacks()
        for i in range(self.num_experts):
            weights = self._separate(first, i) + _parts(second, i, self.form.format)
            for name, weight in zip(names, weights):
                layer = linear_class(self.form.format)(weight, input_rule=None)
                layer.stored = self.stored.get((i, name), ("", {}))
                yield (i, name), layer

    def stacks(self) -> tuple[Stack, Stack]:
        """The stacks of the first and of the second product, as a checkpoint stores them."""
        if self._buffers["down_data"] is not None:
            return tuple(
                Stack(*(self._buffers[f"{name}_{part}"] for part in ("data", "scale", "factor"))) for name in STACKS
            )
        found = []
        for name, lost in zip(STACKS, self._lost):
            weight = getattr(self._experts, name)
            if isinstance(weight, PreparedWeight):
                data, scale = unpacked_rowmajor(weight, lost, self.form.format)
            else:
                data, scale = as_bytes(weight.data), as_bytes(weight.rowmajor_scale())
            data, scale = (x.reshape(self.num_experts, -1, x.shape[-1]) for x in (data, scale))
            if name == "gate_up" and self.form.interleaved:
                # rows of gate and then of up become interleaved again
                data, scale = (x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for x in (data, scale))
            found.append(Stack(data, scale, self._buffers[f"{name}_factor"]))
        return tuple(found)

    def _separate(self, stack: Stack, expert: int) -> list[BlockScaledTensor]:
        """Gate and up of an expert, or its one matrix, even if they have no global scales."""
        if stack.factor is not None:
            return _parts(stack, expert, self.form.format)
        halves = (x[expert].split(self.inner) for x in (stack.data, stack.scale))
        return [BlockScaledTensor(data, scale, format=self.form.format) for data, scale in zip(*halves)]

    def _quantizes(self, target: Target) -> bool:
        """Whether each call quantizes rows."""
        generation = target.arch.generation
        return generation == "sm100" or (generation == "sm120" and takes_4_bits(self.input_rule))

    def _made(self, target: Target, dtype: torch.dtype) -> Experts:
        """The prepared experts for rows of ``dtype``; they are made again if they are for another dtype."""
        wanted = None if self._quantizes(target) else dtype
        made = self._experts
        if made is not None and made.dtype is wanted:
            return made
        if self._buffers["down_data"] is None:
            self._restore()
        made = self._experts = self._prepared(wanted)
        if self._wanted is not None:
            self._release(made)
        return made

    def _prepared(self, dtype: torch.dtype | None) -> Experts:
        stacks = self.stacks()
        function = self.form.activation
        return prepare_experts(
            *(_matrices(stack, self.form.format) for stack in stacks),
            activation=function.name,
            alpha=function.alpha,
            limit=function.limit,
            gate_up_bias=self._buffers["gate_up_bias"],
            down_bias=self._buffers["down_bias"],
            interleaved=self.form.interleaved,
            dtype=dtype,
        )

    def _release(self, made: Experts) -> None:
        """Frees the checkpoint's bytes; keeps the prepared experts, and the blocks that packing rewrote."""
        lost = []
        for name, stack in zip(STACKS, self.stacks()):
            weight = getattr(made, name)
            data, scale = stack.data, stack.scale
            if name == "gate_up" and self.form.interleaved:
                data, scale = (x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) for x in (data, scale))
            prepared = isinstance(weight, PreparedWeight)
            exact = BlockScaledTensor(data, scale, format=self.form.format)
            lost.append(rewritten(exact, weight) if prepared else None)
        self._lost = tuple(lost)
        for name in STACKS:
            self._buffers[f"{name}_data"] = self._buffers[f"{name}_scale"] = None

    def _restore(self) -> None:
        """Replaces the prepared experts by the checkpoint's bytes."""
        if self._buffers["down_data"] is None:
            for name, stack in zip(STACKS, self.stacks()):
                self._buffers[f"{name}_data"], self._buffers[f"{name}_scale"] = stack.data, stack.scale
        self._experts, self._lost = None, (None, None)

    def _device(self) -> torch.device:
        data = self._buffers["down_data"]
        return self._experts.device if data is None else data.device

    def decoded(self, stack: Stack, expert: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values (N, K) of an expert's matrices in one of the stacks."""
        return torch.cat([x.dequantize(dtype) for x in _parts(stack, expert, self.form.format)])

    def _by_torch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The result by exact torch, expert after expert, with weights decoded to the dtype of x."""
        stacks = self.stacks()
        biases = [self._buffers[f"{name}_bias"] for name in STACKS]
        out = torch.zeros_like(x)
        ids = ids - self.first
        for expert in ids.unique().tolist():
            if not 0 <= expert < self.num_experts:
                continue
            rows, places = torch.where(ids == expert)
            first, second = (self.decoded(stack, expert, x.dtype) for stack in stacks)
            inner, bias = torch.nn.functional.linear(x[rows], first), biases[0]
            inner = inner if bias is None else inner + bias[expert].to(inner.dtype)
            if self.form.interleaved:
                inner = torch.cat((inner[:, 0::2], inner[:, 1::2]), dim=-1)
            y = torch.nn.functional.linear(self.form.activation(inner), second)
            y = y if biases[1] is None else y + biases[1][expert].to(y.dtype)
            out.index_add_(0, rows, (y * weights[rows, places, None]).to(out.dtype))
        return out

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._restore()
        super()._apply(fn, recurse)
        return self if self._wanted is None else self.prepare(self._wanted)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._buffers["down_data"] is None:
            for name, stack in zip(STACKS, self.stacks()):
                destination[f"{prefix}{name}_data"], destination[f"{prefix}{name}_scale"] = stack.data, stack.scale

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._restore()
        super()._load_from_state_dict(*args, **options)
        if self._wanted is not None:
            self.prepare(self._wanted)

    def extra_repr(self) -> str:
        """The text that ``repr`` shows between parentheses."""
        sizes = f"{self.num_experts} experts, hidden {self.hidden}, inner {self.inner}"
        return f"{sizes}, {self.form.format.name}, {self.form.activation.name}, backend={self.backend!r}"


def _matrices(stack: Stack, format: Format) -> Any:
    """A stack as ``prepare_experts`` takes it: if there are global scales, a list of each expert's matrices."""
    if stack.factor is None:
        return BlockScaledTensor(stack.data, stack.scale, format=format)
    return [_parts(stack, i, format) for i in range(len(stack.data))]


def _parts(stack: Stack, expert: int, format: Format) -> list[BlockScaledTensor]:
    """The matrices of an expert in a stack, each with its global scale."""
    if stack.factor is None:
        return [BlockScaledTensor(stack.data[expert], stack.scale[expert], format=format)]
    factors = stack.factor[expert]
    halves = (x[expert].chunk(len(factors)) for x in (stack.data, stack.scale))
    return [BlockScaledTensor(*parts, format) for parts in zip(*halves, factors)]

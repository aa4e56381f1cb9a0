"""Modules that hold the tensors of a checkpoint's layer as the file stores them, until all of them are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP4
from cute_nvfp4.nn.checkpoint import headers
from cute_nvfp4.nn.expert_modules import GATED, activation_of, first_stack
from cute_nvfp4.nn.experts import STACKS, ExpertForm, PackedExperts, Stack
from cute_nvfp4.nn.layouts import CheckpointLayer, Layout, TensorInfo, aligned, quantized_layers, read_layer, tensors_of
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.nn.loaded_shards import Cut, local
from cute_nvfp4.nn.shard import LinearShard
from cute_nvfp4.runtime.backend import Backend

_EXPERTS = ("gate_up_proj", "down_proj")
_BLOCKS, _SCALES = "_blocks", "_scales"
"""The suffixes of a stack's codes (E, N, K / 32, 16) and scales (E, N, K / 32), both uint8, in gpt-oss's files."""
_VECTORS = {"columns": ("bias", "weight_scale"), "rows": ("pre_quant_scale",)}
"""The vectors that belong to the rows or columns of W that a rank has; FP8 weights may have such a ``weight_scale``."""


@dataclass(frozen=True)
class StoredLayers:
    """The layers that the headers of a checkpoint's files describe.

    packed, fp8: layers in 4 bits, and in FP8. tensors: each layer's tensors by name. stacks: modules of experts whose
    stacks are in MXFP4, as in gpt-oss.
    """

    packed: dict[str, Layout]
    fp8: tuple[str, ...]
    tensors: dict[str, dict[str, TensorInfo]]
    stacks: dict[str, dict[str, TensorInfo]]

    @classmethod
    def read(cls, files: Iterable[str | Path]) -> StoredLayers:
        """The layers of safetensors files; only their headers are read.

        FP8 layers, which mixed checkpoints have, are those with a weight of float8_e4m3fn and its scale.
        """
        found = headers(files)
        packed = dict(quantized_layers(found))
        weights = (n for n, info in found.items() if n.endswith(".weight") and info.dtype is torch.float8_e4m3fn)
        fp8 = tuple(name.removesuffix(".weight") for name in weights if f"{name}_scale" in found)
        tensors: dict[str, dict[str, TensorInfo]] = {name: {} for name in (*packed, *fp8)}
        marks = tuple(f".{name}{_BLOCKS}" for name in _EXPERTS)
        stacks: dict[str, dict[str, TensorInfo]] = {n.rpartition(".")[0]: {} for n in found if n.endswith(marks)}
        for name, info in found.items():
            module, _, part = name.rpartition(".")
            for kind in (tensors, stacks):
                if module in kind:
                    kind[module][part] = info
        return cls(packed, fp8, tensors, stacks)


class StoredLinear(torch.nn.Module):
    """The tensors of a linear layer as a file stores them, by its names; it does not multiply.

    layout: that of 4 bits, or None for FP8, whose scale multiplies (one value, or one for each row).

    The weight and its blocks' scales, of which a rank may read a shard, are parameters, which loaders distribute
    (``torch.distributed.tensor``). The small tensors are buffers, which every rank has whole.
    """

    def __init__(self, name: str, layout: Layout | None, parts: Mapping[str, TensorInfo]) -> None:
        super().__init__()
        self.name, self.layout = name, layout
        cut = ("weight",) if layout is None else (layout.weight, "weight_scale")
        for part, info in parts.items():
            tensor = torch.empty(info.shape, dtype=info.dtype, device="meta")
            if part in cut:
                self.register_parameter(part, torch.nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(part, tensor)
        weight = parts.get("weight" if layout is None else layout.weight)
        # a file without it is refused when the layer is made
        n, k = weight.shape if weight is not None and len(weight.shape) == 2 else (0, 0)
        self.out_features, self.in_features = n, k if layout is None else k * layout.format.elements_per_byte

    @property
    def parts(self) -> set[str]:
        """The names of its tensors."""
        return {*self._parameters, *self._buffers}

    @property
    def cut(self) -> Cut | None:
        """The part of the layer that this rank has; None if it has all."""
        return Cut.of(self._parameters.values())

    def made(self, old: torch.nn.Linear, input_rule: str | None, backend: Backend) -> torch.nn.Module:
        """The layer that multiplies in the place of ``old``, whose sizes it has, or this rank's shard of it.

        It is an ``NVFP4Linear`` or ``MXFP4Linear``; for FP8 it is torch's linear, decoded to the dtype of ``old``.

        Raises:
            OperandError: tensors were not loaded, or do not fit ``old``.
        """
        if self.layout is None:
            return self._decoded(self._tensors(), old, (old.out_features, old.in_features))
        return self.read((old.out_features, old.in_features)).linear(input_rule=input_rule, backend=backend)

    def read(self, want: tuple[int, int]) -> CheckpointLayer:
        """The 4-bit layer with the sizes (N, K) ``want``, or this rank's shard of it."""
        want = want if self.cut is None else self.cut.sizes(*want)
        layer = read_layer(self.name, self.layout, self._tensors())
        if (layer.weight.rows, layer.weight.k) != want:
            raise OperandError.of(f"weight of {self.name}", got=(layer.weight.rows, layer.weight.k), expected=want)
        return layer

    def values(self, old: torch.nn.Linear) -> torch.Tensor:
        """The values of the weight in the dtype of ``old``, multiplied by the layer's input scale."""
        if self.layout is None:
            return self._decoded(self._tensors(), old, (old.out_features, old.in_features)).weight.detach()
        layer = self.read((old.out_features, old.in_features))
        wide = layer.weight.dequantize()
        return (wide if layer.input_scale is None else wide * layer.input_scale.float()).to(old.weight.dtype)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors, cut = {**self._parameters, **self._buffers}, self.cut
        tensors = {part: local(x) for part, x in tensors.items()}
        missing = [part for part, x in tensors.items() if x.is_meta]
        if missing:
            raise OperandError.of(f"tensors of {self.name}", got=f"no {missing}", expected="all that the file names")
        for part in () if cut is None else _VECTORS[cut.axis]:
            if part in self._buffers and tensors[part].numel() > 1:
                tensors[part] = cut.mine(tensors[part].flatten())
        return tensors

    def _decoded(self, tensors: dict[str, torch.Tensor], old: torch.nn.Linear, want: tuple) -> torch.nn.Linear:
        weight, scale = tensors["weight"], tensors["weight_scale"].float()
        want = want if self.cut is None else self.cut.sizes(*want)
        if tuple(weight.shape) != want or scale.numel() not in (1, want[0]):
            got = f"weight {tuple(weight.shape)}, scale {tuple(scale.shape)}"
            raise OperandError.of(f"FP8 layer {self.name}", got=got, expected=f"{want}, one number or one a row")
        made = torch.nn.Linear(want[1], want[0], bias="bias" in tensors, device="meta", dtype=old.weight.dtype)
        values = (weight.float() * scale.reshape(-1, 1)).to(old.weight.dtype)
        made.weight = torch.nn.Parameter(values, requires_grad=False)
        if "bias" in tensors:
            made.bias = torch.nn.Parameter(tensors["bias"].to(old.weight.dtype), requires_grad=False)
        return made


class StoredExperts(torch.nn.Module):
    """The tensors of experts as a file stores them: each expert is a child with its layers.

    old: the module that has all experts in two tensors. mine: the indices of this rank's experts; None: all.
    """

    def __init__(self, name: str, old: torch.nn.Module, mine: range | None = None) -> None:
        super().__init__()
        self.name, self.first = name, first_stack(old)
        self.mine = range(old.down_proj.shape[0]) if mine is None else mine
        self.num_experts = len(self.mine)
        self.names = GATED if self.first == "gate_up_proj" else GATED[1:]
        # not a child: its parameters do not belong to the checkpoint
        object.__setattr__(self, "old", old)

    def add(self, expert: str, projection: str, layer: StoredLinear) -> None:
        """Adds a layer of an expert, if this rank has the expert."""
        if int(expert) not in self.mine:
            return
        if expert not in self._modules:
            self.add_module(expert, torch.nn.ModuleDict())
        self._modules[expert][projection] = layer

    def made(self, input_rule: str | None, backend: Backend) -> torch.nn.Module:
        """The experts that multiply.

        They are in 4 bits if all of them are, in one layout and with nothing but weights; otherwise they are decoded
        into ``old``, in its dtype.

        Raises:
            OperandError: the file lacks experts or layers, or they do not fit.
        """
        count, hidden, inner = self.old.down_proj.shape
        layers: list[list[StoredLinear]] = []
        for i in self.mine:
            found = dict(self._modules[str(i)].items()) if str(i) in self._modules else {}
            missing = [name for name in self.names if name not in found]
            if missing:
                got = f"no {missing} of expert {i} in 4 bits or FP8"
                raise OperandError.of(f"experts {self.name}", got=got, expected="all layers of all experts")
            layers.append([found[name] for name in self.names])
        sizes = [(inner, hidden)] * (len(self.names) - 1) + [(hidden, inner)]
        layouts = {layer.layout for row in layers for layer in row}
        parts = {part for row in layers for layer in row for part in layer.parts}
        if "bias" in parts:
            raise OperandError.of(
                f"experts {self.name}", got="biases in the file", expected="none, as the model has none"
            )
        cut = layers[0][-1].cut
        if len(layouts) > 1 or None in layouts or "pre_quant_scale" in parts:
            if cut is not None or len(self.mine) < count:
                got, hint = "experts of several formats, or scaled along K, which are decoded", "Load in one process."
                raise OperandError.of(f"shards of {self.name}", got=got, expected="4 bits of one layout", hint=hint)
            return self._decoded(layers, sizes)
        read = [[layer.read(size) for layer, size in zip(row, sizes)] for row in layers]
        form = ExpertForm(next(iter(layouts)).format, activation_of(self.old))
        stacks = (Stack.of([[x.weight for x in row[part]] for row in read]) for part in (slice(-1), slice(-1, None)))
        made = PackedExperts(*stacks, form, input_rule=input_rule, backend=backend)
        made.shard, made.first = None if cut is None else cut.shard(), self.mine.start
        if len(self.mine) < count:
            made.shard = LinearShard("experts", dist.group.WORLD)
        for i, row in enumerate(read):
            made.stored |= {(i, name): (x.convention, x.stored) for name, x in zip(self.names, row)}
        return made

    def _decoded(self, layers: list[list[StoredLinear]], sizes: list[tuple[int, int]]) -> torch.nn.Module:
        """The 16-bit module, with every expert's values."""
        old, dtype = self.old, self.old.down_proj.dtype
        like = [torch.nn.Linear(k, n, device="meta", dtype=dtype) for n, k in sizes]
        values = [[layer.values(one) for layer, one in zip(row, like)] for row in layers]
        firsts = torch.stack([torch.cat(row[:-1]) for row in values])
        for name, stack in ((self.first, firsts), ("down_proj", torch.stack([row[-1] for row in values]))):
            setattr(old, name, torch.nn.Parameter(stack, requires_grad=False))
        return old


class StoredStacks(torch.nn.Module):
    """gpt-oss's experts as its files store them.

    ``gate_up_proj`` and ``down_proj`` each have ``_blocks``, ``_scales`` and ``_bias``; rows of gate and up alternate.
    """

    def __init__(self, name: str, old: torch.nn.Module, parts: Mapping[str, TensorInfo]) -> None:
        super().__init__()
        self.name, self.activation = name, activation_of(old)
        self.interleaved = not getattr(old, "is_concatenated", True)
        sizes = [tuple(getattr(old, part).shape) for part in _EXPERTS]
        self.sizes = [(e, k, n) if getattr(old, "is_transposed", False) else (e, n, k) for e, n, k in sizes]
        wanted = {f"{x}{y}" for x in _EXPERTS for y in (_BLOCKS, _SCALES)}
        missing = sorted(wanted - parts.keys())
        if missing:
            raise OperandError.of(f"experts {name}", got=f"no {missing}", expected="codes and scales of both stacks")
        for part in sorted(wanted | {f"{x}_bias" for x in _EXPERTS}):
            info = parts.get(part)
            self.register_buffer(
                part, None if info is None else torch.empty(info.shape, dtype=info.dtype, device="meta")
            )

    def made(self, input_rule: str | None, backend: Backend) -> PackedExperts:
        """The experts that multiply.

        Raises:
            OperandError: tensors were not loaded, or do not fit the model.
        """
        missing = [part for part, x in self.named_buffers() if x.is_meta]
        if missing:
            raise OperandError.of(f"tensors of {self.name}", got=f"no {missing}", expected="all that the file names")
        stacks = []
        for name, (experts, n, k) in zip(_EXPERTS, self.sizes):
            blocks, scales = self._buffers[f"{name}{_BLOCKS}"], self._buffers[f"{name}{_SCALES}"]
            want = (experts, n, k // MXFP4.block, MXFP4.block // 2)
            got = tuple(blocks.shape), tuple(scales.shape)
            if got != (want, want[:3]) or blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
                got = f"{got[0]}, scales {got[1]}, {blocks.dtype}, {scales.dtype}"
                raise OperandError.of(f"{name} of {self.name}", got=got, expected=f"{want}, {want[:3]}, torch.uint8")
            stacks.append(Stack(aligned(blocks.flatten(-2).contiguous()), scales.contiguous(), None))
        biases = {f"{stack}_bias": self._buffers[f"{name}_bias"] for stack, name in zip(STACKS, _EXPERTS)}
        form = ExpertForm(MXFP4, self.activation, self.interleaved)
        return PackedExperts(*stacks, form, **biases, input_rule=input_rule, backend=backend)


def tensors_of_experts(experts: PackedExperts, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of experts, by the names within their module.

    MXFP4 experts with alternating rows, or with biases, get those of gpt-oss's files; others get those of ``layout``,
    expert by expert.
    """
    form, found = experts.form, {}
    if form.format is MXFP4 and (form.interleaved or experts.down_bias is not None):
        for name, short, stack in zip(_EXPERTS, STACKS, experts.stacks()):
            blocks = stack.data.unflatten(-1, (-1, MXFP4.block // 2)).contiguous()
            found |= {f"{name}{_BLOCKS}": blocks, f"{name}{_SCALES}": stack.scale.contiguous()}
            bias = experts._buffers[f"{short}_bias"]
            found |= {} if bias is None else {f"{name}_bias": bias}
        return found
    for (expert, name), layer in experts.matrices():
        found |= {f"{expert}.{name}.{part}": x for part, x in tensors_of(layer, layout).items()}
    return found


def linears(model: torch.nn.Module) -> dict[str, NVFP4Linear]:
    """The model's 4-bit layers, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}

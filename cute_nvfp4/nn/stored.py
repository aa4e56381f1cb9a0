"""Modules that have the tensors of a checkpoint's layer as the file has them, until all of them are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.experts import PROJECTIONS, NVFP4Experts, join_of
from cute_nvfp4.nn.layouts import Layout, quantized_layers, read_layer
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.runtime.backend import Backend

_DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class TensorInfo:
    """The shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredLayers:
    """What the headers of a checkpoint's files say: layers in NVFP4 and in FP8, and each one's tensors by name."""

    nvfp4: dict[str, Layout]
    fp8: tuple[str, ...]
    tensors: dict[str, dict[str, TensorInfo]]

    @classmethod
    def read(cls, files: Iterable[str | Path]) -> StoredLayers:
        """The layers of safetensors files; only their headers are read.

        FP8 layers, of which mixed checkpoints have some, are those with a weight of float8_e4m3fn and its scale.
        """
        from safetensors import safe_open

        found: dict[str, TensorInfo] = {}
        for file in files:
            with safe_open(str(file), framework="pt") as reader:
                for name in reader.keys():
                    part = reader.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is not None:
                        found[name] = TensorInfo(tuple(part.get_shape()), dtype)
        nvfp4 = dict(quantized_layers(found))
        weights = (n for n, info in found.items() if n.endswith(".weight") and info.dtype is torch.float8_e4m3fn)
        fp8 = tuple(name.removesuffix(".weight") for name in weights if f"{name}_scale" in found)
        tensors: dict[str, dict[str, TensorInfo]] = {name: {} for name in (*nvfp4, *fp8)}
        for name, info in found.items():
            layer, _, part = name.rpartition(".")
            if layer in tensors:
                tensors[layer][part] = info
        return cls(nvfp4, fp8, tensors)


class StoredLinear(torch.nn.Module):
    """A linear layer's tensors as a file has them, buffers with its names; it multiplies nothing.

    layout: that of NVFP4, or None for FP8, whose scale multiplies (one number, or one for each row).
    """

    def __init__(self, name: str, layout: Layout | None, parts: Mapping[str, TensorInfo]) -> None:
        super().__init__()
        self.name, self.layout = name, layout
        for part, info in parts.items():
            self.register_buffer(part, torch.empty(info.shape, dtype=info.dtype, device="meta"))

    def made(self, old: torch.nn.Linear, input_rule: str | None, backend: Backend) -> torch.nn.Module:
        """The layer that multiplies, in the place of ``old``, which has its sizes: an ``NVFP4Linear``; for FP8
        torch's linear, decoded to the dtype of ``old``.

        Raises:
            OperandError: tensors that were not loaded, or that do not fit ``old``.
        """
        tensors = dict(self.named_buffers())
        missing = [part for part, x in tensors.items() if x.is_meta]
        if missing:
            raise OperandError.of(f"tensors of {self.name}", got=f"no {missing}", expected="all that the file names")
        want = (old.out_features, old.in_features)
        if self.layout is None:
            return self._decoded(tensors, old, want)
        layer = read_layer(self.name, self.layout, tensors)
        if (layer.weight.rows, layer.weight.k) != want:
            raise OperandError.of(f"weight of {self.name}", got=(layer.weight.rows, layer.weight.k), expected=want)
        return layer.linear(input_rule=input_rule, backend=backend)

    def _decoded(self, tensors: dict[str, torch.Tensor], old: torch.nn.Linear, want: tuple) -> torch.nn.Linear:
        weight, scale = tensors["weight"], tensors["weight_scale"].float()
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
    """Experts' tensors as a file has them, each expert a child with its layers; ``old`` has all of them in two."""

    def __init__(self, name: str, old: torch.nn.Module) -> None:
        super().__init__()
        self.name, self.count, self.sizes = name, old.gate_up_proj.shape[0], tuple(old.down_proj.shape[1:])
        self.dtype = old.down_proj.dtype
        self.join = join_of(old)

    def add(self, expert: str, projection: str, layer: StoredLinear) -> None:
        """Takes in a layer of an expert."""
        if expert not in self._modules:
            self.add_module(expert, torch.nn.ModuleDict())
        self._modules[expert][projection] = layer

    def made(self, input_rule: str | None, backend: Backend) -> NVFP4Experts:
        """The experts that multiply.

        Raises:
            OperandError: experts or layers that the file lacks, or that do not fit.
        """
        hidden, inner = self.sizes
        experts = []
        for i in range(self.count):
            layers = dict(self._modules[str(i)].items()) if str(i) in self._modules else {}
            missing = [name for name in PROJECTIONS if name not in layers]
            if missing:
                got = f"no {missing} of expert {i} in NVFP4 or FP8"
                raise OperandError.of(f"experts {self.name}", got=got, expected="all layers of all experts")
            sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
            olds = {name: torch.nn.Linear(*size, device="meta", dtype=self.dtype) for name, size in sizes.items()}
            experts.append({name: layers[name].made(olds[name], input_rule, backend) for name in PROJECTIONS})
        return NVFP4Experts(experts, self.join)


def linears(model: torch.nn.Module) -> dict[str, NVFP4Linear]:
    """The model's NVFP4 layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}

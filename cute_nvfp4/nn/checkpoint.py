"""NVFP4 checkpoints in safetensors, as published by NVIDIA's ModelOpt and by compressed-tensors (LLM Compressor).

Both store a linear layer ``X`` with W (N, K) as packed E2M1, low nibble first, and row-major E4M3 scales; they differ
in names, and in whether a global scale multiplies or divides:

| | ModelOpt | compressed-tensors |
|---|---|---|
| E2M1, uint8 (N, K/2) | X.weight | X.weight_packed |
| scales, float8_e4m3fn (N, K/16) | X.weight_scale | X.weight_scale |
| global scale, float32, one element | X.weight_scale_2, multiplies | X.weight_global_scale, divides |
| global scale of activations, optional | X.input_scale, multiplies | X.input_global_scale, divides |
| (K,) to multiply activations by, optional | X.pre_quant_scale | |
| (N,), optional | X.bias | X.bias |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.runtime.backend import Backend


@dataclass(frozen=True)
class _Convention:
    """The names of a publisher's tensors, and whether its global scales divide."""

    name: str
    weight: str
    global_scale: str
    input_global_scale: str
    divides: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of everything that belongs to a layer."""
        return self.weight, "weight_scale", self.global_scale, self.input_global_scale, "pre_quant_scale", "bias"


_CONVENTIONS = (
    _Convention("modelopt", "weight", "weight_scale_2", "input_scale", divides=False),
    _Convention("compressed-tensors", "weight_packed", "weight_global_scale", "input_global_scale", divides=True),
)
_INDEX = "model.safetensors.index.json"
_ALIGNMENT = 16


@dataclass(frozen=True)
class CheckpointLayer:
    """A linear layer of a checkpoint. Global scales multiply, whatever the file's did."""

    name: str
    convention: str
    weight: BlockScaledTensor
    input_global_scale: torch.Tensor | None
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def linear(self, *, input_rule: str | None = "max", backend: Backend = "auto") -> NVFP4Linear:
        """The layer as a module."""
        return NVFP4Linear(
            self.weight,
            self.bias,
            input_rule=input_rule,
            input_global_scale=self.input_global_scale,
            input_scale=self.input_scale,
            backend=backend,
        )


def read_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Iterator[CheckpointLayer]:
    """The NVFP4 layers of a checkpoint, one at a time, in order of their names.

    path: a .safetensors file, a ``model.safetensors.index.json``, or a folder with either.

    Raises:
        OperandError, OperandTypeError: tensors that are missing, or not of the shapes and dtypes in this module's
            table. A quantized layer is never left out quietly.
    """
    with _Tensors(path, device) as tensors:
        for name, convention in _quantized_layers(tensors.names):
            yield _layer(name, convention, tensors)


def load_checkpoint(
    model: torch.nn.Module,
    path: str | Path,
    *,
    input_rule: str | None = "max",
    backend: Backend = "auto",
    ignore: Sequence[str] = (),
) -> list[str]:
    """Puts a checkpoint into ``model``: replaces its quantized linear layers by ``NVFP4Linear``, and copies the rest.

    The model's names are the checkpoint's. Returns the names of the replaced layers. Every tensor of the checkpoint
    must find its place, unless its name matches a pattern of ``ignore`` (as in a shell: "*.k_scale"), and every
    parameter of the model its tensor, unless it is tied to one that has. Otherwise an error says which did not,
    before anything is changed.
    """
    modules = dict(model.named_modules())
    state = model.state_dict(keep_vars=True)
    device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
    with _Tensors(path, device) as tensors:
        names = [name for name in tensors.names if not any(fnmatchcase(name, pattern) for pattern in ignore)]
        quantized = dict(_quantized_layers(names))
        taken = {f"{layer}.{part}" for layer, convention in quantized.items() for part in convention.parts}
        plain = [name for name in names if name not in taken]
        _check_places(quantized, plain, modules, state)
        layers = {name: _layer(name, convention, tensors) for name, convention in quantized.items()}
        values = {name: tensors.read(name) for name in plain}
    for name, layer in layers.items():
        _check_fits(modules[name], layer)
    for name, value in values.items():
        if value.shape != state[name].shape:
            raise OperandError.of(name, got=f"shape {tuple(value.shape)}", expected=tuple(state[name].shape))
    linears = {name: layer.linear(input_rule=input_rule, backend=backend) for name, layer in layers.items()}
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(value)
    for name, linear in linears.items():
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, linear.train(modules[name].training))
    return list(linears)


class _Tensors:
    """The tensors of one or several safetensors files by name, read when asked for."""

    def __init__(self, path: str | Path, device: torch.device | str) -> None:
        self._files = _files(Path(path))
        self._device = str(device)
        self._stack = ExitStack()
        self._readers: dict[str, Callable[[str], torch.Tensor]] = {}

    def __enter__(self) -> _Tensors:
        from safetensors import safe_open

        for file in self._files:
            reader = self._stack.enter_context(safe_open(str(file), framework="pt", device=self._device))
            for name in reader.keys():
                if name in self._readers:
                    raise OperandError.of("checkpoint", got=f"{name!r} in two files", expected="each name once")
                self._readers[name] = reader.get_tensor
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        return sorted(self._readers)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._readers:
            raise OperandError.of("checkpoint", got=f"no tensor {name!r}", expected="one, beside its layer's")
        return self._readers[name](name)

    def read_if_present(self, name: str) -> torch.Tensor | None:
        return self.read(name) if name in self._readers else None


def _files(path: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint."""
    if path.is_dir():
        if (path / _INDEX).exists():
            path = path / _INDEX
        else:
            found = sorted(path.glob("*.safetensors"))
            if not found:
                raise OperandError.of("checkpoint", got=str(path), expected="a folder with .safetensors files")
            return found
    if path.name.endswith(".index.json"):
        names = json.loads(path.read_text())["weight_map"].values()
        return [path.parent / name for name in sorted(set(names))]
    return [path]


def _quantized_layers(names: list[str]) -> Iterator[tuple[str, _Convention]]:
    """Layers that have the global scale of either convention."""
    for name in names:
        for convention in _CONVENTIONS:
            suffix = f".{convention.global_scale}"
            if name.endswith(suffix):
                yield name.removesuffix(suffix), convention


def _layer(name: str, convention: _Convention, tensors: _Tensors) -> CheckpointLayer:
    data = tensors.read(f"{name}.{convention.weight}")
    scale = tensors.read(f"{name}.weight_scale")
    for what, tensor, dtype in (("weight", data, torch.uint8), ("weight_scale", scale, NVFP4.scale_dtype)):
        if tensor.dtype is not dtype:
            raise OperandTypeError.of(f"{what} of {name}", got=tensor.dtype, expected=dtype)
    global_scale = tensors.read(f"{name}.{convention.global_scale}")
    input_global_scale = tensors.read_if_present(f"{name}.{convention.input_global_scale}")
    return CheckpointLayer(
        name,
        convention.name,
        BlockScaledTensor(
            # a file need not align its tensors
            data if data.data_ptr() % _ALIGNMENT == 0 else data.clone(),
            scale.view(torch.uint8),
            _multiplier(f"{name}, weights", global_scale, convention),
        ),
        None if input_global_scale is None else _multiplier(f"{name}, inputs", input_global_scale, convention),
        tensors.read_if_present(f"{name}.pre_quant_scale"),
        tensors.read_if_present(f"{name}.bias"),
    )


def _multiplier(what: str, value: torch.Tensor, convention: _Convention) -> torch.Tensor:
    """A stored global scale as the number that multiplies."""
    if value.numel() != 1:
        raise OperandError.of(f"global scale of {what}", got=f"shape {tuple(value.shape)}", expected="one element")
    value = value.to(torch.float32).reshape(())
    if not (torch.isfinite(value) and value > 0):
        raise OperandError.of(f"global scale of {what}", got=float(value), expected="a positive number")
    return 1.0 / value if convention.divides else value


def _check_places(
    quantized: dict[str, _Convention], plain: list[str], modules: dict[str, torch.nn.Module], state: dict
) -> None:
    """Raises unless every tensor of the checkpoint has a place in the model, and the other way round."""
    for name in quantized:
        if not isinstance(modules.get(name), torch.nn.Linear):
            got = type(modules[name]).__name__ if name in modules else "no such module"
            raise OperandError.of(f"module {name!r}", got=got, expected="torch.nn.Linear")
    replaced = {name for layer in quantized for name in state if name.startswith(f"{layer}.")}
    unknown = [name for name in plain if name not in state]
    present = {id(state[name]) for name in plain if name in state}
    missing = [name for name, tensor in state.items() if name not in replaced and id(tensor) not in present]
    if unknown or missing:
        raise OperandError.of(
            "checkpoint",
            got=f"tensors without a place {unknown}, parameters without a tensor {missing}",
            expected="neither",
        )


def _check_fits(module: torch.nn.Module, layer: CheckpointLayer) -> None:
    got, want = (layer.weight.rows, layer.weight.k), (module.out_features, module.in_features)
    if got != want:
        raise OperandError.of(f"weight of {layer.name}", got=got, expected=want)
    if (layer.bias is None) != (module.bias is None):
        raise OperandError.of(f"bias of {layer.name}", got="in one of the two", expected="in both, or neither")

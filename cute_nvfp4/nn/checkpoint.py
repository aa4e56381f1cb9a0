"""Reads NVFP4 and MXFP4 checkpoints in safetensors, published by NVIDIA's ModelOpt or by compressed-tensors (LLM
Compressor); ``layouts`` has their names and conventions.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.layouts import CheckpointLayer, Layout, TensorInfo, quantized_layers, read_layer
from cute_nvfp4.runtime.backend import Backend

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
}


def read_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Iterator[CheckpointLayer]:
    """The NVFP4 and MXFP4 layers of a checkpoint, one at a time, in order of their names.

    path: a .safetensors file, a ``model.safetensors.index.json``, or a folder with either.

    Raises:
        OperandError, OperandTypeError: tensors are missing, or do not have the shapes and dtypes in the table of
            ``layouts``. A quantized layer is never silently left out.
    """
    with Tensors(path, device) as tensors:
        for name, layout in quantized_layers(tensors.headers):
            yield read_layer(name, layout, tensors.of_layer(name, layout))


def load_checkpoint(
    model: torch.nn.Module,
    path: str | Path,
    *,
    input_rule: str | None = "max",
    backend: Backend = "auto",
    ignore: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> list[str]:
    """Loads a checkpoint into ``model``: quantized linear layers become ``NVFP4Linear`` or ``MXFP4Linear``, and other
    tensors are copied.

    The model's names are the checkpoint's. Returns the names of the replaced layers. Every tensor of the checkpoint
    must have a place in the model, unless its name matches a pattern of ``ignore`` (as in a shell: "*.k_scale"), and
    every parameter of the model a tensor, unless it is tied to one that has. Otherwise an error names them, before
    anything is changed.

    device: by default that of the model. A model that was made on "meta" gets its tensors there, by default on the CPU;
    memory then holds the checkpoint's bytes, and one more layer's while it is replaced.
    """
    state = model.state_dict(keep_vars=True)
    if device is None:
        device = next((x.device for x in state.values() if not x.is_meta), torch.device("cpu"))
    with Tensors(path, device) as tensors, Tensors(path, "cpu") as shown:
        names = [name for name in tensors.names if not any(fnmatchcase(name, pattern) for pattern in ignore)]
        infos = {name: info for name, info in tensors.headers.items() if name in set(names)}
        quantized = dict(quantized_layers(infos))
        taken = {f"{layer}.{part}" for layer, layout in quantized.items() for part in layout.parts}
        plain = [name for name in names if name not in taken]
        _check_places(model, quantized, plain, state)
        for name, layout in quantized.items():
            # files on the CPU are mapped: only the pages that the check needs are read
            _check_fits(model.get_submodule(name), read_layer(name, layout, shown.of_layer(name, layout)))
        for name in plain:
            if name not in infos or infos[name].shape != state[name].shape:
                got = f"shape {infos[name].shape}" if name in infos else "a dtype that torch lacks"
                raise OperandError.of(name, got=got, expected=tuple(state[name].shape))
        with torch.no_grad():
            for name in plain:
                _put(model, state.pop(name), tensors.read(name))
        # release the replaced layers one after the other
        del state
        for name, layout in quantized.items():
            layer = read_layer(name, layout, tensors.of_layer(name, layout))
            made = layer.linear(input_rule=input_rule, backend=backend)
            model.set_submodule(name, made.train(model.get_submodule(name).training))
    return list(quantized)


def _put(model: torch.nn.Module, old: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a value into a tensor of the model; a tensor without memory is replaced wherever the model has it."""
    if not old.is_meta:
        old.copy_(value)
        return
    made = value.to(old.dtype)
    if isinstance(old, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=old.requires_grad)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name in [name for name, x in tensors.items() if x is old]:
                tensors[name] = made


class Tensors:
    """The tensors of one or several safetensors files, by name; each is read when it is asked for."""

    def __init__(self, path: str | Path, device: torch.device | str) -> None:
        self._files = checkpoint_files(Path(path))
        self._device = str(device)
        self._stack = ExitStack()
        self._readers: dict[str, Callable[[str], torch.Tensor]] = {}

    def __enter__(self) -> Tensors:
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
        """The names of all tensors, sorted."""
        return sorted(self._readers)

    @functools.cached_property
    def headers(self) -> dict[str, TensorInfo]:
        """The shapes and dtypes of the tensors, from the files' headers."""
        return headers(self._files)

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name``."""
        return self._readers[name](name)

    def of_layer(self, name: str, layout: Layout) -> dict[str, torch.Tensor]:
        """The tensors of a layer that the files have, by their names within the layer."""
        return {part: self.read(f"{name}.{part}") for part in layout.parts if f"{name}.{part}" in self._readers}


def headers(files: Iterable[str | Path]) -> dict[str, TensorInfo]:
    """The shapes and dtypes of the tensors in safetensors files, by name, if layers can have the dtype."""
    from safetensors import safe_open

    found: dict[str, TensorInfo] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as reader:
            for name in reader.keys():
                part = reader.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is not None:
                    found[name] = TensorInfo(tuple(part.get_shape()), dtype)
    return found


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, which is a folder, an index or a file."""
    if path.is_dir():
        if (path / INDEX).exists():
            path = path / INDEX
        else:
            found = sorted(path.glob("*.safetensors"))
            if not found:
                raise OperandError.of("checkpoint", got=str(path), expected="a folder with .safetensors files")
            return found
    if path.name.endswith(".index.json"):
        names = json.loads(path.read_text())["weight_map"].values()
        return [path.parent / name for name in sorted(set(names))]
    return [path]


def _check_places(model: torch.nn.Module, quantized: dict[str, Layout], plain: list[str], state: dict) -> None:
    """Raises unless every tensor of the checkpoint has a place in the model, and the other way round."""
    modules = dict(model.named_modules())
    for name in quantized:
        if not isinstance(modules.get(name), torch.nn.Linear):
            got = type(modules[name]).__name__ if name in modules else "no such module"
            raise OperandError.of(f"module {name!r}", got=got, expected="torch.nn.Linear")
    replaced = {name for layer in quantized for name in state if name.startswith(f"{layer}.")}
    unknown = [name for name in plain if name not in state]
    present = {id(state[name]) for name in plain if name in state}
    missing = [name for name, tensor in state.items() if name not in replaced and id(tensor) not in present]
    # buffers that are not in a state_dict would stay without memory
    missing += [name for name, x in model.named_buffers() if x.is_meta and name not in state]
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

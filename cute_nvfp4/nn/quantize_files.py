"""``quantize_files``: turns a 16-bit checkpoint into one in NVFP4, a tensor at a time, without the model's code.

Each file of the source becomes one of the same name. It is written completely and then renamed, so a file with that
name is whole, and a run that was stopped continues with the files that are missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.nn.checkpoint import INDEX, checkpoint_files
from cute_nvfp4.nn.explain import explain_product
from cute_nvfp4.nn.layout_configs import compressed_tensors_config, modelopt_config
from cute_nvfp4.nn.layouts import LAYOUTS, MODELOPT, tensors_of
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.nn.report import LayerReport, ModelReport
from cute_nvfp4.nn.selection import matches
from cute_nvfp4.ops.quantize import quantize, tensor_amax
from cute_nvfp4.quantization.blocks import global_scale_from_amax
from cute_nvfp4.quantization.rules import resolve_rule

IGNORED = ("lm_head", "re:.*embed", "re:.*norm", "re:.*\\.gate$", "re:.*router", "re:.*(vision|visual)")
"""Patterns of modules that stay by default: heads, embeddings, norms, routers, and encoders of images."""
PROGRESS = "quantize_progress.json"
_FUSED = re.compile(r"(?P<group>.*\.)(?:(?P<qkv>[qkv]_proj)|(?P<up>gate_proj|up_proj|w1|w3))$")
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}
_NAMES |= {torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}


@dataclass(frozen=True)
class FileRecipe:
    """How a checkpoint is quantized; rule and layout as in ``quantize_model`` and ``nn.layouts``."""

    rule: str = "max"
    layout: str = "modelopt"
    ignore: tuple[str, ...] = IGNORED

    def __post_init__(self) -> None:
        if resolve_rule(self.rule, NVFP4).choice == "hessian":
            raise OperandError.of("rule", got="'hessian'", expected="one that needs only values")
        if self.layout not in LAYOUTS:
            raise OperandError.of("layout", got=repr(self.layout), expected=" or ".join(LAYOUTS))


class _Entry(NamedTuple):
    """A tensor of a file to be written: the name of its dtype, its shape, its bytes."""

    dtype: str
    shape: list[int]
    nbytes: int


def quantize_files(
    source: str | Path,
    target: str | Path,
    recipe: FileRecipe | None = None,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[LayerReport, int, int], None] = lambda layer, done, of: None,
) -> ModelReport:
    """Quantizes the matrices of the checkpoint in the folder ``source``, to nearest, into the folder ``target``.

    A matrix is a tensor ``X.weight`` of two dimensions, in bfloat16, float16 or float32, with K a multiple of 16, that
    matches no pattern of the recipe. Queries, keys and values of a layer get one global scale, and so do gate and up,
    because servers multiply them as one matrix. Memory: a few times the largest tensor. device: where to compute.
    progress: is called with each layer, how many are done, and how many there are.

    Raises:
        OperandError: the source is no checkpoint, or is quantized already; another recipe made the target; one of the
            caller's patterns matches nothing.
    """
    recipe, source, target = recipe or FileRecipe(), Path(source), Path(target)
    config = source / "config.json"
    if not config.exists():
        raise OperandError.of("model", got=f"no config.json in {source}", expected="a folder of transformers")
    if "quantization_config" in json.loads(config.read_text()):
        raise OperandError.of("model", got="a quantization_config in config.json", expected="weights of 16 bits")
    run = _Run(recipe, checkpoint_files(source), target, torch.device(device))
    run.check_patterns()
    run.resume()
    for file in run.files:
        if file.name not in run.state["files"]:
            run.convert(file, progress)
    run.finish(source)
    return run.report


class _Run:
    """The state of a conversion."""

    def __init__(self, recipe: FileRecipe, files: list[Path], target: Path, device: torch.device) -> None:
        self.recipe, self.files, self.target, self.device = recipe, files, target, device
        self.layout = LAYOUTS[recipe.layout]
        self.where: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        for file in files:
            with _opened(file) as reader:
                for name in reader.keys():
                    part = reader.get_slice(name)
                    self.where[name], self.shapes[name] = file, part.get_shape()
                    if len(self.shapes[name]) == 2 and part.get_dtype() not in ("BF16", "F16", "F32"):
                        raise OperandError.of(name, got=part.get_dtype(), expected="a matrix of 16 or 32 bits")
        self.report = ModelReport()
        self.layers = [name for name in self.where if self._is_layer(name)]
        self.state: dict[str, Any] = {"recipe": json.loads(json.dumps(asdict(recipe))), "files": {}}

    def _is_layer(self, tensor: str) -> bool:
        """Whether a tensor is quantized; if a matrix is not, the report gets the reason."""
        name, _, part = tensor.rpartition(".")
        shape = self.shapes[tensor]
        if part != "weight" or len(shape) != 2:
            return False
        pattern = next((x for x in self.recipe.ignore if matches(name, x)), None)
        if pattern is not None:
            self.report.skipped[name] = f"ignored: {pattern}"
        elif shape[1] % NVFP4.block:
            self.report.skipped[name] = f"K is {shape[1]}, no multiple of {NVFP4.block}"
        return name not in self.report.skipped

    def check_patterns(self) -> None:
        """Raises if one of the caller's patterns matches nothing, or all match everything."""
        names = [name.rpartition(".")[0] for name in self.where]
        unused = [x for x in self.recipe.ignore if x not in IGNORED and not any(matches(name, x) for name in names)]
        if unused:
            raise OperandError.of("ignore", got=f"{unused}, which match no module", expected="names of modules")
        if not self.layers:
            raise OperandError.of("model", got="no matrix to quantize", expected="one", hint=str(self.report.skipped))

    def resume(self) -> None:
        """Continues an earlier run: skips the files that it finished."""
        self.target.mkdir(parents=True, exist_ok=True)
        record = self.target / PROGRESS
        if not record.exists():
            if any(self.target.glob("*.safetensors")):
                raise OperandError.of("target", got=f"weights in {self.target}", expected="an empty folder, or a run's")
            return
        before = json.loads(record.read_text())
        if before["recipe"] != self.state["recipe"]:
            raise OperandError.of("recipe", got=self.state["recipe"], expected=f"{before['recipe']}, that of {record}")
        self.state["files"] = {
            name: layers for name, layers in before["files"].items() if (self.target / name).exists()
        }
        self.report.layers += [LayerReport(**x) for layers in self.state["files"].values() for x in layers]

    def convert(self, file: Path, progress: Callable[[LayerReport, int, int], None]) -> None:
        """Writes the quantized ``file``, and records that it is done."""
        made: list[LayerReport] = []

        def contents() -> Iterator[tuple[str, torch.Tensor]]:
            with _opened(file) as reader:
                for name in reader.keys():
                    tensor = reader.get_tensor(name)
                    if name in layers:
                        layer, parts = self._quantized(name, tensor)
                        yield from parts.items()
                        made.append(layer)
                        self.report.layers.append(layer)
                        progress(layer, len(self.report.layers), len(self.layers))
                    else:
                        yield name, tensor

        layers = {name for name in self.layers if self.where[name] == file}
        _write(self.target / file.name, contents)
        self.state["files"][file.name] = [asdict(layer) for layer in made]
        _replace(self.target / PROGRESS, json.dumps(self.state))

    def _quantized(self, tensor: str, weight: torch.Tensor) -> tuple[LayerReport, dict[str, torch.Tensor]]:
        name = tensor.removesuffix(".weight")
        weight = weight.to(self.device)
        amax = max(float(tensor_amax(x.to(self.device))) for x in self._fused(name, weight))
        rule = resolve_rule(self.recipe.rule, NVFP4)
        scale = global_scale_from_amax(torch.tensor(amax, device=self.device), rule)
        linear = NVFP4Linear(quantize(weight, rule=self.recipe.rule, global_scale=scale), input_rule=None)
        exact = weight.float()
        norm = float(exact.norm())
        error = float((linear.weight.dequantize() - exact).norm()) / norm if norm else 0.0
        parts = {f"{name}.{part}": x.cpu() for part, x in tensors_of(linear, self.layout).items()}
        size = sum(x.nbytes for x in parts.values())
        choice = explain_product(1, *weight.shape, torch.bfloat16, input_rule=None, backend="auto", device=self.device)
        sizes = size, weight.nbytes
        return LayerReport(name, *weight.shape, "nearest", error, None, *sizes, *choice), parts

    def _fused(self, name: str, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        """The weight, and the weights that servers fuse with it."""
        yield weight
        match = _FUSED.match(name)
        if match is None:
            return
        last = ("q_proj", "k_proj", "v_proj") if match["qkv"] else ("gate_proj", "up_proj", "w1", "w3")
        for other in last:
            tensor = f"{match['group']}{other}.weight"
            if tensor in self.where and tensor != f"{name}.weight":
                with _opened(self.where[tensor]) as reader:
                    yield reader.get_tensor(tensor)

    def finish(self, source: Path) -> None:
        """Writes the index and the configuration, and copies the model's other files."""
        weights: dict[str, str] = {}
        total = 0
        for file in self.files:
            with _opened(self.target / file.name) as reader:
                weights |= dict.fromkeys(reader.keys(), file.name)
            total += (self.target / file.name).stat().st_size
        for file in source.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, "config.json"):
                shutil.copyfile(file, self.target / file.name)
        if len(self.files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weights}
            _replace(self.target / INDEX, json.dumps(index, indent=2))
        make = modelopt_config if self.layout is MODELOPT else compressed_tensors_config
        ignore = [name for name in self.report.skipped if "embed" not in name]
        fields = make(ignore, False)
        if self.layout is MODELOPT:
            names = {"quant_algo": fields["quant_algo"], "kv_cache_quant_algo": None, "group_size": NVFP4.block}
            other = {"producer": fields["producer"], "quantization": names | {"exclude_modules": ignore}}
            _replace(self.target / "hf_quant_config.json", json.dumps(other, indent=2))
        config = json.loads((source / "config.json").read_text()) | {"quantization_config": fields}
        _replace(self.target / "config.json", json.dumps(config, indent=2))
        order = {name.removesuffix(".weight"): i for i, name in enumerate(self.layers)}
        self.report.layers.sort(key=lambda layer: order[layer.name])


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(str(file), framework="pt")


def _replace(file: Path, text: str) -> None:
    """Writes ``text`` to ``file`` so that readers see a whole file at any time."""
    other = file.with_name(f"{file.name}.part")
    other.write_text(text + "\n")
    os.replace(other, file)


def _write(file: Path, contents: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
    """Writes a safetensors file of tensors that are made one after the other.

    The data first go to a file of their own, because the header, which comes before them, needs all sizes.
    """
    entries: dict[str, _Entry] = {}
    data = file.with_name(f"{file.name}.data")
    with data.open("wb") as out:
        for name, tensor in contents():
            if tensor.dtype not in _NAMES:
                raise OperandError.of(f"dtype of {name}", got=tensor.dtype, expected=", ".join(map(str, _NAMES)))
            size = out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            entries[name] = _Entry(_NAMES[tensor.dtype], list(tensor.shape), size)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, entry in entries.items():
        offsets = [offset, offset + entry.nbytes]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        offset += entry.nbytes
    text = json.dumps(header).encode()
    # data must begin at a multiple of eight bytes
    text += b" " * (-len(text) % 8)
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as out, data.open("rb") as rest:
        out.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(rest, out, 1 << 24)
    data.unlink()
    os.replace(part, file)


def default_ignore(more: Sequence[str], only: bool = False) -> tuple[str, ...]:
    """The patterns of modules that stay: the default ones and ``more``, or with ``only`` just ``more``."""
    return tuple(more) if only else (*IGNORED, *more)

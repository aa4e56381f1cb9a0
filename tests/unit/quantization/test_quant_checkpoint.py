"""Checkpoints as ModelOpt and compressed-tensors publish them, written here by their documented conventions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch as safetensors
import torch
from support.checkpoints import pack, stored, values

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.nn.checkpoint import (
    load_checkpoint,
    read_checkpoint,
)
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.ops.dequantize import dequantize
from cute_nvfp4.ops.quantize import (
    quantize,
)

CONVENTIONS = ["modelopt", "compressed-tensors"]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(10, 64)
        self.block = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 48), "down": torch.nn.Linear(48, 64, bias=False)})
        self.head = torch.nn.Linear(64, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.block["down"](torch.relu(self.block["up"](hidden))))


QUANTIZED = ("block.down", "block.up")


def tensors_of(model: Model, convention: str, *, inputs: bool = True) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    for name in QUANTIZED:
        state |= stored(name, state.pop(f"{name}.weight"), convention, 4.0 if inputs else None)
    return {name: tensor.contiguous() for name, tensor in state.items()}


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("inputs", [True, False])
def test_read(convention: str, inputs: bool, tmp_path: Path) -> None:
    model = Model()
    tensors = tensors_of(model, convention, inputs=inputs)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    layers = {layer.name: layer for layer in read_checkpoint(tmp_path / "model.safetensors")}
    assert tuple(layers) == QUANTIZED
    for name, layer in layers.items():
        assert layer.convention == convention
        want = values(*pack(model.get_submodule(name).weight.detach()))
        torch.testing.assert_close(dequantize(layer.weight), want, rtol=1e-6, atol=0)
        assert (layer.input_global_scale is not None) == inputs
        if inputs:
            assert float(layer.input_global_scale) == pytest.approx(4.0 / 2688, rel=1e-6)
        assert (layer.bias is not None) == (name == "block.up")


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_load_into_a_model(convention: str, tmp_path: Path) -> None:
    """From a folder with an index and two files; the loaded model is the written one, quantized."""
    written = Model()
    with torch.no_grad():
        for parameter in written.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tensors = tensors_of(written, convention)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        safetensors.save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    model = Model()
    assert load_checkpoint(model, tmp_path, input_rule=None) == list(QUANTIZED)
    assert isinstance(model.block["up"], NVFP4Linear) and torch.equal(model.head.weight, written.head.weight)
    tokens = torch.arange(10)
    with torch.no_grad():
        for name in QUANTIZED:
            weight = written.get_submodule(name).weight
            weight.copy_(values(*pack(weight)))
        torch.testing.assert_close(model(tokens), written(tokens), rtol=1e-5, atol=1e-5)
        inputs_too = Model()
        load_checkpoint(inputs_too, tmp_path)
        x = written.embed(tokens)
        a = dequantize(quantize(x, global_scale=4.0 / 2688))
        want = a @ written.block["up"].weight.T + written.block["up"].bias
        torch.testing.assert_close(inputs_too.block["up"](x), want, rtol=1e-5, atol=1e-5)


def test_awq_scales_of_inputs(tmp_path: Path) -> None:
    tensors = tensors_of(Model(), "modelopt")
    tensors["block.up.pre_quant_scale"] = torch.linspace(0.5, 2, 64)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    model = Model()
    load_checkpoint(model, tmp_path, input_rule=None)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    up = model.block["up"]
    want = (x * torch.linspace(0.5, 2, 64)) @ dequantize(up.weight).T + up.bias
    torch.testing.assert_close(up(x), want)


def test_a_nibble_order_or_a_scale_the_wrong_way_is_noticed(tmp_path: Path) -> None:
    """Must fail: files that swap nibbles, or store the other convention's global scale."""
    for spoil in ("nibbles", "divisor"):
        tensors = tensors_of(Model(), "modelopt")
        if spoil == "nibbles":
            data = tensors["block.up.weight"]
            tensors["block.up.weight"] = data >> 4 | data << 4
        else:
            tensors["block.up.weight_scale_2"] = 1 / tensors["block.up.weight_scale_2"]
        safetensors.save_file(tensors, tmp_path / f"{spoil}.safetensors")
        layer = next(layer for layer in read_checkpoint(tmp_path / f"{spoil}.safetensors") if layer.name == "block.up")
        want = values(*pack(Model().block["up"].weight.detach()))
        assert (dequantize(layer.weight) - want).norm() / want.norm() > 0.5, spoil


SPOILS = {
    "a missing scale": (lambda t: t.pop("block.up.weight_scale"), OperandError, "block.up.weight_scale"),
    "no global scale": (lambda t: t.pop("block.up.weight_scale_2"), OperandError, "block.up"),
    "a stray tensor": (lambda t: t.update({"other.weight": torch.zeros(2)}), OperandError, "other.weight"),
    "a stray tensor of a layer": (
        lambda t: t.update({"block.up.k_scale": torch.ones(())}),
        OperandError,
        "block.up.k_scale",
    ),
    "a missing tensor": (lambda t: t.pop("head.weight"), OperandError, "head.weight"),
    "another shape": (lambda t: t.update({"head.weight": torch.zeros(10, 32)}), OperandError, "head.weight"),
    "no bias": (lambda t: t.pop("block.up.bias"), OperandError, "bias of block.up"),
    "scales of another type": (
        lambda t: t.update({"block.up.weight_scale": t["block.up.weight_scale"].float()}),
        OperandTypeError,
        "weight_scale of block.up",
    ),
    "fewer scales": (
        lambda t: t.update({"block.up.weight_scale": t["block.up.weight_scale"][:, :2].contiguous()}),
        OperandError,
        "scale",
    ),
    "a global scale of zero": (
        lambda t: t.update({"block.up.weight_scale_2": torch.tensor(0.0)}),
        OperandError,
        "positive",
    ),
    "several global scales": (
        lambda t: t.update({"block.up.weight_scale_2": torch.ones(3)}),
        OperandError,
        "one element",
    ),
    "a layer the model has not": (
        lambda t: t.update({"gone.weight_scale_2": torch.ones(())}),
        OperandError,
        "no such module",
    ),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_checkpoints_that_do_not_fit(spoil: str, tmp_path: Path) -> None:
    """An error that names the tensor, and a model that is as it was."""
    change, error, match = SPOILS[spoil]
    tensors = tensors_of(Model(), "modelopt")
    change(tensors)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    model, before = Model(), Model().state_dict()
    with pytest.raises(error, match=match):
        load_checkpoint(model, tmp_path)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_tied_and_ignored_tensors(tmp_path: Path) -> None:
    tensors = tensors_of(Model(), "modelopt")
    del tensors["head.weight"]
    tensors["block.up.k_scale"] = torch.ones(())
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    model = Model()
    model.head.weight = model.embed.weight
    load_checkpoint(model, tmp_path, ignore=["*.k_scale"])
    assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, tensors["embed.weight"])


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(OperandError, match="safetensors files"):
        list(read_checkpoint(tmp_path))
    for name in ("a", "b"):
        safetensors.save_file(tensors_of(Model(), "modelopt"), tmp_path / f"{name}.safetensors")
    with pytest.raises(OperandError, match="two files"):
        list(read_checkpoint(tmp_path))

"""``cute-nvfp4 quantize``: a checkpoint of 16 bits becomes one in NVFP4, file by file, and goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from typer.testing import CliRunner

from cute_nvfp4 import quantize
from cute_nvfp4.cli.main import app
from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn import quantize_files as module
from cute_nvfp4.nn.checkpoint import read_checkpoint
from cute_nvfp4.nn.quantize_files import FileRecipe, default_ignore, quantize_files

SIZES = {
    "model.embed_tokens": (64, 32),
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.0.self_attn.k_proj": (16, 32),
    "model.layers.0.self_attn.v_proj": (16, 32),
    "model.layers.0.self_attn.o_proj": (32, 32),
    "model.layers.0.mlp.gate": (4, 32),
    "model.layers.0.mlp.experts.0.gate_proj": (48, 32),
    "model.layers.0.mlp.experts.0.up_proj": (48, 32),
    "model.layers.0.mlp.experts.0.down_proj": (32, 48),
    "odd": (16, 24),
    "lm_head": (64, 32),
}
LAYERS = [name for name in SIZES if name.endswith("_proj")]


def written(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of two files; k_proj is in another one than q_proj."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(size, generator=generator).bfloat16() for name, size in SIZES.items()}
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 8
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.randn(32, generator=generator).bfloat16()
    tensors["model.norm.weight"] = torch.ones(32)
    folder.mkdir()
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        safetensors.save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    (folder / "tokenizer.json").write_text("{}")
    return tensors


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for file in set(index.values()):
        found |= safetensors.load_file(folder / file)
    assert index.keys() == found.keys()
    return found


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_checkpoint(layout: str, tmp_path: Path) -> None:
    """Values are those of ``quantize`` with one global scale for what is multiplied as one; the rest is as it was."""
    tensors = written(tmp_path / "model")
    report = quantize_files(tmp_path / "model", tmp_path / "out", FileRecipe("four_six_mse", layout))
    found = loaded(tmp_path / "out")
    layers = {layer.name: layer for layer in read_checkpoint(tmp_path / "out")}
    assert sorted(layers) == sorted(LAYERS) == sorted(layer.name for layer in report.layers)
    groups = [LAYERS[:3], LAYERS[3:4], LAYERS[4:6], LAYERS[6:]]
    for group in groups:
        amax = max(tensors[f"{name}.weight"].abs().max().float() for name in group)
        for name in group:
            exact = tensors.pop(f"{name}.weight").float()
            want = quantize(exact, rule="four_six_mse", global_scale=amax / (6 * 256)).dequantize()
            torch.testing.assert_close(layers[name].weight.dequantize(), want, rtol=1e-6, atol=0)
            error = next(layer.error for layer in report.layers if layer.name == name)
            assert error == pytest.approx(float((want - exact).norm() / exact.norm()), rel=1e-4)
            found = {key: x for key, x in found.items() if not key.startswith(f"{name}.weight")}
    assert found.keys() == tensors.keys() and all(found[name].equal(x) for name, x in tensors.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == layout and set(config["ignore"]) == {"lm_head", "model.layers.0.mlp.gate", "odd"}
    assert report.skipped["odd"] == "K is 24, no multiple of 16" and (tmp_path / "out" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "hf_quant_config.json").exists() == (layout == "modelopt")
    assert not list((tmp_path / "out").glob("*.part")) and not list((tmp_path / "out").glob("*.data"))


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """In the middle of the second file; the first one is not made again, and the result is that of one run."""
    written(tmp_path / "model")
    quantize_files(tmp_path / "model", tmp_path / "whole")

    class StoppedError(Exception):
        pass

    def stop(layer: Any, done: int, of: int) -> None:
        assert of == len(LAYERS)
        if done == of - 1:
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize_files(tmp_path / "model", tmp_path / "out", progress=stop)
    first = (tmp_path / "out" / "model-1.safetensors").stat().st_mtime_ns
    assert not (tmp_path / "out" / "model-2.safetensors").exists()
    assert not (tmp_path / "out" / "config.json").exists()
    seen: list[str] = []
    report = quantize_files(tmp_path / "model", tmp_path / "out", progress=lambda layer, *_: seen.append(layer.name))
    assert 0 < len(seen) < len(LAYERS) == len(report.layers)
    assert (tmp_path / "out" / "model-1.safetensors").stat().st_mtime_ns == first
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_only_a_tensor_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is made the one before it is written: what is kept of it are its report and its places."""
    import gc
    import weakref

    written(tmp_path / "model")
    # what other tests left need not be looked at for each layer
    gc.collect()
    gc.freeze()
    alive: list[int] = []
    made: list[weakref.ref] = []
    tensors_of = module.tensors_of

    def watched(*arguments: Any) -> dict[str, torch.Tensor]:
        gc.collect()
        alive.append(sum(x() is not None for x in made))
        found = tensors_of(*arguments)
        made.extend(weakref.ref(x) for x in found.values() if x.ndim == 2)
        return found

    monkeypatch.setattr(module, "tensors_of", watched)
    quantize_files(tmp_path / "model", tmp_path / "out")
    # the two of the layer before are the last that a name holds
    assert len(alive) == len(LAYERS) and max(alive) <= 2


def test_the_command(tmp_path: Path) -> None:
    written(tmp_path / "model")
    folders = [str(tmp_path / "model"), str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["quantize", *folders, "--ignore", "*.experts", "--json", str(tmp_path / "r.json")])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert {layer["name"] for layer in report["layers"]} == set(LAYERS[:4])
    assert report["bytes"] < report["bytes_before"] / 2
    assert "bytes became" in done.output
    again = CliRunner().invoke(app, ["quantize", *folders, "--rule", "four_six_mse"])
    assert again.exit_code == 2 and "recipe: got" in again.output


BAD = {
    "no model": (lambda f: (f / "config.json").unlink(), {}, "no config.json"),
    "quantized": (lambda f: (f / "config.json").write_text('{"quantization_config": {}}'), {}, "a quantization_config"),
    "unused": (lambda f: None, {"ignore": default_ignore(["lm_haed"])}, r"\['lm_haed'\], which match no module"),
    "all": (lambda f: None, {"ignore": ("*",)}, "no matrix to quantize"),
    "layout": (lambda f: None, {"layout": "gguf"}, "layout: got 'gguf'"),
    "rule": (lambda f: None, {"rule": "hessian"}, "one that needs only values"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be(case: str, tmp_path: Path) -> None:
    spoil, options, message = BAD[case]
    written(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(OperandError, match=message):
        quantize_files(tmp_path / "model", tmp_path / "out", FileRecipe(**options))
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_other_weights_are_not_overwritten(tmp_path: Path) -> None:
    written(tmp_path / "model")
    written(tmp_path / "out")
    with pytest.raises(OperandError, match="expected an empty folder"):
        quantize_files(tmp_path / "model", tmp_path / "out")

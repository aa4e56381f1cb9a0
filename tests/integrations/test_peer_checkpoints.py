"""Checkpoints that ModelOpt 0.47.0 and compressed-tensors 0.20.0 wrote: read, run, written again, and made by us.

``tests/support/peer_checkpoints.py`` recorded them, and has read ours with the publishers' code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from support.checkpoints import same_bits

transformers = pytest.importorskip("transformers", reason="transformers is not installed: cute_nvfp4[transformers]")

from transformers.quantizers import auto  # noqa: E402

from cute_nvfp4 import simulating  # noqa: E402
from cute_nvfp4.formats import MXFP4  # noqa: E402
from cute_nvfp4.integrations import transformers as module  # noqa: E402
from cute_nvfp4.nn.experts import PackedExperts  # noqa: E402
from cute_nvfp4.nn.layout_configs import compressed_tensors_config, modelopt_config  # noqa: E402
from cute_nvfp4.nn.linear import NVFP4Linear  # noqa: E402
from cute_nvfp4.nn.quantize_files import FileRecipe, quantize_files  # noqa: E402
from cute_nvfp4.nn.stored import linears  # noqa: E402

DATA = Path(__file__).resolve().parents[1] / "data" / "peers"
CASES = sorted(folder.name for folder in DATA.iterdir() if not folder.name.startswith("source"))
IDS = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of transformers are as they were, after each test."""
    for name in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"):
        monkeypatch.setattr(auto, name, dict(getattr(auto, name)))
    module.register(compressed_tensors=True)
    yield
    module.register()


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def layers(model: Any) -> dict[str, NVFP4Linear]:
    """Every matrix in 4 bits by the name that it has in files."""
    found = linears(model)
    for name, experts in model.named_modules():
        if isinstance(experts, PackedExperts):
            found |= {f"{name}.{i}.{part}": layer for (i, part), layer in experts.matrices()}
    return found


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_read_and_written_again(case: str, tmp_path: Path) -> None:
    """Weights are what the publisher's code decodes, every tensor comes back in every bit, and so does what the file
    says of itself."""
    model, report = load(DATA / case, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    decoded, found = safetensors.load_file(DATA / case / "decoded.safetensors"), layers(model)
    assert found.keys() == decoded.keys()
    for name, exact in decoded.items():
        values, rounding = found[name].weight.dequantize(), 1e-6 if exact.dtype is torch.float32 else 2.0**-7
        torch.testing.assert_close(values, exact.float(), rtol=rounding, atol=0)
        assert not torch.allclose(values.roll(1, 0), exact.float(), rtol=rounding)
    model.save_pretrained(tmp_path)
    assert same_bits(*(safetensors.load_file(x / "model.safetensors") for x in (tmp_path, DATA / case)))
    configs = [json.loads((x / "config.json").read_text())["quantization_config"] for x in (tmp_path, DATA / case)]
    assert configs[0] == configs[1]
    assert load(tmp_path)(IDS).logits.equal(model(IDS).logits)


@torch.inference_mode()
def test_a_mixture_of_modelopt_on_hopper(tmp_path: Path) -> None:
    """Experts are one moe, in one copy, and the file's bytes come back from it."""
    exact = load(DATA / "modelopt_moe", dtype=torch.float32)(IDS[:1, :4]).logits
    with simulating("sm_90a") as runs:
        model = load(DATA / "modelopt_moe", dtype=torch.bfloat16)
        experts = model.model.layers[0].mlp.experts
        assert isinstance(experts, PackedExperts) and experts.down_data is None
        logits = model(IDS[:1, :4]).logits.float()
        assert [run.name for run in runs].count("moe_combine") == 1
        model.save_pretrained(tmp_path)
    assert (logits - exact).norm() < 0.05 * exact.norm()
    assert same_bits(*(safetensors.load_file(x / "model.safetensors") for x in (tmp_path, DATA / "modelopt_moe")))


@pytest.mark.parametrize("source, case", [("llama", "modelopt_nvfp4"), ("qwen3_moe", "modelopt_moe")])
def test_our_command_writes_what_modelopt_writes(source: str, case: str, tmp_path: Path) -> None:
    """The same tensors from the same weights, but for bytes of ties that float32 rounds another way: less than one in
    five hundred. Scales of activations need calibration, which the command has not."""
    quantize_files(DATA / f"source_{source}", tmp_path, FileRecipe("max", "modelopt"))
    ours, theirs = (safetensors.load_file(x / "model.safetensors") for x in (tmp_path, DATA / case))
    theirs = {name: x for name, x in theirs.items() if not name.endswith("input_scale")}
    assert ours.keys() == theirs.keys()
    different, size = 0, 0
    for name, x in theirs.items():
        assert x.dtype is ours[name].dtype and x.shape == ours[name].shape
        different += int((x.reshape(-1).view(torch.uint8) != ours[name].reshape(-1).view(torch.uint8)).sum())
        size += x.nbytes
    assert different < size / 500
    swapped = {name: x >> 4 | x << 4 for name, x in ours.items() if x.dtype is torch.uint8}
    assert sum(int((x != theirs[name]).sum()) for name, x in swapped.items()) > size / 10


def common(ours: Any, theirs: Any) -> bool:
    """Whether theirs says all that ours does, and the same; but for the observers of a calibration that is over."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        given = {name: value for name, value in ours.items() if name != "observer"}
        return all(name in theirs and common(value, theirs[name]) for name, value in given.items())
    return ours == theirs


@pytest.mark.parametrize("case", [case for case in CASES if case != "modelopt_moe"])
def test_our_configurations_say_what_theirs_say(case: str) -> None:
    theirs = json.loads((DATA / case / "config.json").read_text())["quantization_config"]
    options = {} if "mxfp4" not in case else {"format": MXFP4}
    make = modelopt_config if case.startswith("modelopt") else compressed_tensors_config
    ours = make(theirs["ignore"], not case.endswith("a16"), **options)
    ours.pop("producer", None)
    assert common(ours, theirs)

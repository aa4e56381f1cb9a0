"""Checkpoints that transformers loads, on a GPU: logits against float32 on the CPU, every packed byte saved again,
memory while loading, and generation in CUDA graphs.

``tests/integrations`` tests the rest of loading, without a GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import safetensors.torch as safetensors
import torch

pytest.importorskip("transformers", reason="transformers is not installed: cute_nvfp4[transformers]")
pytest.importorskip("accelerate", reason="transformers asks accelerate to place modules")
sys.path.append(str(Path(__file__).resolve().parents[1] / "integrations"))

from test_transformers import IDS, load, module, published, published_mixture, same_bits, tensors, transformers

from cute_nvfp4.nn import released
from cute_nvfp4.nn.layout_configs import modelopt_config

pytestmark = pytest.mark.gpu


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    """The relative distance |x − y| / |y|."""
    return float((x.float().cpu() - y.float().cpu()).norm() / y.float().cpu().norm())


@torch.inference_mode()
@pytest.mark.parametrize("publish, layout", [(published, "modelopt"), (published_mixture, "compressed-tensors")])
def test_logits_and_bytes(publish, layout: str, tmp_path: Path) -> None:
    module.register(compressed_tensors=True)
    exact, written = publish(tmp_path / "given", layout)
    model = load(tmp_path / "given", dtype=torch.bfloat16, device_map={"": "cuda"})
    want, got = exact(IDS).logits, model(IDS.cuda()).logits
    assert far(got, want) < 0.05 < far(got.roll(1, 1), want)
    model.save_pretrained(tmp_path / "saved")
    saved = tensors(tmp_path / "saved")
    packed = {n: x for n, x in written.items() if x.element_size() == 1 and saved[n].dtype is x.dtype}
    assert len(packed) > 20 and same_bits({n: saved[n] for n in packed}, packed)


@torch.no_grad()
def test_generation_in_cuda_graphs(tmp_path: Path) -> None:
    """With a static cache transformers compiles the model, and torch replays graphs: the logits equal those without
    graphs."""
    published(tmp_path / "given", "modelopt", mixed=False)
    model = load(tmp_path / "given", dtype=torch.bfloat16, device_map={"": "cuda"})
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ids = IDS[:1].cuda()
    want = model.generate(ids, **options)
    torch._dynamo.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        got = model.generate(ids, cache_implementation="static", **options)
    # one step runs, the next is recorded
    assert sum(x.count for x in seen.key_averages() if "GraphLaunch" in x.key) >= 4
    for step, (x, y) in enumerate(zip(got.logits, want.logits)):
        assert far(x, y) < 0.05
        if got.sequences[0, 12 + step] != want.sequences[0, 12 + step]:
            break
    torch._dynamo.reset()


@torch.inference_mode()
def test_memory_while_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.05 times the file's bytes, including packing. Each layer is a small part of the model, as in one of
    billions of parameters, and so is the part that is unpacked at a time."""
    monkeypatch.setattr(released, "_SLAB", 1 << 17)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=128,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in transformers.LlamaForCausalLM(config).state_dict().items()}
    state = {}
    for name, shape in shapes.items():
        if not name.endswith("_proj.weight"):
            state[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        state[name] = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8)
        state[f"{name}_scale"] = torch.randint(1, 120, (shape[0], shape[1] // 16)).byte().view(torch.float8_e4m3fn)
        state[f"{name}_scale_2"] = torch.tensor(0.01)
    safetensors.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = config.to_dict() | {"quantization_config": modelopt_config(["lm_head"], False), "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load(tmp_path, dtype=torch.bfloat16, device_map={"": "cuda"})
    size = (tmp_path / "model.safetensors").stat().st_size
    peak = torch.cuda.max_memory_allocated() - before
    assert model.model.layers[0].mlp.up_proj.weight_data is None
    assert 0.95 * size < peak <= 1.05 * size

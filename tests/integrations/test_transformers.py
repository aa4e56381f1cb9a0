"""transformers runs, saves and makes NVFP4 checkpoints with this package's layers. No model comes from a hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from support.checkpoints import pack, same_bits, stored, values

transformers = pytest.importorskip("transformers", reason="transformers is not installed: cute_nvfp4[transformers]")

from transformers.quantizers import auto  # noqa: E402

from cute_nvfp4 import NVFP4Linear, quantize_model, simulating  # noqa: E402
from cute_nvfp4.errors import OperandError  # noqa: E402
from cute_nvfp4.integrations import transformers as module  # noqa: E402
from cute_nvfp4.nn.experts import PackedExperts  # noqa: E402
from cute_nvfp4.nn.layout_configs import compressed_tensors_config, modelopt_config  # noqa: E402
from cute_nvfp4.nn.stored import linears  # noqa: E402

LAYOUTS = ["modelopt", "compressed-tensors"]
IGNORED, FP8 = "model.layers.1.self_attn.o_proj", "model.layers.0.self_attn.q_proj"
NVFP4 = "model.layers.1.mlp.down_proj"
IDS = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of transformers are as they were, after each test."""
    for name in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"):
        monkeypatch.setattr(auto, name, dict(getattr(auto, name)))
    yield
    module.register()


def small(tied: bool = False, **options: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(sizes | heads | {"tie_word_embeddings": tied} | options))
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return model


def projections(model: Any) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and name != "lm_head"]


def published(folder: Path, layout: str, model: Any | None = None, *, mixed: bool = True) -> tuple[Any, Tensors]:
    """Writes a checkpoint as another library would; the model with its decoded weights, and its tensors."""
    model = small(attention_bias=True) if model is None else model
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name in projections(model):
        weight, place = model.get_submodule(name).weight, f"{name}.weight"
        if mixed and name == FP8:
            scale = weight.detach().abs().max() / 448
            state[place], state[f"{name}.weight_scale"] = (weight.detach() / scale).to(torch.float8_e4m3fn), scale
            weight.data = state[place].float() * scale
        elif not (mixed and name == IGNORED):
            state |= stored(name, state.pop(place), layout)
            weight.data = values(*pack(weight.detach()))
    if mixed:
        state["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    folder.mkdir(exist_ok=True)
    safetensors.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    make = modelopt_config if layout == "modelopt" else compressed_tensors_config
    config = model.config.to_dict() | {"quantization_config": make(["lm_head"], True), "dtype": "float32"}
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return model, state


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def tensors(folder: Path) -> Tensors:
    return safetensors.load_file(folder / "model.safetensors")


@torch.inference_mode()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_checkpoints(layout: str, tmp_path: Path) -> None:
    """Loaded, run, generated from; saved and loaded again; every bit of every tensor is what it was."""
    if layout != "modelopt":
        module.register(compressed_tensors=True)
    exact, written = published(tmp_path / "given", layout)
    model, report = load(tmp_path / "given", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    kinds = {name: type(model.get_submodule(name)) for name in projections(exact)}
    assert kinds.pop(IGNORED) is torch.nn.Linear and kinds.pop(FP8) is torch.nn.Linear
    assert set(kinds.values()) == {NVFP4Linear} and not model.training
    torch.testing.assert_close(model(IDS).logits, exact(IDS).logits, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert model.generate(IDS[:1], **options).equal(exact.generate(IDS[:1], **options))
    model.save_pretrained(tmp_path / "saved")
    saved, weight = tensors(tmp_path / "saved"), f"{FP8}.weight"
    # an FP8 layer was decoded: it is saved as it runs
    assert saved.pop(weight).equal(exact.get_submodule(FP8).weight) and written.pop(weight) is not None
    del written[f"{FP8}.weight_scale"]
    assert same_bits(saved, written)
    given, again = (json.loads((tmp_path / x / "config.json").read_text()) for x in ("given", "saved"))
    assert again["quantization_config"] == given["quantization_config"]
    assert load(tmp_path / "saved")(IDS).logits.equal(model(IDS).logits)


@torch.inference_mode()
@pytest.mark.parametrize("source, target", [LAYOUTS, LAYOUTS[::-1]])
def test_from_one_layout_to_the_other(source: str, target: str, tmp_path: Path) -> None:
    module.register(compressed_tensors=True)
    exact, _ = published(tmp_path / "given", source, mixed=False)
    model = load(tmp_path / "given")
    module.save_pretrained(model, tmp_path / "saved", target)
    assert model.config.quantization_config.quant_method == source
    _, want = published(tmp_path / "want", target, small(attention_bias=True), mixed=False)
    saved = tensors(tmp_path / "saved")
    assert saved.keys() == want.keys()
    # a reciprocal rounds
    assert all(torch.allclose(saved[n].float(), x.float(), rtol=1e-6, atol=0) for n, x in want.items())
    torch.testing.assert_close(load(tmp_path / "saved")(IDS).logits, exact(IDS).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_awq_is_written_as_modelopt_has_it(tmp_path: Path) -> None:
    """Layers keep what multiplies their inputs, and the configuration says so; the other layout has no name for it."""
    model, batches = small(), [torch.randint(96, (2, 32), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    model.model.embed_tokens.weight[:, :4] *= 20
    model, report = quantize_model(model, "four_six_mse", awq=True, calibration=batches, ignore=["lm_head"])
    assert any(layer.method == "awq, nearest" for layer in report.layers)
    module.save_pretrained(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4_AWQ" and config["pre_quant_scale"]
    assert any(name.endswith("pre_quant_scale") for name in tensors(tmp_path / "saved"))
    assert load(tmp_path / "saved")(IDS).logits.equal(model(IDS).logits)
    with pytest.raises(OperandError, match="compressed-tensors has no name for it"):
        module.save_pretrained(model, tmp_path / "other", "compressed-tensors")


@torch.inference_mode()
def test_quantized_while_loading(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path / "given")
    config = module.CuteNvfp4Config("four_six_mse", input_rule="max", ignore=["lm_head", "*.o_proj"])
    model = load(tmp_path / "given", quantization_config=config)
    assert len(model.quantization_report.layers) == 12
    assert model.quantization_report.skipped["lm_head"] == "ignored: lm_head"
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.config.quantization_config.rule == "four_six_mse"
    assert again(IDS).logits.equal(model(IDS).logits)
    assert again.model.layers[0].mlp.up_proj.input_rule == "max"
    again.save_pretrained(tmp_path / "again")
    assert same_bits(tensors(tmp_path / "again"), tensors(tmp_path / "saved"))
    plain = again.dequantize()
    assert not any(isinstance(x, NVFP4Linear) for x in plain.modules())
    assert not torch.equal(plain(IDS).logits, model(IDS).logits)


@torch.inference_mode()
@pytest.mark.parametrize("untie", [False, True])
def test_a_head_that_is_the_embedding(untie: bool, tmp_path: Path) -> None:
    small(tied=True).save_pretrained(tmp_path / "given")
    config = module.CuteNvfp4Config(ignore=[] if untie else None, untie=untie)
    model = load(tmp_path / "given", quantization_config=config)
    assert isinstance(model.lm_head, NVFP4Linear) == untie
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again(IDS).logits.equal(model(IDS).logits)
    assert ("lm_head.weight_scale" in tensors(tmp_path / "saved")) == untie


@torch.inference_mode()
def test_activations_and_backend_as_registered(tmp_path: Path) -> None:
    exact, _ = published(tmp_path, "modelopt", mixed=False)
    module.register(input_rule="max")
    model = load(tmp_path)
    layer = model.get_submodule(NVFP4)
    assert layer.input_rule == "max" and float(layer.input_global_scale) == pytest.approx(4 / 2688)
    distance = (model(IDS).logits - exact(IDS).logits).norm() / exact(IDS).logits.norm()
    assert 0.01 < distance < 0.5


@torch.inference_mode()
def test_one_graph_with_a_static_cache(tmp_path: Path) -> None:
    published(tmp_path, "modelopt", mixed=False)
    model = load(tmp_path)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    caches = [transformers.StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    want = model(IDS[:1], past_key_values=caches[0]).logits
    torch.testing.assert_close(compiled(IDS[:1], past_key_values=caches[1]).logits, want, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


@torch.no_grad()
def test_generation_compiled_in_one_graph(tmp_path: Path) -> None:
    """With a static cache a step is one graph, without breaks, and gives the same tokens."""
    published(tmp_path, "modelopt", mixed=False)
    model, graphs = load(tmp_path), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    options = {"max_new_tokens": 6, "do_sample": False}
    got = model.generate(IDS[:1], cache_implementation="static", compile_config=config, **options)
    assert got.equal(model.generate(IDS[:1], **options)) and graphs
    torch._dynamo.reset()


def spoil(folder: Path, change: Any) -> None:
    found = tensors(folder)
    change(found)
    safetensors.save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


BAD = {
    "no scale": (lambda t: t.pop(f"{NVFP4}.weight_scale"), f"no tensor '{NVFP4}.weight_scale'"),
    "another shape": (
        lambda t: t.update({f"{NVFP4}.{part}": t[f"{NVFP4}.{part}"][:32] for part in ("weight", "weight_scale")}),
        rf"weight of {NVFP4}: got \(32, 96\), expected \(64, 96\)",
    ),
    "no such layer": (lambda t: t.update({"gone.weight_scale_2": torch.ones(())}), "module 'gone' of the model"),
    "nothing in NVFP4": (lambda t: [t.pop(n) for n in list(t) if "weight_scale_2" in n], "no layer in NVFP4"),
}


@pytest.mark.parametrize("case", BAD)
def test_checkpoints_that_do_not_fit(case: str, tmp_path: Path) -> None:
    change, message = BAD[case]
    published(tmp_path, "modelopt", mixed=False)
    spoil(tmp_path, change)
    with pytest.raises(OperandError, match=message):
        load(tmp_path)


def test_a_swapped_nibble_is_noticed(tmp_path: Path) -> None:
    """Must fail: a file that has the other nibble first."""
    exact, _ = published(tmp_path, "modelopt", mixed=False)
    name = f"{NVFP4}.weight"
    spoil(tmp_path, lambda t: t.update({name: t[name] >> 4 | t[name] << 4}))
    with torch.inference_mode():
        assert not torch.allclose(load(tmp_path)(IDS).logits, exact(IDS).logits, rtol=1e-2, atol=1e-2)


def test_other_checkpoints_of_compressed_tensors_stay_theirs() -> None:
    module.register(compressed_tensors=True)
    module.register(compressed_tensors=True)
    choice = auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"]
    assert isinstance(choice.from_dict(compressed_tensors_config([], False)), module.PublishedConfig)
    assert choice.theirs is transformers.CompressedTensorsConfig
    with pytest.raises(OperandError, match="quant_algo: got FP8"):
        auto.AutoQuantizationConfig.from_dict({"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(OperandError, match="without a low-rank part"):
        auto.AutoQuantizationConfig.from_dict({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"})
    with pytest.raises(OperandError, match="layout: got 'gguf'"):
        module.CuteNvfp4Config(layout="gguf")


EXPERT = "model.layers.{}.mlp.experts.{}.{}"


def mixture(**options: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**(sizes | heads | experts | options))
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15) if parameter.ndim > 1 else None
    return model


def published_mixture(folder: Path, layout: str, **options: Any) -> tuple[Any, Tensors]:
    """A checkpoint of a small mixture, each expert by itself; attention of its first layer stays."""
    model = mixture(**options)
    state = {name: x.detach().clone() for name, x in model.state_dict().items() if ".experts." not in name}
    for name in projections(model):
        if ".1." in name:
            weight = model.get_submodule(name).weight
            state |= stored(name, state.pop(f"{name}.weight"), layout)
            weight.data = values(*pack(weight.detach()))
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for e in range(4):
            gate, up = experts.gate_up_proj.data[e].chunk(2)
            for part, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", experts.down_proj.data[e])):
                state |= stored(EXPERT.format(i, e, part), weight.clone(), layout)
                weight.copy_(values(*pack(weight.clone())))
    folder.mkdir()
    safetensors.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    make = modelopt_config if layout == "modelopt" else compressed_tensors_config
    config = model.config.to_dict() | {"quantization_config": make(["lm_head"], True), "dtype": "float32"}
    config["architectures"] = ["Qwen3MoeForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return model, state


@torch.inference_mode()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts(layout: str, tmp_path: Path) -> None:
    module.register(compressed_tensors=True)
    exact, written = published_mixture(tmp_path / "given", layout)
    model, report = load(tmp_path / "given", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert isinstance(model.get_submodule("model.layers.1.mlp.experts"), PackedExperts)
    torch.testing.assert_close(model(IDS).logits, exact(IDS).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "saved")
    assert same_bits(tensors(tmp_path / "saved"), written)
    # experts in another order are noticed
    first, second = (EXPERT.format(0, e, "down_proj.weight" + "_packed" * (layout != "modelopt")) for e in (0, 1))
    spoil(tmp_path / "given", lambda t: t.update({first: t[second], second: t[first]}))
    assert not torch.allclose(load(tmp_path / "given")(IDS).logits, exact(IDS).logits, rtol=1e-2, atol=1e-2)


def test_experts_of_which_some_are_in_fp8(tmp_path: Path) -> None:
    """They are decoded to 16 bits with those beside them; another layer's stay in 4 bits."""
    exact, _ = published_mixture(tmp_path / "given", "modelopt")
    name = EXPERT.format(0, 2, "down_proj")

    def change(found: Tensors) -> None:
        scale = found.pop(f"{name}.weight_scale_2")
        weight = (exact.model.layers[0].mlp.experts.down_proj.data[2] / scale).to(torch.float8_e4m3fn)
        found |= {f"{name}.weight": weight, f"{name}.weight_scale": scale}
        del found[f"{name}.input_scale"]
        exact.model.layers[0].mlp.experts.down_proj.data[2] = weight.float() * scale

    spoil(tmp_path / "given", change)
    model = load(tmp_path / "given")
    kinds = [type(layer.mlp.experts).__name__ for layer in model.model.layers]
    assert kinds == ["Qwen3MoeExperts", "PackedExperts"]
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, exact(IDS).logits, rtol=1e-4, atol=1e-4)


def test_an_expert_that_a_file_lacks(tmp_path: Path) -> None:
    published_mixture(tmp_path / "given", "modelopt")
    spoil(tmp_path / "given", lambda t: [t.pop(name) for name in list(t) if EXPERT.format(0, 2, "up_proj") in name])
    with pytest.raises(OperandError, match=r"no \['up_proj'\] of expert 2"):
        load(tmp_path / "given")


@torch.inference_mode()
def test_experts_quantized_while_loading(tmp_path: Path) -> None:
    """The same values as those of the command, which reads the experts one by one."""
    mixture().save_pretrained(tmp_path / "given")
    model = load(tmp_path / "given", quantization_config=module.CuteNvfp4Config("four_six_mse"))
    names = [layer.name for layer in model.quantization_report.layers]
    parts = ("gate_up_proj", "down_proj")
    assert {f"model.layers.{i}.mlp.experts.{part}" for i in (0, 1) for part in parts} <= {*names}
    assert all(0.05 < layer.error < 0.15 for layer in model.quantization_report.layers)
    model.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved")(IDS).logits.equal(model(IDS).logits)
    from cute_nvfp4.nn.quantize_files import FileRecipe, quantize_files

    quantize_files(tmp_path / "given", tmp_path / "files", FileRecipe("four_six_mse"))
    made = [load(tmp_path / folder).get_submodule("model.layers.1.mlp.experts") for folder in ("saved", "files")]
    assert all(made[0].state_dict()[name].equal(x) for name, x in made[1].state_dict().items())


@torch.inference_mode()
def test_on_hopper_a_model_holds_one_copy(tmp_path: Path) -> None:
    """Its kernels run, the checkpoint's bytes are given up, and saving gives them back."""
    exact, written = published(tmp_path / "given", "modelopt", mixed=False)
    with simulating("sm_90a") as runs:
        model = load(tmp_path / "given", dtype=torch.bfloat16)
        layers = linears(model)
        assert all(layer.weight_data is None for layer in layers.values())
        packed = len(runs)
        logits = model(IDS[:1, :4]).logits
        assert len(runs) == packed + len(layers)
        model.save_pretrained(tmp_path / "saved")
    distance = (logits.float() - exact(IDS[:1, :4]).logits).norm() / exact(IDS[:1, :4]).logits.norm()
    assert 0 < distance < 0.05
    quantized = {name: x for name, x in written.items() if name.rpartition(".")[0] in layers and "bias" not in name}
    saved = {name: x for name, x in tensors(tmp_path / "saved").items() if name in quantized}
    assert same_bits(saved, quantized)


@pytest.mark.parametrize("option", ["tp_plan", "device_mesh"])
def test_plans_of_older_versions_are_refused(option: str) -> None:
    """With what to do instead: those pass their plan here."""
    quantizer = module.CuteNvfp4Quantizer(module.CuteNvfp4Config())
    quantizer.validate_environment()
    with pytest.raises(ValueError, match=r"needs transformers 5\.24.*parallelize_module with the styles"):
        quantizer.validate_environment(**{option: "auto"})

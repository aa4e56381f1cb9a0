"""``PackedExperts``: experts of checkpoints as one ``moe``, and all their bytes back; gpt-oss's and MXFP4 files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from support.checkpoints import same_bits

transformers = pytest.importorskip("transformers", reason="transformers is not installed: cute_nvfp4[transformers]")

from transformers.quantizers import auto  # noqa: E402

from cute_nvfp4 import BlockScaledTensor, simulating  # noqa: E402
from cute_nvfp4.errors import OperandError  # noqa: E402
from cute_nvfp4.formats import MXFP4, NVFP4, Format  # noqa: E402
from cute_nvfp4.integrations import transformers as module  # noqa: E402
from cute_nvfp4.nn.experts import ExpertForm, PackedExperts, Stack  # noqa: E402
from cute_nvfp4.nn.layout_configs import compressed_tensors_config  # noqa: E402
from cute_nvfp4.nn.linear import MXFP4Linear  # noqa: E402
from cute_nvfp4.nn.stored import linears  # noqa: E402
from cute_nvfp4.ops.moe.experts import ActivationFunction  # noqa: E402

E, HIDDEN, INNER = 3, 64, 96
FORMS = {
    "Qwen3": ExpertForm(),
    "Nemotron": ExpertForm(activation=ActivationFunction("relu2")),
    "MXFP4": ExpertForm(MXFP4),
    "gpt-oss": ExpertForm(MXFP4, ActivationFunction("clamped_swiglu"), interleaved=True),
}


def stack(format: Format, n: int, k: int, parts: int, generator: torch.Generator) -> Stack:
    """A stack at random: every code, some scales of ±0, and global scales of its own for each part."""
    data = torch.randint(256, (E, n, k // 2), generator=generator).byte()
    low, high = (0x20, 0x30) if format is NVFP4 else (120, 126)
    scale = torch.randint(low, high, (E, n, k // format.block), generator=generator).byte()
    scale[0, :2, 0] = torch.tensor([0x80, 0], dtype=torch.uint8) if format is NVFP4 else 0
    data[0, :2, : format.block // 2] = data[0, :2, : format.block // 2] if format is NVFP4 else 0
    factor = 0.02 + 0.05 * torch.rand(E, parts, generator=generator)
    return Stack(data, scale, factor if format is NVFP4 else None)


def experts(name: str) -> PackedExperts:
    form, generator = FORMS[name], torch.Generator().manual_seed(0)
    halves = form.activation.halves
    stacks = (
        stack(form.format, halves * INNER, HIDDEN, halves, generator),
        stack(form.format, HIDDEN, INNER, 1, generator),
    )
    biases = (
        [torch.randn(E, n, generator=generator) for n in (halves * INNER, HIDDEN)] if form.interleaved else [None] * 2
    )
    return PackedExperts(*stacks, form, gate_up_bias=biases[0], down_bias=biases[1])


def rows(tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores, ids = torch.randn(tokens, E, generator=generator).softmax(-1).topk(2)
    # what a router writes for an expert that is elsewhere
    ids[0, 0] = E
    return torch.randn(tokens, HIDDEN, generator=generator).bfloat16(), ids, scores


def state(made: PackedExperts) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in made.state_dict().items()}


@pytest.mark.kernels
@pytest.mark.sim_only("looks at the simulator's launches")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FORMS)
def test_one_moe(name: str) -> None:
    """Five or six launches, exact values within the rounding of 16 bits, and the checkpoint's bytes in one copy."""
    made, given = experts(name), rows()
    want, before = made(given[0].float(), *given[1:]), state(made)
    with simulating("sm_90a") as runs:
        made.prepare()
        assert made.down_data is None and made._lost[0] is not None
        assert made.explain_backend().kernel == "moe"
        count = len(runs)
        got = made(*given)
        assert "moe_combine" in {run.name for run in runs[count:]} and len(runs) - count <= 6
        after = state(made)
        assert same_bits(after, before)
    assert (got - want).norm() < 0.01 * want.norm() and not (got.roll(1, 0) - want).norm() < 0.01 * want.norm()
    # elsewhere the bytes come back, and exact torch runs
    made.to("cpu")
    assert made.down_data is not None and made(given[0].float(), *given[1:]).equal(want)


@pytest.mark.kernels
@pytest.mark.sim_only("of CPU tensors")
@pytest.mark.parametrize("arch, input_rule", [("sm_100a", None), ("sm_120a", "max")])
def test_rows_that_are_quantized(arch: str, input_rule: str | None) -> None:
    made, given = experts("gpt-oss"), rows()
    made.input_rule = input_rule
    want, before = made(given[0].float(), *given[1:]), state(made)
    with simulating(arch) as runs:
        got = made.prepare()(*given)
        assert any("quantize" in run.name for run in runs) and made.down_data is None
        assert same_bits(state(made), before)
        made.load_state_dict(before)
        assert made.down_data is None and made(*given).equal(got)
    assert (got - want).norm() < 0.3 * want.norm() and not (got.roll(1, 0) - want).norm() < 0.3 * want.norm()


def nbytes(made: PackedExperts) -> int:
    """What a module holds, prepared experts included."""
    found = list(made.buffers()) + (list(made._experts.tensors().values()) if made._experts is not None else [])
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


@pytest.mark.kernels
@pytest.mark.sim_only("of CPU tensors")
def test_prepared_experts_take_the_bytes_of_a_file() -> None:
    """Sizes that fill tiles: within 5 % of the checkpoint's bytes; both copies would take twice as many."""
    generator, form = torch.Generator().manual_seed(0), FORMS["Qwen3"]
    made = PackedExperts(*(stack(NVFP4, n, 128, parts, generator) for n, parts in ((256, 2), (128, 1))), form)
    before = nbytes(made)
    with simulating("sm_90a"):
        assert nbytes(made.prepare()) <= 1.05 * before
        both = PackedExperts(*made.stacks(), form).prepare(release=False)
        assert nbytes(both) > 1.9 * before


def test_matrices_and_refusals() -> None:
    made = experts("Qwen3")
    up = made.matrix(2, "up_proj")
    rows_of_up = BlockScaledTensor(
        made.gate_up_data[2, INNER:], made.gate_up_scale[2, INNER:], made.gate_up_factor[2, 1]
    )
    assert up.weight.dequantize().equal(rows_of_up.dequantize())
    with pytest.raises(OperandError, match="interleaved rows"):
        experts("gpt-oss").matrix(0, "up_proj")
    with pytest.raises(OperandError, match="stack of gate and up"):
        PackedExperts(*made.stacks(), FORMS["Nemotron"])
    assert "3 experts, hidden 64, inner 96, nvfp4, silu" in repr(made)


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of transformers are as they were, after each test."""
    for name in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"):
        monkeypatch.setattr(auto, name, dict(getattr(auto, name)))
    yield
    module.register()


SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))


def drawn(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15) if parameter.ndim > 1 else None
    return model.eval()


def quantized_mx(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (…, K / 2), exponents (…, K / 32) and values of MXFP4, by the format's definition."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = weight.unflatten(-1, (-1, 32))
    exponent = (blocks.abs().amax(-1) / 6).log2().ceil()
    y = blocks / exponent.exp2()[..., None]
    index = (y.abs()[..., None] - grid).abs().argmin(-1)
    values = (grid[index] * y.sign() * exponent.exp2()[..., None]).flatten(-2)
    codes = (index + 8 * (y < 0)).flatten(-2).byte()
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).byte(), values


def saved(folder: Path, model: Any, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    folder.mkdir()
    safetensors.save_file(
        {n: x.contiguous() for n, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = model.config.to_dict() | {"quantization_config": quantization, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}))


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def gpt_oss(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A checkpoint in gpt-oss's layout: experts in ``_blocks`` (E, N, K / 32, 16) and ``_scales``, all else plain."""
    config = transformers.GptOssConfig(**SIZES, num_local_experts=E, num_experts_per_tok=2)
    model = drawn(transformers.GptOssForCausalLM(config))
    tensors = {name: x.detach().clone() for name, x in model.state_dict().items()}
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            place, weight = f"model.layers.{i}.mlp.experts.{name}", getattr(layer.mlp.experts, name).data
            codes, scales, values = quantized_mx(weight.mT)
            weight.copy_(values.mT)
            del tensors[place]
            tensors |= {f"{place}_blocks": codes.unflatten(-1, (-1, 16)), f"{place}_scales": scales}
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    saved(folder, model, tensors, quantization)
    return model, tensors


@torch.inference_mode()
def test_gpt_oss(tmp_path: Path) -> None:
    """Loaded, run, saved: every byte; in the simulator each layer of experts is one moe."""
    module.register(mxfp4=True)
    exact, written = gpt_oss(tmp_path / "given")
    model, report = load(tmp_path / "given", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    torch.testing.assert_close(model(IDS).logits, exact(IDS).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "saved")
    assert same_bits(safetensors.load_file(tmp_path / "saved" / "model.safetensors"), written)
    assert load(tmp_path / "saved")(IDS).logits.equal(model(IDS).logits)
    with simulating("sm_90a") as runs:
        half = load(tmp_path / "given", dtype=torch.bfloat16)
        count = len(runs)
        logits = half(IDS[:1, :4]).logits
        assert [run.name for run in runs[count:]].count("moe_combine") == 1
    want = exact(IDS[:1, :4]).logits
    assert (logits.float() - want).norm() < 0.05 * want.norm()


def spoil(folder: Path, change: Any) -> None:
    found = safetensors.load_file(folder / "model.safetensors")
    change(found)
    safetensors.save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


PLACE = "model.layers.0.mlp.experts"
BAD = {
    "no scales": (lambda t: t.pop(f"{PLACE}.down_proj_scales"), r"no \['down_proj_scales'\]"),
    "scales": (
        lambda t: t.update({f"{PLACE}.down_proj_scales": t[f"{PLACE}.down_proj_scales"][:, :32].contiguous()}),
        f"down_proj of {PLACE}: got",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_gpt_oss_files_that_do_not_fit(case: str, tmp_path: Path) -> None:
    module.register(mxfp4=True)
    gpt_oss(tmp_path / "given")
    spoil(tmp_path / "given", BAD[case][0])
    with pytest.raises(OperandError, match=BAD[case][1]):
        load(tmp_path / "given")


@torch.inference_mode()
def test_gpt_oss_that_is_read_otherwise_is_noticed(tmp_path: Path) -> None:
    """Must fail: gate and up in each other's place, nibbles the other way round."""
    module.register(mxfp4=True)
    exact, _ = gpt_oss(tmp_path / "given")
    name = f"{PLACE}.gate_up_proj_blocks"
    before = safetensors.load_file(tmp_path / "given" / "model.safetensors")[name]
    for other in (before.unflatten(1, (-1, 2)).flip(2).flatten(1, 2), before >> 4 | before << 4):
        spoil(tmp_path / "given", lambda t, x=other: t.update({name: x.contiguous()}))
        assert not torch.allclose(load(tmp_path / "given")(IDS).logits, exact(IDS).logits, rtol=1e-2, atol=1e-2)


def compressed_mx(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A mixture as compressed-tensors writes it in MXFP4 ("mxfp4-pack-quantized"): linear layers, and each expert by
    itself."""
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=E, num_experts_per_tok=2, moe_intermediate_size=32)
    model = drawn(transformers.Qwen3MoeForCausalLM(config))
    tensors = {name: x.detach().clone() for name, x in model.state_dict().items() if ".experts." not in name}
    weights = {n: x.weight.data for n, x in model.named_modules() if isinstance(x, torch.nn.Linear) and n != "lm_head"}
    for i, layer in enumerate(model.model.layers):
        made = layer.mlp.experts
        for e in range(E):
            parts = (*made.gate_up_proj.data[e].chunk(2), made.down_proj.data[e])
            names = (f"model.layers.{i}.mlp.experts.{e}.{part}_proj" for part in ("gate", "up", "down"))
            weights |= dict(zip(names, parts))
    for name, weight in weights.items():
        codes, scales, values = quantized_mx(weight)
        weight.copy_(values)
        tensors.pop(f"{name}.weight", None)
        tensors |= {f"{name}.weight_packed": codes, f"{name}.weight_scale": scales}
    saved(folder, model, tensors, compressed_tensors_config(["lm_head"], False, MXFP4))
    return model, tensors


@torch.inference_mode()
def test_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    module.register(compressed_tensors=True)
    exact, written = compressed_mx(tmp_path / "given")
    model, report = load(tmp_path / "given", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert {type(layer) for layer in linears(model).values()} == {MXFP4Linear}
    torch.testing.assert_close(model(IDS).logits, exact(IDS).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "saved")
    assert same_bits(safetensors.load_file(tmp_path / "saved" / "model.safetensors"), written)
    with simulating("sm_90a"):
        half = load(tmp_path / "given", dtype=torch.bfloat16)
        layer = next(iter(linears(half).values()))
        assert layer.weight_data is None and layer.explain_backend(1).kernel.startswith("packed")
        logits, want = half(IDS[:1, :4]).logits.float(), exact(IDS[:1, :4]).logits
        assert (logits - want).norm() < 0.05 * want.norm()
        half.save_pretrained(tmp_path / "again")
    again = safetensors.load_file(tmp_path / "again" / "model.safetensors")
    packed = {name: x for name, x in written.items() if x.dtype is torch.uint8}
    assert same_bits({name: again[name] for name in packed}, packed)


def test_a_copy_is_its_own() -> None:
    made = experts("Qwen3")
    other = copy.deepcopy(made)
    other.down_data.zero_()
    assert made.down_data.any()

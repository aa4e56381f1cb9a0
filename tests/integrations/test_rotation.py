"""``rotate_model``: models of transformers compute what they computed, with hidden states that are rotated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn import quantize_model, rotate_model

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, {}),
}
TOKENS = torch.randint(96, (2, 11), generator=torch.Generator().manual_seed(4))


def model_of(name: str) -> torch.nn.Module:
    """A model in float64 whose biases, norms and outliers are not those of a new one."""
    config, options = FAMILIES[name]
    torch.manual_seed(6)
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, **options)).double().eval()
    with torch.no_grad():
        for key, x in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                x.add_(0.5 * torch.randn_like(x))
        model.model.embed_tokens.weight[:, 5] *= 300
    return model.requires_grad_(False)


@torch.no_grad()
def hidden_of(model: torch.nn.Module) -> torch.Tensor:
    """What the second block gets."""
    return model(TOKENS, output_hidden_states=True).hidden_states[1]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_same_model(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    want, hidden = model(TOKENS).logits, hidden_of(model)
    rotate_model(model, seed=3)
    found, rotated = model(TOKENS).logits, hidden_of(model)
    # RMSNorms add 1e-6 to a mean square, and multiply in float32
    assert (found - want).norm() < 1e-5 * want.norm()
    assert torch.allclose(rotated.norm(dim=-1), hidden.norm(dim=-1), rtol=1e-5)
    assert rotated.abs().amax() < 0.8 * hidden.abs().amax() and (rotated - hidden).norm() > 0.5 * hidden.norm()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.allclose(again(TOKENS).logits, found, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_each_matrix_matters() -> None:
    """A part that is not rotated with the others is another model."""
    want = model_of("llama")(TOKENS).logits
    for name, parameter in model_of("llama").named_parameters():
        model = rotate_model(model_of("llama"))
        model.get_parameter(name).copy_(parameter)
        distance = float((model(TOKENS).logits - want).norm() / want.norm())
        unmoved = name.endswith(("q_proj.bias", "k_proj.bias", "gate_proj.bias", "up_proj.bias"))
        assert (distance < 1e-5) == unmoved, name


@torch.no_grad()
def test_a_quantized_model_may_be_rotated_first() -> None:
    model = model_of("qwen3").float()
    want = model(TOKENS).logits
    made, report = quantize_model(rotate_model(model), ignore=["lm_head"])
    assert (made(TOKENS).logits - want).norm() < 0.5 * want.norm() and len(report.layers) == 14


class Other(torch.nn.Module):
    """A norm that adds one to its weight, as Gemma's does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(inner.weight.detach() - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * (1 + self.weight)


def test_other_models_stay_as_they_are() -> None:
    model = model_of("llama")
    model.model.layers[1].post_attention_layernorm = Other(model.model.layers[1].post_attention_layernorm)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(OperandError, match="norm of a model to rotate: got Other"):
        rotate_model(model)
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())
    model = model_of("qwen3")
    model.model.layers[0].mlp.router = torch.nn.Linear(4, 4)
    with pytest.raises(OperandError, match=r"block 0 to rotate: got mlp\.router\.bias, mlp\.router\.weight"):
        rotate_model(model)
    with pytest.raises(OperandError, match="model to rotate"):
        rotate_model(torch.nn.Sequential(torch.nn.Linear(2, 2)))

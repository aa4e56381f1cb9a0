"""experts_implementation="cute_nvfp4": experts of transformers' modules as one ``moe``, beside their own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: cute_nvfp4[transformers]")

from cute_nvfp4 import quantize, simulating  # noqa: E402
from cute_nvfp4.errors import OperandError  # noqa: E402
from cute_nvfp4.integrations import transformers as module  # noqa: E402
from cute_nvfp4.nn.routed import experts_of, routed_experts  # noqa: E402

assert module
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2}


def experts(model: str) -> torch.nn.Module:
    """The experts of one layer at random, in bfloat16."""
    torch.manual_seed(0)
    if model == "gpt-oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts

        config = transformers.GptOssConfig(**SIZES, intermediate_size=96, num_local_experts=4)
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Experts

        config = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=96)
    made = Experts(config).eval().bfloat16().requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_(std=0.3)
    return made


def decoded(given: torch.nn.Module) -> torch.nn.Module:
    """The same experts, with the values that their weights have in NVFP4."""
    other = copy.deepcopy(given).float()
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(other, name)
        for w in stack:
            rows = w.T if given.is_transposed else w
            values = quantize(rows.contiguous()).dequantize()
            w.copy_(values.T if given.is_transposed else values)
    return other


def given_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 64, generator=generator).bfloat16()
    scores, ids = torch.randn(7, 4, generator=generator).softmax(-1).topk(2)
    return x, ids, scores


def forward(made: Any, name: str, *rows: torch.Tensor) -> torch.Tensor:
    made.config._experts_implementation = name
    return made(*rows)


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["gpt-oss", "Qwen3"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_experts(model: str, arch: str) -> None:
    made, rows = experts(model), given_rows()
    x, ids, scores = rows
    want = forward(decoded(made), "eager", x.float(), ids, scores)
    with simulating(arch) as runs:
        got = forward(made, "cute_nvfp4", *rows)
    assert "moe_combine" in {run.name for run in runs}
    # on sm_100a x is quantized, too
    most = 0.01 if arch == "sm_90a" else 0.2
    assert got.dtype is torch.bfloat16 and (got - want).norm() < most * want.norm()
    assert not (got.roll(1, 0) - want).norm() < most * want.norm()


def test_weights_that_change() -> None:
    made, rows = experts("Qwen3"), given_rows()
    before = routed_experts(made, *rows)
    assert routed_experts(made, *rows).equal(before)
    made.down_proj.mul_(2)
    assert routed_experts(made, *rows).equal(before * 2)
    assert not any("cute_nvfp4" in name for name in made.state_dict())


def test_refused() -> None:
    made, rows = experts("Qwen3"), given_rows()
    with pytest.raises(OperandError, match=r"dtype of hidden states: got torch\.float32"):
        routed_experts(made, rows[0].float(), *rows[1:])
    made.act_fn = torch.nn.Tanh()
    with pytest.raises(OperandError, match="activation of experts"):
        experts_of(made, torch.bfloat16)
    made.has_post_expert_norm = True
    with pytest.raises(OperandError, match="a norm after each expert"):
        experts_of(made, torch.bfloat16)

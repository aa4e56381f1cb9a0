"""Routers of transformers' mixtures as one ``route``: beside their own forward, and what is left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: cute_nvfp4[transformers]")

from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter  # noqa: E402
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter  # noqa: E402

from cute_nvfp4 import simulating  # noqa: E402
from cute_nvfp4.nn import fuse_routers  # noqa: E402

SIZES = {"hidden_size": 64, "num_experts_per_tok": 3}
ROUTERS = {
    "Qwen3": (Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig(**SIZES, num_experts=9, norm_topk_prob=True)),
    "Qwen2": (Qwen2MoeTopKRouter, transformers.Qwen2MoeConfig(**SIZES, num_experts=9, norm_topk_prob=False)),
    "Mixtral": (MixtralTopKRouter, transformers.MixtralConfig(**SIZES, num_local_experts=9)),
    "gpt-oss": (GptOssTopKRouter, transformers.GptOssConfig(**SIZES, num_local_experts=9)),
}
ROWS = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).bfloat16()


def drawn(made: Any) -> Any:
    generator = torch.Generator().manual_seed(2)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.3).bfloat16()
    return made.eval().requires_grad_(False)


def launches(module: torch.nn.Module, rows: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], list[str]]:
    with simulating("sm_90a") as runs:
        found = module(rows)
    return found, [x.name for x in runs]


@torch.no_grad()
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_gives_what_its_own_forward_gives(name: str) -> None:
    kind, config = ROUTERS[name]
    router = drawn(kind(config))
    want = router(ROWS)
    assert fuse_routers(router) == [""] == fuse_routers(router)
    assert type(router) is kind and list(router.state_dict()) == list(drawn(kind(config)).state_dict())
    for one in (router, copy.deepcopy(router)):
        found, names = launches(one, ROWS)
        assert names == ["moe_route"]
        assert [x.dtype for x in found] == [x.dtype for x in want]
        assert found[0].equal(want[0]) and found[2].equal(want[2])
        torch.testing.assert_close(found[1], want[1], rtol=0.02, atol=0)
    # a copy has its own weight, and without kernels torch runs
    assert all(x.equal(y) for x, y in zip(router(ROWS), want))


def test_what_is_no_such_router_stays() -> None:
    class Half(Qwen3MoeTopKRouter):
        """Its weights are half of those of ``route``."""

        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits, weights, ids = super().forward(hidden_states)
            return logits, weights / 2, ids

    config = ROUTERS["Qwen3"][1]
    hooked = drawn(Qwen3MoeTopKRouter(config))
    hooked.forward = lambda x: Qwen3MoeTopKRouter.forward(hooked, x)
    others = torch.nn.ModuleList([drawn(Half(config)), torch.nn.Linear(64, 9), torch.nn.Embedding(9, 64), hooked])
    assert fuse_routers(others) == []


def test_a_gradient_is_followed_by_torch() -> None:
    router = drawn(Qwen3MoeTopKRouter(ROUTERS["Qwen3"][1]))
    fuse_routers(router)
    rows = ROWS.clone().requires_grad_()
    found, names = launches(router, rows)
    assert names == [] and found[1].requires_grad
    assert launches(router, ROWS)[1] == ["moe_route"]

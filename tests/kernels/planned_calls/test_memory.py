"""A plan outlives the call that it was made for, and keeps none of its tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import cute_nvfp4 as nv

pytestmark = pytest.mark.sim_only("memory of a GPU is reused, and its storages are found by no other name")
K, N = 256, 128


def product() -> Iterator[torch.Tensor]:
    x, weight = torch.randn(3, K).bfloat16(), nv.prepare_weight(nv.quantize(torch.randn(N, K)))
    yield from (x, weight.packed, nv.gemm(x, weight))


def packed() -> Iterator[torch.Tensor]:
    weight = nv.quantize(torch.randn(N, K))
    yield from (weight.data, weight.scale, nv.prepare_weight(weight).packed)


def quantized() -> Iterator[torch.Tensor]:
    x = torch.randn(5, K).bfloat16()
    found = nv.quantize(x)
    yield from (x, found.data, found.scale)


def routed() -> Iterator[torch.Tensor]:
    logits = torch.randn(3, 16)
    yield from (logits, *nv.route(logits, 4))


def experts() -> Iterator[torch.Tensor]:
    sizes = (4, 2 * N, N), (4, N, N)
    made = nv.prepare_experts(*(nv.quantize(torch.randn(size)) for size in sizes))
    x, ids, weights = torch.randn(1, N).bfloat16(), torch.tensor([[0, 2]], dtype=torch.int32), torch.rand(1, 2)
    yield from (x, ids, weights, made.down.packed, nv.moe(x, ids, weights, made))


@pytest.mark.parametrize("call", [product, packed, quantized, routed, experts])
def test_a_plan_keeps_no_tensor_of_its_first_call(call: Callable[[], Iterator[torch.Tensor]]) -> None:
    """Neither what it read nor what it gave: torch.compile's CUDA graphs refuse memory that outlives a call."""
    with nv.simulating("sm_90a"):
        places = [StorageWeakRef(x.untyped_storage()) for x in call()]
        gc.collect()
        assert len(places) >= 3 and all(place.expired() for place in places)

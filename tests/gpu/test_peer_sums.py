"""Sums by stores into a peer's memory, on one GPU: two streams are two ranks, whose kernels wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cute_nvfp4.kernels.peers.config import SLOTS, VECTOR_BYTES
from cute_nvfp4.ops.peer_sum import PeerMemory, empty_memory, peer_sum, state_of

pytestmark = [pytest.mark.gpu, pytest.mark.kernels("sm_90a", "sm_100a", "sm_120a")]
MOST = 1 << 20


class TwoStreams:
    """Two ranks on one GPU."""

    def __init__(self, early: bool) -> None:
        device = torch.device("cuda", torch.cuda.current_device())

        def new(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=torch.bfloat16, device=device)

        received = tuple(empty_memory(MOST, 2, new) for _ in range(2))
        self.memory = [PeerMemory(received, rank, state_of(device), early) for rank in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.load(new)

    def load(self, new: Callable[..., torch.Tensor]) -> None:
        """Calls each rank's kernel once when all terms have already arrived. The driver may wait for a running kernel
        before it loads another, so that no kernel can be loaded while one waits for the other. Ranks on separate GPUs
        need no such call."""
        come, x = tuple(new(SLOTS, 2, VECTOR_BYTES).zero_() for _ in range(2)), new(VECTOR_BYTES).zero_() * 0.5
        for memory in self.memory:
            peer_sum(x, replace(memory, received=come, state=state_of(x.device)))
        torch.cuda.synchronize()

    def sums(self, rows: list[torch.Tensor], calls: int = 1) -> list[torch.Tensor]:
        """The result of each rank; of several calls, each adds the halved result of the preceding one."""
        here, found = torch.cuda.current_stream(), list(rows)
        for rank, stream in enumerate(self.streams):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                for call in range(calls):
                    found[rank] = peer_sum(found[rank] * 0.5 if call else found[rank], self.memory[rank])
        for stream in self.streams:
            here.wait_stream(stream)
        return found


def drawn(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    both = torch.randn(2, count, device="cuda", generator=generator).bfloat16()
    # received memory holds words of all ones before anything arrives
    both.view(torch.int32)[:, :: 1 + seed % 7] = -1
    return list(both)


@pytest.mark.parametrize("early", [False, True])
def test_sums_of_many_sizes(early: bool) -> None:
    ranks = TwoStreams(early)
    for call, count in enumerate((8, 4096, MOST, 5120, MOST // 2, 640, 8, 128 * 5120) * 20):
        rows = drawn(count, call)
        want = (rows[0].float() + rows[1].float()).bfloat16()
        for found in ranks.sums(rows):
            assert torch.equal(found.nan_to_num(), want.nan_to_num()) and torch.equal(found.isnan(), want.isnan())


@pytest.mark.parametrize("early", [False, True])
def test_a_graph_of_an_odd_number_of_calls(early: bool) -> None:
    """Replayed over NaN: slots of memory take turns across replays."""
    ranks = TwoStreams(early)
    rows = [x.nan_to_num() for x in drawn(128 * 640, 0)]
    want = ranks.sums(rows, calls=3)
    assert want[0].equal(want[1]) and want[0].equal((rows[0].float() + rows[1].float()).bfloat16())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ranks.sums(rows, calls=3)
    for _ in range(300):
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        assert all(x.equal(want[0]) for x in found)

"""The sum of rows over the GPUs of a host, by the kernel of ``kernels.peers``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.peers.config import EMPTY, SLOTS, VECTOR_BYTES, PeerSumArguments, PeerSumConfig, can_implement
from ..lazy import Lazily
from ..runtime.backend import resolve, sm_count
from ..runtime.kernel import Kernel
from .checks import DTYPE_NAMES

KERNEL = Kernel("peer_sum", PeerSumArguments, Lazily("kernels.peers.sum", "PeerSum"), can_implement)


@dataclass(frozen=True)
class PeerMemory:
    """What a rank's sums use. received: (SLOTS, ranks, elements) of each rank, in one another's reach. state: (CTAs, 2)
    int32 of this rank."""

    received: tuple[torch.Tensor, ...]
    rank: int
    state: torch.Tensor
    early: bool = False


def empty_memory(elements: int, ranks: int, new: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A rank's memory for what it is sent, to which nobody has written. new: makes it, of 16-bit elements."""
    found = new(SLOTS, ranks, elements)
    found.view(torch.int16).fill_(EMPTY - (1 << 32))
    return found


def state_of(device: torch.device) -> torch.Tensor:
    """The state before the first call: as many CTAs as there are multiprocessors."""
    return torch.zeros(sm_count(resolve("auto", device), device), 2, dtype=torch.int32, device=device)


def peer_sum(y: torch.Tensor, memory: PeerMemory) -> torch.Tensor:
    """The sum over the ranks of y, contiguous and of at most as many elements: a new tensor."""
    out, target = torch.empty_like(y), resolve("auto", y.device)
    received, rank = memory.received, memory.rank
    config = PeerSumConfig(
        ranks=len(received), rank=rank, dtype=DTYPE_NAMES[y.dtype], early=memory.early, arch=target.arch
    )
    arguments = PeerSumArguments(
        y=y.data_ptr(),
        out=out.data_ptr(),
        received=tuple(x.data_ptr() for x in received),
        state=memory.state.data_ptr(),
        part_bytes=received[rank].stride(1) * received[rank].element_size(),
        vectors=y.numel() * y.element_size() // VECTOR_BYTES,
        ctas=len(memory.state),
    )

    def touched() -> dict[str, tuple[torch.Tensor, bool]]:
        of_ranks = {f"received of rank {r}": (x, True) for r, x in enumerate(received)}
        return of_ranks | {"y": (y, False), "out": (out, True), "state": (memory.state, True)}

    KERNEL.run(config, target, y.device, arguments, touched)
    return out

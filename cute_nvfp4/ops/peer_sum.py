"""Adds rows over the GPUs of a host, by the kernel of ``kernels.peers``, and defines the operator that traces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.peers.config import EMPTY, SLOTS, VECTOR_BYTES, PeerSumArguments, PeerSumConfig, can_implement
from ..lazy import Lazily
from ..runtime.backend import resolve, sm_count
from ..runtime.kernel import Kernel
from .checks import DTYPE_NAMES
from .dispatch import recording
from .operator import LIBRARY, NAMESPACE, TAGS

KERNEL = Kernel("peer_sum", PeerSumArguments, Lazily("kernels.peers.sum", "PeerSum"), can_implement)


@dataclass(frozen=True)
class PeerMemory:
    """The memory that a rank's sums use.

    received: (SLOTS, ranks, elements) of each rank; every rank can write all of them. state: (CTAs, 2) int32 of this
    rank. early: as in ``PeerSums``.
    """

    received: tuple[Tensor, ...]
    rank: int
    state: Tensor
    early: bool = False


def empty_memory(elements: int, ranks: int, new: Callable[..., Tensor]) -> Tensor:
    """Memory for what a rank receives, marked as empty. new: makes a tensor of this shape with 16-bit elements."""
    found = new(SLOTS, ranks, elements)
    found.view(torch.int16).fill_(EMPTY - (1 << 32))
    return found


def state_of(device: torch.device) -> Tensor:
    """The state before the first call, for CTAs on every other multiprocessor.

    The next launch may start on the rest: its CTAs have too many registers to run beside these.
    """
    ctas = max(sm_count(resolve("auto", device), device) // 2, 1)
    return torch.zeros(ctas, 2, dtype=torch.int32, device=device)


def peer_sum(y: Tensor, memory: PeerMemory) -> Tensor:
    """The sum of y over the ranks, a new tensor. y: contiguous, with at most as many elements as the memory."""
    options = memory.received, memory.state, memory.rank, memory.early
    return torch.ops.cute_nvfp4.peer_sum(y, *options) if recording() else _run(y, *options)


def _run(y: Tensor, received: Sequence[Tensor], state: Tensor, rank: int, early: bool) -> Tensor:
    out, target = torch.empty_like(y), resolve("auto", y.device)
    config = PeerSumConfig(ranks=len(received), rank=rank, dtype=DTYPE_NAMES[y.dtype], early=early, arch=target.arch)
    arguments = PeerSumArguments(
        y=y.data_ptr(),
        out=out.data_ptr(),
        received=tuple(x.data_ptr() for x in received),
        state=state.data_ptr(),
        part_bytes=received[rank].stride(1) * received[rank].element_size(),
        vectors=y.numel() * y.element_size() // VECTOR_BYTES,
        ctas=len(state),
    )

    def touched() -> dict[str, tuple[Tensor, bool]]:
        of_ranks = {f"received of rank {r}": (x, True) for r, x in enumerate(received)}
        return of_ranks | {"y": (y, False), "out": (out, True), "state": (state, True)}

    KERNEL.run(config, target, y.device, arguments, touched)
    return out


LIBRARY.define("peer_sum(Tensor y, Tensor(a!)[] received, Tensor(b!) state, int rank, bool early) -> Tensor", tags=TAGS)
LIBRARY.impl("peer_sum", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::peer_sum", lambda y, *_: torch.empty_like(y), lib=LIBRARY)

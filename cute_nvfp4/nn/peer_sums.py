"""All-reduces of small results in one launch, whose data say themselves that they have come: NCCL's take longer."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cute_nvfp4.errors import OperandError
from cute_nvfp4.ops.peer_sum import PeerMemory, empty_memory, peer_sum, state_of


class PeerSums:
    """Sums over the GPUs of one host in one launch: each writes its rows into the others' memory, and adds what comes.

    It needs GPUs that reach one another's memory, and no NVLink multicast. All ranks add in the same order and get the
    same bits. One object serves all layers of a model, whose calls follow one another on a stream. Every rank makes
    it, and calls it in the same order. A CUDA graph records a call, and may be replayed by all ranks.

    elements: of the largest result, a multiple of 8; larger ones are not for it (``holds``). It keeps three times as
    much memory for each rank. early: whether a call may start while the launch before it still runs. It waits for that
    launch, and lets the one after it start, which may be a product whose plan is ``early()``.

    Raises:
        OperandError: a dtype without 16 bits, elements that are no multiple of 8, or a device that is no GPU.
    """

    def __init__(
        self,
        elements: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        early: bool = False,
    ) -> None:
        place = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        if place.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            raise OperandError.of("sums by peers", got=f"{dtype} on {place}", expected="16-bit floats on a GPU")
        if elements % 8 or elements < 8:
            raise OperandError.of("elements of sums by peers", got=elements, expected="a multiple of 8")
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD if group is None else group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.dtype, self.device, self.elements = dtype, place, elements
        own = empty_memory(elements, ranks, lambda *size: symmetric.empty(*size, dtype=dtype, device=place))
        handle = symmetric.rendezvous(own, group.group_name)
        received = [own if r == rank else handle.get_buffer(r, own.shape, dtype) for r in range(ranks)]
        self.memory = PeerMemory(tuple(received), rank, state_of(place), early)
        torch.cuda.synchronize(place)
        # no rank sends anything before all memory is empty
        dist.barrier(group)

    def holds(self, y: torch.Tensor) -> bool:
        """Whether it can add tensors like y: contiguous, of its dtype and device, and in multiples of 16 bytes."""
        fits = y.numel() <= self.elements and y.numel() % 8 == 0 and y.is_contiguous()
        return fits and y.dtype is self.dtype and y.device == self.device and y.data_ptr() % 16 == 0

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of y, which ``holds`` says it can add: a new tensor."""
        return peer_sum(y, self.memory)

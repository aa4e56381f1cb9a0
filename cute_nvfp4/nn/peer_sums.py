"""All-reduces of small results in one launch, in which the data themselves say that they arrived; NCCL takes longer."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cute_nvfp4.errors import OperandError
from cute_nvfp4.ops.peer_sum import PeerMemory, empty_memory, peer_sum, state_of


class PeerSums:
    """Adds over the GPUs of one host in one launch: each writes its rows to the others' memory and adds what arrives.

    It needs GPUs that reach one another's memory, and no NVLink multicast. All ranks add in the same order and get the
    same bits. One object serves all layers of a model, whose calls follow one another on a stream. Every rank makes
    it, and calls it in the same order. A CUDA graph records a call, and may be replayed by all ranks.

    elements: those of the largest result, a multiple of 8; it does not hold larger ones (``holds``). It keeps three
    times as much memory for each rank. early: whether a call may start while the launch before it still runs. It waits
    for that launch, and lets the next one start, which may be a product whose plan is ``early()``.

    Raises:
        OperandError: the dtype is not one of 16 bits, elements are no multiple of 8, or the device is no GPU.
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
        gpu = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        if gpu.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            raise OperandError.of("sums by peers", got=f"{dtype} on {gpu}", expected="16-bit floats on a GPU")
        if elements % 8 or elements < 8:
            raise OperandError.of("elements of sums by peers", got=elements, expected="a multiple of 8")
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD if group is None else group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.dtype, self.device, self.elements = dtype, gpu, elements
        own = empty_memory(elements, ranks, lambda *size: symmetric.empty(*size, dtype=dtype, device=gpu))
        handle = symmetric.rendezvous(own, group.group_name)
        received = [own if r == rank else handle.get_buffer(r, own.shape, dtype) for r in range(ranks)]
        self.memory = PeerMemory(tuple(received), rank, state_of(gpu), early)
        torch.cuda.synchronize(gpu)
        # no rank may send before all memory is marked as empty
        dist.barrier(group)

    def holds(self, y: torch.Tensor) -> bool:
        """Whether it can add tensors like y: contiguous, of its dtype and device, and in multiples of 16 bytes."""
        fits = y.numel() <= self.elements and y.numel() % 8 == 0 and y.is_contiguous()
        return fits and y.dtype is self.dtype and y.device == self.device and y.data_ptr() % 16 == 0

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of y over the ranks, a new tensor; ``holds(y)`` must be true."""
        return peer_sum(y, self.memory)

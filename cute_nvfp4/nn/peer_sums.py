"""All-reduces of small results by loads of the other ranks' memory: one kernel, where NCCL's ring takes longer."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cute_nvfp4.errors import OperandError


class PeerSums:
    """Sums over the GPUs of one host in one launch, torch's one-shot all-reduce: each loads what the others have.

    It needs GPUs that reach one another's memory, and no NVLink multicast. One object with one buffer serves all layers
    of a model, whose calls follow one another on a stream. Every rank makes it, and calls it in the same order. A CUDA
    graph records a call.

    elements: of the largest result; larger ones are not for it (``holds``).

    Raises:
        OperandError: a dtype without 16 bits, or a device that is no GPU.
    """

    def __init__(
        self,
        elements: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        place = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        if place.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            raise OperandError.of("sums by peer loads", got=f"{dtype} on {place}", expected="16-bit floats on a GPU")
        import torch.distributed._symmetric_memory as symmetric

        self.group_name = (dist.group.WORLD if group is None else group).group_name
        self.buffer = symmetric.empty(elements, dtype=dtype, device=place)
        symmetric.rendezvous(self.buffer, self.group_name)

    def holds(self, y: torch.Tensor) -> bool:
        """Whether it can add tensors like y: contiguous, of its dtype and device, and in multiples of 16 bytes."""
        fits = y.numel() <= self.buffer.numel() and y.numel() % 8 == 0 and y.is_contiguous()
        return fits and y.dtype is self.buffer.dtype and y.device == self.buffer.device and y.data_ptr() % 16 == 0

    def place(self, *shape: int) -> torch.Tensor:
        """A view of the buffer, for a product to write its result to: what is added from there is not copied."""
        return self.buffer[: torch.Size(shape).numel()].view(shape)

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of y, which is in ``place`` or anywhere else: a new tensor."""
        place, name = self.place(*y.shape), self.group_name
        if y.data_ptr() == place.data_ptr():
            return torch.ops.symm_mem.one_shot_all_reduce(place, "sum", name)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(place, y, "sum", name)

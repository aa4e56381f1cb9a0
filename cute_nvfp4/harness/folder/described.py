"""A folder's problem in the submission's process: tensors by name and size, from which it builds the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..problem import Buffer
from ..schema import Case
from .structure import Leaf, put_together

NAME = "a folder"
"""The submission's process gets this in place of a problem's name."""
STRUCTURE = "structure"
"""The name of the buffer with the pickle that refers to the other buffers."""


class Described:
    """A problem whose case is ``{"sizes": [[name, bytes], …]}``. Its outputs are whatever ``custom_kernel`` returns."""

    name = NAME

    def buffers(self, case: Case) -> list[Buffer]:
        return [Buffer(name, (nbytes,), "uint8") for name, nbytes in case["sizes"]]

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        """An empty list: ``custom_kernel``'s return value defines the outputs."""
        return []

    def views(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The ``data`` of ``generate_input``, over the buffers; a tensor that was on the CPU is copied to it."""

        def tensor(leaf: Leaf) -> torch.Tensor:
            found = tensors[leaf.name].view(getattr(torch, leaf.dtype)).as_strided(leaf.shape, leaf.stride)
            found = found.cpu() if leaf.host else found
            return torch.nn.Parameter(found, requires_grad=False) if leaf.parameter else found

        return put_together(tensors[STRUCTURE].cpu().numpy().tobytes(), tensor)


DESCRIBED = Described()

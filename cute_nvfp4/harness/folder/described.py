"""A folder's problem as the submission's process has it: tensors by name and size, and how data is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..problem import Buffer
from ..schema import Case
from .structure import Leaf, put_together

NAME = "a folder"
"""What the submission's process is told in place of a problem's name."""
STRUCTURE = "structure"
"""The buffer with the pickle that refers to the others."""


class Described:
    """A problem whose case is ``{"sizes": [[name, bytes], …]}``; its outputs are whatever ``custom_kernel`` returns."""

    name = NAME

    def buffers(self, case: Case) -> list[Buffer]:
        return [Buffer(name, (nbytes,), "uint8") for name, nbytes in case["sizes"]]

    def output_shapes(self, case: Case) -> list[tuple[tuple[int, ...], str]]:
        """None: what is returned says it."""
        return []

    def views(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The ``data`` that ``generate_input`` has made, over the buffers; what it left on the CPU is a copy there."""

        def tensor(leaf: Leaf) -> torch.Tensor:
            found = tensors[leaf.name].view(getattr(torch, leaf.dtype)).as_strided(leaf.shape, leaf.stride)
            found = found.cpu() if leaf.host else found
            return torch.nn.Parameter(found, requires_grad=False) if leaf.parameter else found

        return put_together(tensors[STRUCTURE].cpu().numpy().tobytes(), tensor)


DESCRIBED = Described()

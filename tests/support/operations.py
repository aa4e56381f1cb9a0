"""Writes down every torch operation of a block: what a call costs, counted."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """``names``: the operations so far, ``aten.empty.memory_format`` and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

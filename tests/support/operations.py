"""Records every torch operation of a block, so that tests can count what a call costs."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """A mode that records operations. names: the operations so far, ``aten.empty.memory_format`` and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

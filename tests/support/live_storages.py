"""Counts how many bytes of tensors are alive at once, among the tensors that torch's operations read and make."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """A mode in which ``peak`` is the most bytes of storages that were alive after one of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(args, kwargs, result)
        return result

    def note(self, *values: Any) -> None:
        """Counts the tensors in ``values``, and forgets storages that are gone."""
        self._live = {place: found for place, found in self._live.items() if not found[0].expired()}
        for x in tree_leaves(values):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                storage = x.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))

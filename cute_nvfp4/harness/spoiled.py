"""Inputs with wrong elements until the clock starts. A call that reads them earlier, on a stream that does not wait for
the caller's, gives wrong results."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .arena import Slot

PLACES = 64
"""Wrong elements of each input, at secret places: without reading the whole input, a submission cannot avoid them."""
_SIGN, _BIT = 0x80, 0x08
"""The bits that are changed: the sign of an element of more than one byte; in a byte, the last exponent bit of an E4M3
scale, which also is the sign of one of two E2M1 codes."""
_MASKS = {"float64": _SIGN, "float32": _SIGN, "float16": _SIGN, "bfloat16": _SIGN, "uint8": _BIT}
"""The changed bit by a buffer's dtype; 4- and 8-bit floats are stored as bytes."""

# Bound before a submission is imported: see integrity.py.
_select, _write = torch.Tensor.index_select, torch.Tensor.index_copy_
_xor, _to, _tensor = torch.Tensor.bitwise_xor, torch.Tensor.to, torch.tensor
_random = secrets.SystemRandom().randrange


class Spoiled(NamedTuple):
    """Changed bytes of ``block``, and their right values. ``mend`` queues one copy on the current stream."""

    block: torch.Tensor
    places: torch.Tensor
    right: torch.Tensor

    def mend(self) -> None:
        _write(self.block, 0, self.places, self.right)


def spoil(block: torch.Tensor, inputs: Sequence[Slot], starts: Sequence[int]) -> Spoiled:
    """Changes elements of each input in the part of ``block`` (bytes) of every call. starts: where the parts begin.

    Integers of more than one byte and booleans stay right: they may be indices.
    """
    places, masks = [], []
    for start in starts:
        for slot in inputs:
            name = slot.buffer.dtype
            size = getattr(torch, name).itemsize
            if name in _MASKS:
                # the sign is in the last byte of an element
                chosen = {_random(slot.nbytes // size) for _ in range(PLACES if slot.nbytes else 0)}
                places += [start + slot.offset + (element + 1) * size - 1 for element in sorted(chosen)]
                masks += [_MASKS[name]] * len(chosen)
    at = _to(_tensor(places, dtype=torch.int64), block.device)
    right = _select(block, 0, at)
    _write(block, 0, at, _xor(right, _to(_tensor(masks, dtype=torch.uint8), block.device)))
    return Spoiled(block, at, right)

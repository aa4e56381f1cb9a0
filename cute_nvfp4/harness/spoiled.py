"""Inputs that are wrong until the clock starts: a call that reads them before, on a stream that does not wait for the
caller's, gives wrong elements."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .arena import Slot

PLACES = 64
"""Elements of each input that are wrong. One that nobody knows of cannot be mended without a look at all."""
_SIGN, _BIT = 0x80, 0x08
"""What is changed: the sign of a number of more than a byte; of a byte the last bit of an E4M3 scale's exponent, or the
sign of one of two codes."""
_MASKS = {"float64": _SIGN, "float32": _SIGN, "float16": _SIGN, "bfloat16": _SIGN, "uint8": _BIT}
"""By the dtype of a buffer: floating-point numbers of 4 and 8 bits are stored as bytes."""

# Taken before a submission is imported: see integrity.py.
_select, _write = torch.Tensor.index_select, torch.Tensor.index_copy_
_xor, _to, _tensor = torch.Tensor.bitwise_xor, torch.Tensor.to, torch.tensor
_random = secrets.SystemRandom().randrange


class Spoiled(NamedTuple):
    """Bytes of ``block``, and what belongs there. ``mend`` queues one copy on the current stream."""

    block: torch.Tensor
    places: torch.Tensor
    right: torch.Tensor

    def mend(self) -> None:
        _write(self.block, 0, self.places, self.right)


def spoil(block: torch.Tensor, inputs: Sequence[Slot], starts: Sequence[int]) -> Spoiled:
    """Changes elements of each of the inputs, in every call's part of ``block`` (bytes), which begin at ``starts``.

    Integers of more than a byte and truth values stay right: they may be indices.
    """
    places, masks = [], []
    for start in starts:
        for slot in inputs:
            name = slot.buffer.dtype
            size = getattr(torch, name).itemsize
            if name in _MASKS:
                # the last byte of a number has its sign
                chosen = {_random(slot.nbytes // size) for _ in range(PLACES if slot.nbytes else 0)}
                places += [start + slot.offset + (element + 1) * size - 1 for element in sorted(chosen)]
                masks += [_MASKS[name]] * len(chosen)
    at = _to(_tensor(places, dtype=torch.int64), block.device)
    right = _select(block, 0, at)
    _write(block, 0, at, _xor(right, _to(_tensor(masks, dtype=torch.uint8), block.device)))
    return Spoiled(block, at, right)

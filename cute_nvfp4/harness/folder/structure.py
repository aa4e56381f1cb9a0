"""Takes data and outputs of any structure apart into tensors, and puts them together again.

Data travels from the folder's process to the submission's as a pickle that refers to tensors by name: whatever
``generate_input`` makes arrives, and the judge never reads it. Outputs travel the other way, from a process that nobody
trusts, as plain JSON of lists, tuples, dictionaries, scalars and tensors.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_DEEPEST = 16
_SCALARS = (bool, int, float, str, type(None))
_KINDS = (torch.Tensor, dict, tuple, list)


class Leaf(NamedTuple):
    """A tensor of ``data``: the buffer that has its bytes, and its layout there. host: it is on the CPU, whatever the
    device; parameter: it is a ``torch.nn.Parameter``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    host: bool
    parameter: bool


def taken_apart(data: Any, leaf: Callable[[torch.Tensor], Leaf]) -> bytes:
    """A pickle of ``data`` that has ``leaf(tensor)`` in place of each tensor. Raises what ``pickle`` raises."""
    seen: dict[int, tuple[Leaf, torch.Tensor]] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> tuple | None:
            if not isinstance(value, torch.Tensor):
                return None
            if id(value) not in seen:
                seen[id(value)] = leaf(value), value
            return tuple(seen[id(value)][0])

    file = io.BytesIO()
    Pickler(file).dump(data)
    return file.getvalue()


def put_together(pickled: bytes, tensor: Callable[[Leaf], torch.Tensor]) -> Any:
    """The data that ``taken_apart`` pickled, with ``tensor(leaf)`` in place of each leaf."""
    made: dict[str, torch.Tensor] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, leaf: tuple) -> torch.Tensor:
            found = Leaf(*leaf)
            if found.name not in made:  # a tensor is one object, wherever the data has it
                made[found.name] = tensor(found)
            return made[found.name]

    return Unpickler(io.BytesIO(pickled)).load()


def paths(data: Any, where: str = "data", depth: int = 0) -> dict[int, str]:
    """The place of each tensor in lists, tuples and dictionaries, as Python writes it (``data[0]``), by tensor id."""
    if isinstance(data, torch.Tensor):
        return {id(data): where}
    if depth > _DEEPEST:
        return {}
    if isinstance(data, dict):
        parts = [(f"{where}[{key!r}]", value) for key, value in data.items()]
    elif isinstance(data, (list, tuple)):
        parts = [(f"{where}[{index}]", value) for index, value in enumerate(data)]
    else:
        parts = []
    found: dict[int, str] = {}
    for place, value in parts:
        found = paths(value, place, depth + 1) | found
    return found


def flattened(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """``output`` as JSON, and its tensors, to which the JSON refers by index.

    Raises:
        TypeError: the output has something other than tensors, scalars, lists, tuples and dictionaries.
    """
    tensors: list[torch.Tensor] = []

    def described(value: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise TypeError(f"an output that is nested more than {_DEEPEST} times")
        # neither isinstance nor the value's methods: a class of the submission would run its code, after the clock
        kind = next((kind for kind in _KINDS if issubclass(type(value), kind)), None)
        if kind is torch.Tensor:
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if kind is dict:
            return {"dict": [[key, described(part, depth + 1)] for key, part in dict.items(value)]}
        if kind is not None:
            return {kind.__name__: [described(part, depth + 1) for part in kind.__iter__(value)]}
        if type(value) in _SCALARS:
            return {"value": value}
        raise TypeError(f"custom_kernel returned a {type(value).__name__}, expected tensors, or a list of them")

    return described(output, 0), tensors


def rebuilt(described: Any, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    """The output that ``flattened`` described. Raises ``ValueError`` for anything else."""
    if not isinstance(described, dict) or len(described) != 1 or depth > _DEEPEST:
        raise ValueError("not the description of an output")
    ((kind, value),) = described.items()
    if kind == "tensor" and isinstance(value, int) and 0 <= value < len(tensors):
        return tensors[value]
    if kind == "value" and type(value) in _SCALARS:
        return value
    if kind == "dict" and isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        if all(type(key) in _SCALARS for key, _ in value):
            return {key: rebuilt(part, tensors, depth + 1) for key, part in value}
    if kind in ("list", "tuple") and isinstance(value, list):
        parts = [rebuilt(part, tensors, depth + 1) for part in value]
        return tuple(parts) if kind == "tuple" else parts
    raise ValueError("not the description of an output")

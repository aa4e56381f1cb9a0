"""Makes records of tensors nodes of torch's trees, so that ``torch.export`` takes them as arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from cute_nvfp4.formats import FORMATS, Format


def register(cls: type, tensors: Sequence[str]) -> None:
    """Makes ``cls``, a frozen dataclass of tensors (or None) and a ``format``, a node: its tensors are the leaves.

    torch.export.register_dataclass would make the format a leaf. A record that is rebuilt from tensors is checked as
    any other; one that is rebuilt from other leaves (shapes, devices) is not.
    """

    def present(x: Any) -> tuple[str, ...]:
        return tuple(name for name in tensors if getattr(x, name) is not None)

    def flatten(x: Any) -> tuple[list[Any], Any]:
        # constants only, because that is what a compiler keeps of a tree
        return [getattr(x, name) for name in present(x)], (present(x), tuple(getattr(x.format, f) for f in _FIELDS))

    def flatten_with_keys(x: Any) -> tuple[list[Any], Any]:
        leaves, context = flatten(x)
        return [(_pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves)], context

    def unflatten(leaves: Iterable[Any], context: Any) -> Any:
        names, format = context
        values = dict.fromkeys(tensors) | dict(zip(names, leaves)) | {"format": _format(format)}
        if all(isinstance(values[name], torch.Tensor) for name in names):
            return cls(**values)
        bare = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(bare, name, value)
        return bare

    # an exported program keeps its example arguments, and torch loads only classes that it was told of
    torch.serialization.add_safe_globals([cls, Format])
    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"cute_nvfp4.{cls.__name__}",
        to_dumpable_context=lambda context: [list(part) for part in context],
        from_dumpable_context=lambda dumped: tuple(tuple(part) for part in dumped),
        flatten_with_keys_fn=flatten_with_keys,
    )


_FIELDS = tuple(field.name for field in dataclasses.fields(Format))


def _format(fields: tuple) -> Format:
    """The format of these fields: the package's own object, if it is one of its formats."""
    format = Format(*fields)
    known = FORMATS.get(format.name)
    return known if known == format else format

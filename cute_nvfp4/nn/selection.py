"""Selects the linear layers of a model that are quantized, and says why others are not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from cute_nvfp4.errors import OperandError


class Selection(dict[str, torch.nn.Linear]):
    """The layers to quantize by name, in the model's order. skipped: the reason why each other layer stays."""

    skipped: dict[str, str]


def select_linears(model: torch.nn.Module, ignore: Sequence[str] = (), *, untie: bool = False) -> Selection:
    """The ``torch.nn.Linear`` layers of a model, except those that ``ignore`` names.

    ignore: patterns as in a shell ("*.self_attn.*"), or, as compressed-tensors writes them, regular expressions that
        match from the beginning ("re:.*gate$"). A pattern that matches nothing is an error.
    untie: also takes layers that share their weight with another module, as a language model's head often does with its
        embedding; the other module keeps it unchanged.

    Raises:
        OperandError: a pattern matches nothing, nothing is left to quantize, or the model itself is a linear layer,
            which cannot be replaced in place.
    """
    if isinstance(model, torch.nn.Linear):
        hint = "NVFP4Linear.from_linear makes a layer of one."
        raise OperandError.of("model", got="a linear layer", expected="a module that holds some", hint=hint)
    found, unused = Selection(), dict.fromkeys(ignore)
    found.skipped = {}
    owners: dict[int, list[str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for name, module in modules.items():
        patterns = [pattern for pattern in ignore if matches(name, pattern)]
        for pattern in patterns:
            unused.pop(pattern, None)
        if not isinstance(module, torch.nn.Linear):
            continue
        others = [owner for owner in owners[id(module.weight)] if owner != name]
        if patterns:
            found.skipped[name] = f"ignored: {patterns[0]}"
        elif type(module) is not torch.nn.Linear:
            found.skipped[name] = f"a {type(module).__name__}, which may do more than a product"
        elif others and not untie:
            found.skipped[name] = f"its weight is that of {', '.join(others)}, too"
        else:
            found[name] = module
    if unused:
        raise OperandError.of("ignore", got=f"{list(unused)}, which match no module", expected="names of modules")
    if not found:
        raise OperandError.of("model", got="no linear layer to quantize", expected="one", hint=f"{found.skipped}")
    return found


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of an ignore list matches the module ``name``, or a module that contains it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))

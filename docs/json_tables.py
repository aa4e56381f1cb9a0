"""The reference page of ``--json`` outputs: each output's fields, and each record within them once."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from cute_nvfp4.cli.json_schema import SCHEMAS, in_words, within

if TYPE_CHECKING:
    from pydantic import BaseModel


def outputs() -> str:
    """The command of each output, and the output's fields."""
    lines = []
    for name, (command, model) in SCHEMAS.items():
        lines += [f"### {name}", "", f"`cute-nvfp4 {command}`", "", *_shown(model())]
    return "\n".join(lines)


def records() -> str:
    """The records within outputs, by name. Raises ValueError if two different records have the same name."""
    found: dict[str, list[str]] = {}
    for _, model in SCHEMAS.values():
        for inner in within(model()):
            text = _shown(inner)
            if found.setdefault(inner.__name__, text) != text:
                raise ValueError(f"two records are called {inner.__name__}")
    return "\n".join(line for name in sorted(found) for line in (f"### {name}", "", *found[name]))


def _shown(model: type[BaseModel]) -> list[str]:
    """A model's docstring and its fields."""
    about = re.sub(r":\w+:`([^`]*)`", r"`\1`", inspect.cleandoc(model.__doc__ or "")).replace("``", "`")
    return [about, "", "```text", *in_words(model), "```", ""]

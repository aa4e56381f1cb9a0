"""The Sphinx directive that writes the reference from the code: the public names of a module."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import cute_nvfp4

_KINDS = (
    ("autofunction", inspect.isfunction),
    ("autoclass", inspect.isclass),
    ("autodata", lambda value: True),
)


def public(module: str, kind: str) -> Iterator[str]:
    """Yields directives of autodoc for the public names of ``module`` that are functions, classes or constants.

    module: a module with ``__all__``; without it, all names that the module defines and that have no underscore count.
    kind: "functions", "classes" or "constants".
    """
    found = importlib.import_module(module)
    own = [n for n, v in vars(found).items() if not n.startswith("_") and getattr(v, "__module__", "") == module]
    wanted = _KINDS[("functions", "classes", "constants").index(kind)][0]
    for name in getattr(found, "__all__", own):
        value = getattr(found, name)
        directive = next(directive for directive, fits in _KINDS if fits(value))
        elsewhere = module != "cute_nvfp4" and name in cute_nvfp4.__all__
        if directive != wanted or elsewhere or name.startswith("__"):
            continue
        yield from ("```{eval-rst}", f".. {directive}:: {module}.{name}")
        if inspect.isclass(value) and issubclass(value, BaseException):
            yield "   :no-members:"
        yield from ("```", "")


class _Public(SphinxDirective):
    """The directive that inserts the Markdown of ``public``."""

    required_arguments, optional_arguments = 0, 2

    def run(self) -> list[nodes.Node]:
        """The nodes of the inserted text."""
        node = nodes.container()
        lines = [line for text in public(*self.arguments) for line in text.split("\n")]
        self.state.nested_parse(StringList(lines, source=self.env.docname), self.content_offset, node)
        return node.children


_ENTRY = re.compile(r"(\w+)(?:, \w+)*: ")
_MARKUP = re.compile(r"(?<![\w*])\|(?=\S)|(?<=\S)\|(?![\w*])|(?<=[\"'(])\*(?=\.)")
_BULLET = re.compile(r"(\s*)[*-] ")


def as_restructured_text(lines: list[str], names: set[str]) -> list[str]:
    """Converts a docstring of this package to reStructuredText with sections in Google's style.

    names: the parameters of the object. Entries of these names outside a section go into a section "Args"; lists get
    the empty lines that they need; bars and stars of plain text are escaped.
    """
    found: list[str] = []
    section = bullet = None
    for line in lines:
        entry = _ENTRY.match(line)
        if entry and entry[1] in names and not section:
            section = "Args"
            found += ["", "Args:"]
        elif section and line and not line.startswith(" ") and not (entry and entry[1] in names):
            section = None
        line = "    " * bool(section and line) + line
        depth = len(line) - len(line.lstrip())
        listed = _BULLET.match(line)
        if listed and bullet is None and found and found[-1].strip():
            found.append("")
        elif bullet is not None and line.strip() and depth <= bullet and not listed:
            found.append("")
            bullet = None
        bullet = depth if listed else bullet if line.strip() else None
        parts = line.split("``")
        parts[::2] = [_MARKUP.sub(r"\\\g<0>", part) for part in parts[::2]]
        found.append("``".join(parts))
    return found


def _process(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Handles Sphinx's event of a docstring, before napoleon does."""
    try:
        names = set(inspect.signature(value).parameters)
    except (TypeError, ValueError):  # an object that cannot be called has no parameters
        names = set()
    lines[:] = as_restructured_text(lines, names)


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the directive ``public``."""
    # import this before autodoc inspects pydantic's classes: afterwards pydantic refuses new ones with extra fields
    importlib.import_module("cute_nvfp4.harness.evaluation")
    app.add_directive("public", _Public)
    app.connect("autodoc-process-docstring", _process, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Starter submissions, composed from the templates ``starter_STYLE.py.j2`` in each problem's folder.

What several of them share is written once: a problem's tensors in its ``starter.j2``, code in ``problems/starters``.
``<< … >>`` is an expression of a template, since Python uses braces itself. A composed file needs no other.
"""

from __future__ import annotations

from .errors import HarnessError
from .problem import get_problem

_PREFIX, _SUFFIX = "starter_", ".py.j2"


def styles(problem: str) -> list[str]:
    """The styles of the problem's starters."""
    found = get_problem(problem).folder.glob(f"{_PREFIX}*{_SUFFIX}")
    return sorted(path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX).replace("_", "-") for path in found)


def starter(problem: str, style: str) -> str:
    """The text of a starter.

    Raises:
        HarnessError: no such problem, or no starter in this style; the message lists the styles.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    known = styles(problem)
    if style not in known:
        raise HarnessError.of("style", got=style, expected=f"for {problem} one of: {', '.join(known)}")
    folder = get_problem(problem).folder
    environment = Environment(
        loader=FileSystemLoader(folder.parent),
        undefined=StrictUndefined,
        variable_start_string="<<",
        variable_end_string=">>",
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template(f"{folder.name}/{_PREFIX}{style.replace('-', '_')}{_SUFFIX}")
    return template.render(problem=problem)

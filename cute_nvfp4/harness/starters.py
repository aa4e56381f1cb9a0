"""Submissions to begin with, composed from the templates ``starter_STYLE.py.j2`` of each problem's folder.

What several of them share is written once: a problem's tensors in its ``starter.j2``, code in ``problems/starters``.
``<< … >>`` is an expression of the template, for Python has braces of its own. The composed file stands alone.
"""

from __future__ import annotations

from .errors import HarnessError
from .problem import get_problem

_PREFIX, _SUFFIX = "starter_", ".py.j2"


def styles(problem: str) -> list[str]:
    """The styles that ``problem`` has a starter in."""
    found = get_problem(problem).folder.glob(f"{_PREFIX}*{_SUFFIX}")
    return sorted(path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX).replace("_", "-") for path in found)


def starter(problem: str, style: str) -> str:
    """The text of a starter.

    Raises:
        HarnessError: no such problem, or it has none in this style; what there is is listed.
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

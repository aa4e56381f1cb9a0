"""Submissions to begin with: the files ``starter_STYLE.py`` of each problem's folder."""

from __future__ import annotations

from pathlib import Path

from .errors import HarnessError
from .problem import get_problem

_PREFIX = "starter_"


def styles(problem: str) -> list[str]:
    """The styles that ``problem`` has a starter in."""
    found = get_problem(problem).folder.glob(f"{_PREFIX}*.py")
    return sorted(path.stem.removeprefix(_PREFIX).replace("_", "-") for path in found)


def starter(problem: str, style: str) -> Path:
    """The file of a starter.

    Raises:
        HarnessError: no such problem, or it has none in this style; what there is is listed.
    """
    known = styles(problem)
    if style not in known:
        raise HarnessError.of("style", got=style, expected=f"for {problem} one of: {', '.join(known)}")
    return get_problem(problem).folder / f"{_PREFIX}{style.replace('-', '_')}.py"

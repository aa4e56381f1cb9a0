"""A submission's file, as far as it can be read without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from .errors import HarnessError, SubmissionError


def read_submission(path: Path) -> str:
    """The source of a submission, after what can be checked without running it.

    Raises:
        HarnessError: no such file.
        SubmissionError: it is not Python source (the line is shown).
    """
    if not path.is_file():
        raise HarnessError(f"submission {path} does not exist; it is a Python file with custom_kernel(data)")
    try:
        source = path.read_text()
        ast.parse(source, filename=str(path))
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        caret = " " * max((error.offset or 1) - 1, 0) + "^"
        raise SubmissionError(
            f"syntax error in {path}, line {error.lineno}: {error.msg}\n  {line}\n  {caret}"
        ) from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise SubmissionError(f"submission {path} cannot be read as Python source: {error}") from error
    return source


def directives(source: str) -> dict[str, str]:
    """The ``#!POPCORN name value`` lines of the first comment block."""
    found: dict[str, str] = {}
    for line in source.splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            break
        if stripped.startswith("#!POPCORN"):
            name, _, value = stripped.removeprefix("#!POPCORN").strip().partition(" ")
            found[name] = value.strip()
    return found

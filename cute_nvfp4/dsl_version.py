"""The release of nvidia-cutlass-dsl that this package works with: it reads what the DSL compiles."""

from __future__ import annotations

import functools
from importlib import metadata

from .errors import TargetError

PACKAGE, SERIES = "nvidia-cutlass-dsl", "4.8"
ADVICE = f"pip install '{PACKAGE}>=4.8.1,<4.9'"


@functools.cache
def wrong_dsl() -> str:
    """Says which other release is installed, or that none is; "" for one of 4.8."""
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    return "" if found.split(".")[:2] == SERIES.split(".") else f"{PACKAGE} {found} is installed"


def require_dsl() -> None:
    """Raises ``TargetError``, with what to install, where the DSL is of another release than 4.8 or is not there."""
    if wrong := wrong_dsl():
        raise TargetError(f"{wrong}, compiling a kernel needs {SERIES}: {ADVICE}")

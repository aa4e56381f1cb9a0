"""The release of nvidia-cutlass-dsl that this package needs, because it reads what the DSL compiles."""

from __future__ import annotations

import functools
from importlib import metadata

from .errors import TargetError

PACKAGE, SERIES = "nvidia-cutlass-dsl", "4.8"
ADVICE = f"pip install '{PACKAGE}>=4.8.1,<4.9'"


@functools.cache
def wrong_dsl() -> str:
    """What is wrong with the installed DSL: it is another release, or missing; "" for release 4.8."""
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    return "" if found.split(".")[:2] == SERIES.split(".") else f"{PACKAGE} {found} is installed"


def require_dsl() -> None:
    """Raises ``TargetError``, with what to install, unless release 4.8 of the DSL is installed."""
    if wrong := wrong_dsl():
        raise TargetError(f"{wrong}, compiling a kernel needs {SERIES}: {ADVICE}")

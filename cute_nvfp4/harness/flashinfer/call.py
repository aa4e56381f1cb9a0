"""Makes a submission of a solution, in the submission's process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def submission(file: str, function: str, destination: bool, outputs: list[str]) -> Callable[[Any], list]:
    """The ``custom_kernel`` that calls ``function`` of ``file``, a path in the current folder.

    destination: the function gets inputs and outputs, one after the other, and fills the outputs; else it returns them.
    """
    path = Path(file)
    sys.path.insert(0, str(path.resolve().parent))
    specification = importlib.util.spec_from_file_location(path.stem, path.resolve())
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    run = getattr(module, function)

    def custom_kernel(data: tuple[list, list]) -> list:
        inputs, made = data
        if destination:
            run(*inputs, *made)
            return made
        result = run(*inputs)
        if isinstance(result, dict):
            return [result[name] for name in outputs]
        return list(result) if isinstance(result, (list, tuple)) else [result]

    return custom_kernel

"""Imports on first use, so that importing the package takes milliseconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``. modules: for each public name the module that defines it."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sys.modules[package].__all__


class Lazily(NamedTuple):
    """A function or class of the package that is imported when it is called. module: its module, below the package."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        """Imports it, and calls it."""
        return getattr(importlib.import_module(f"{__package__}.{self.module}"), self.name)(*args)


class ByGeneration:
    """A function for each generation of GPUs, such as "sm90", that makes the host function of a configuration."""

    def __init__(self, **hosts: Callable[[Any], Any]) -> None:
        self._hosts = hosts

    def of(self, config: Any) -> Callable[[Any], Any]:
        """The function for the generation of ``config``."""
        return self._hosts[config.arch.generation]

    def __call__(self, config: Any) -> Any:
        """The host function of ``config``."""
        return self.of(config)(config)

"""Registers displays of the package's classes with IPython, by name, so that none is imported before its use."""

from __future__ import annotations

from typing import Any

from .showing import ROOT, SHOWN, show


def register(shell: Any) -> None:
    """Makes ``shell`` display objects of every class in ``SHOWN`` as ``show`` does."""
    bundles = shell.display_formatter.mimebundle_formatter
    for name in SHOWN:
        module, _, cls = name.rpartition(".")
        bundles.for_type_by_name(f"{ROOT}.{module}", cls, _bundle)


def _bundle(thing: Any, include: object = None, exclude: object = None) -> dict[str, str]:
    return show(thing)._repr_mimebundle_()

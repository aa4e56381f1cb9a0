"""The errors that the library raises on purpose, and the one way in which it words them.

A message says what was got, what was expected and, where it helps, what to do. Errors about arguments are also
``ValueError`` or ``TypeError``, so callers need not know this module.
"""

from __future__ import annotations


class CuteNvfp4Error(Exception):
    """Base class of the errors raised by ``cute_nvfp4``."""

    @classmethod
    def of(cls, what: str, *, got: object, expected: object, hint: str = "") -> CuteNvfp4Error:
        """The error whose message ``explain`` makes."""
        return cls(explain(what, got=got, expected=expected, hint=hint))


class OperandError(CuteNvfp4Error, ValueError):
    """An argument has the right type but a value, shape, stride or layout that cannot be used."""


class OperandTypeError(CuteNvfp4Error, TypeError):
    """An argument has the wrong Python type or the wrong dtype."""


class TargetError(CuteNvfp4Error, RuntimeError):
    """The architecture or backend asked for is unknown, or cannot run on this machine."""


class CompileError(CuteNvfp4Error, RuntimeError):
    """A kernel could not be compiled, or a compiled artefact could not be read."""


class SimError(CuteNvfp4Error, RuntimeError):
    """The simulator refused or stopped a kernel; subclasses name the hazard. findings: what its checks had already
    found in the launch (``sim.checks.findings``)."""

    findings: tuple = ()


def explain(what: str, *, got: object, expected: object, hint: str = "") -> str:
    """The message of an error: ``what``, then what was got and expected, then what to do about it."""
    tail = f" {hint}" if hint else ""
    return f"{what}: got {got}, expected {expected}.{tail}"


def not_quantized(name: str, got: object, more: str = "") -> CuteNvfp4Error:
    """The error for an argument ``name`` that is no ``BlockScaledTensor``. more: is added to the hint."""
    hint = f"quantize({name}) makes one{more}."
    return OperandTypeError.of(name, got=type(got).__name__, expected="BlockScaledTensor", hint=hint)

"""A stand-in for Triton, for the simulated GPU without Triton: the names that programs import besides kernels."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

NOT_RUN = (
    "the kernel {name!r} is Triton's, and is not run here: Triton is not installed, and the simulated GPU runs "
    "kernels of the CuTe DSL. Run this submission with --backend cuda on a machine with a GPU and Triton."
)


class Kernel:
    """The stand-in for a Triton kernel: it has a name, and refuses to be launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(NOT_RUN.format(name=self.__name__))


def _decorated(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """A decorator like ``jit``, with or without arguments."""
    return Kernel(function) if callable(function) else Kernel


class _Names(types.ModuleType):
    """A module that has every name: ``tl.constexpr`` in a signature, ``tl.load`` in a kernel."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def do_bench(fn: Callable[[], Any], *_: Any, **__: Any) -> float:
    """Calls ``fn`` once and returns 1.0, which is not a time: a simulated GPU has none."""
    print("triton.testing.do_bench: a stand-in has called its function once; there is no time here", file=sys.stderr)
    fn()
    return 1.0


def install() -> None:
    """Makes the stand-in's modules importable."""
    triton, testing, language = (
        types.ModuleType("triton"),
        types.ModuleType("triton.testing"),
        _Names("triton.language"),
    )
    triton.__path__ = []
    triton.__version__ = "0 (stand-in)"
    triton.jit, triton.Config = _decorated, dict
    triton.autotune = triton.heuristics = lambda *args, **kwargs: lambda kernel: kernel
    triton.cdiv, triton.next_power_of_2 = lambda a, b: -(-a // b), lambda n: 1 << max(n - 1, 0).bit_length()
    testing.do_bench = testing.do_bench_cudagraph = do_bench
    triton.testing, triton.language = testing, language
    sys.modules |= {module.__name__: module for module in (triton, testing, language)}

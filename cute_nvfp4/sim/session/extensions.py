"""Changes to libraries that a program may load in a session: ``torch.utils.cpp_extension`` refuses CUDA sources before
it looks for nvcc, and Triton's benchmarks return counted work."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.session.patches import Patches

_MODULE = "torch.utils.cpp_extension"
_TRITON = "triton.testing"
_LOADERS = ("load", "load_inline")


def install(patches: Patches, work: Callable[[Callable[[], Any]], float]) -> None:
    """Changes both modules now if they are loaded, else when they are: loading is slow, and few programs use them.

    ``work`` calls a function and returns the counted work.
    """
    changes = {_MODULE: partial(_refuse_cuda, patches), _TRITON: partial(_count, patches, work)}
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
    finder = _Finder({name: change for name, change in changes.items() if name not in sys.modules})
    sys.meta_path.insert(0, finder)
    patches.at_end(lambda: sys.meta_path.remove(finder))


class _Finder:
    """An import finder that finds modules as Python does, and changes each once it has been loaded."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._changes[name](module)

        spec.loader.exec_module = exec_module
        return spec


def _count(patches: Patches, work: Callable[[Callable[[], Any]], float], module: ModuleType) -> None:
    """Makes Triton's benchmarks call their function once and return counted work."""
    for name in ("do_bench", "do_bench_cudagraph"):
        if hasattr(module, name):
            patches.set(module, name, lambda fn, *_, **__: work(fn))


def _refuse_cuda(patches: Patches, module: ModuleType) -> None:
    for name in _LOADERS:
        patches.set(module, name, _host_only(name, getattr(module, name)))


def _host_only(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that passes C++ extensions to ``original``, and raises ``TargetError`` for CUDA sources."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        sources = given.get("sources", ())
        files = [sources] if isinstance(sources, str) else sources
        if given.get("cuda_sources") or given.get("with_cuda") or any(str(f).endswith((".cu", ".cuh")) for f in files):
            raise TargetError(
                f"{_MODULE}.{name} with CUDA sources needs a GPU: nvcc makes a library of them that calls the CUDA "
                "driver, and no PTX that could be simulated is to be had. Run it on a machine with a GPU, or "
                "write the kernel in the CuTe DSL, where PTX can stand inline"
            )
        return original(*args, **kwargs)

    return load

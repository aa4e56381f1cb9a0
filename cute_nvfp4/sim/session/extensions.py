"""``torch.utils.cpp_extension`` of a session: CUDA sources are refused with the reason, before nvcc is looked for."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from cute_nvfp4.errors import TargetError
from cute_nvfp4.sim.session.patches import Patches

_MODULE = "torch.utils.cpp_extension"
_LOADERS = ("load", "load_inline")


def install(patches: Patches) -> None:
    """Replaces the functions that compile extensions, now or when their module is loaded: that takes 0.15 s, and few
    programs ask for it."""
    if _MODULE in sys.modules:
        _refuse_cuda(patches, sys.modules[_MODULE])
        return
    finder = _Finder(patches)
    sys.meta_path.insert(0, finder)
    patches.at_end(lambda: sys.meta_path.remove(finder))


class _Finder:
    """Finds the module as Python does, and replaces its functions when it has been loaded."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _refuse_cuda(self._patches, module)

        spec.loader.exec_module = exec_module
        return spec


def _refuse_cuda(patches: Patches, module: ModuleType) -> None:
    for name in _LOADERS:
        patches.set(module, name, _host_only(name, getattr(module, name)))


def _host_only(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` for extensions in C++; one with CUDA in it is an error that says why."""
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

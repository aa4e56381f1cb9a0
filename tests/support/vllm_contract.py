"""Compares the plug-in of vLLM with vLLM's own classes: ``python -m tests.support.vllm_contract vllm-0.30.0-….whl``.

The base class of NVFP4 kernels and the registry come from the wheel: three files, which are read inside it. Everything
else of vLLM that they import is a stub; nothing is installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import os
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

from cute_nvfp4.integrations import vllm as plugin

LINEAR = "vllm.model_executor.kernels.linear"
TAKEN = {
    LINEAR: "vllm/model_executor/kernels/linear/__init__.py",
    f"{LINEAR}.nvfp4": "vllm/model_executor/kernels/linear/nvfp4/__init__.py",
    f"{LINEAR}.nvfp4.base": "vllm/model_executor/kernels/linear/nvfp4/base.py",
}
"""Modules whose sources come from the wheel."""


class Stub(type):
    """A class with every attribute; the value joins its name and the attribute's."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StubModule(types.ModuleType):
    """A module with every name; each is its own class."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in TAKEN:
            return importlib.import_module(f"{self.__name__}.{name}")
        parts = {"__init__": lambda *_, **__: None, "__class_getitem__": classmethod(lambda cls, _: cls)}
        setattr(self, name, Stub(name, (), parts))
        return self.__dict__[name]


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder for vLLM: ``TAKEN`` from the wheel, stubs for the rest."""

    def __init__(self, path: Path) -> None:
        self._files = zipfile.ZipFile(path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name) if spec.name in TAKEN else StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        place = TAKEN.get(module.__name__)
        if place is not None:
            exec(compile(self._files.read(place), place, "exec"), module.__dict__)


def differences(kernel: type) -> list[str]:
    """Where a kernel's methods differ from those of its base class."""
    base = kernel.__mro__[1]
    found = [f"{name} is missing" for name in sorted(getattr(kernel, "__abstractmethods__", ()))]
    for name, own in inspect.getmembers(kernel, callable):
        theirs = inspect.getattr_static(base, name, None)
        if name.startswith("_") or theirs is None or name not in kernel.__dict__:
            continue
        ours, wanted = inspect.signature(own), inspect.signature(getattr(base, name))
        parameters = [[(p.name, p.kind, p.default) for p in x.parameters.values()] for x in (ours, wanted)]
        if parameters[0] != parameters[1]:
            found.append(f"{name}{ours}, where vLLM has {wanted}")
    return found


def held(wheel: Path) -> list[str]:
    """The mismatches between the plug-in and the classes of a wheel; empty if it fits."""
    finder, before = Wheel(wheel), os.environ.get(plugin.SWITCH)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}
    sys.meta_path.insert(0, finder)
    os.environ[plugin.SWITCH] = "1"
    try:
        plugin.register()
        linear, platforms = sys.modules[LINEAR], sys.modules["vllm.platforms"]
        kernel = linear._POSSIBLE_NVFP4_KERNELS[platforms.PlatformEnum.CUDA][0]
        found = [] if kernel.__name__ == "CuteNvfp4LinearKernel" else [f"{kernel.__name__} comes first"]
        return found + differences(plugin.kernel_class())
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(kept)
        os.environ.pop(plugin.SWITCH)
        os.environ.update({} if before is None else {plugin.SWITCH: before})


def main() -> int:
    wheel = Path(sys.argv[1])
    found = held(wheel)
    print("\n".join(found) or f"the plug-in fits {wheel.name}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

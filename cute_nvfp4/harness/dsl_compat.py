"""Names that the CuTe DSL has dropped since 4.2, for programs that were written for it (``--dsl-compat``)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

USED: dict[str, str] = {}
"""The dropped names that a program has used, each with its present equivalent."""


class _Capacities:
    """The bytes of shared memory of an architecture, by its name."""

    def __getitem__(self, arch: str) -> int:
        from cutlass.utils import get_smem_capacity_in_bytes

        return get_smem_capacity_in_bytes(arch)


_PROXIES = {"alias": "alias", "async_": "async", "async_global": "async.global", "async_shared": "async.shared"}
_PROXIES |= {"tensormap": "tensormap", "generic": "generic"}
NAMES: dict[str, tuple[str, Callable[[ModuleType], Any]]] = {
    "cutlass.cute.make_fragment": ("make_rmem_tensor", lambda cute: cute.make_rmem_tensor),
    "cutlass.cute.arch.ProxyKind": ("the names that fence_proxy takes", lambda arch: SimpleNamespace(**_PROXIES)),
    "cutlass.cute.arch.SharedSpace": (
        '"cta" and "cluster"',
        lambda arch: SimpleNamespace(shared_cta="cta", shared_cluster="cluster"),
    ),
    "cutlass.cute.arch.mbarrier_init_arrive_cnt": ("mbarrier_init", lambda arch: arch.mbarrier_init),
    "cutlass.utils.SMEM_CAPACITY": ("get_smem_capacity_in_bytes", lambda utils: _Capacities()),
}
"""By full name: the present equivalent in words, and a function that makes it from the module."""


def install() -> None:
    """Adds these names to the DSL's modules that lack them."""
    for full in NAMES:
        module = importlib.import_module(full.rpartition(".")[0])
        if not isinstance(vars(module).get("__getattr__"), _Finder):
            module.__getattr__ = _Finder(module, vars(module).get("__getattr__"))


class _Finder:
    """A module's ``__getattr__``, which Python calls for a name that the module does not have."""

    def __init__(self, module: ModuleType, before: Callable[[str], Any] | None) -> None:
        self._module, self._before = module, before

    def __call__(self, name: str) -> Any:
        full = f"{self._module.__name__}.{name}"
        if full in NAMES:
            USED[full], make = NAMES[full]
            return make(self._module)
        if self._before is not None:
            return self._before(name)
        raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")


def hint(error: BaseException) -> str:
    """Advice on a missing name that is listed here; "" for every other error."""
    name = getattr(error, "name", None)
    owner = getattr(getattr(error, "obj", None), "__name__", "")
    listed = isinstance(error, AttributeError) and f"{owner}.{name}" in NAMES
    if isinstance(error, ImportError):
        text = str(error)
        listed = any(f"'{full.rpartition('.')[2]}'" in text and full.rpartition(".")[0] in text for full in NAMES)
    return "; the DSL had this name before 4.8: --dsl-compat puts it back" if listed else ""

"""A kernel of the package as operations see it: they compile it for a configuration, and launch it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OperandError
from ..target import Target
from .backend import device_index
from .bounded import Bounded
from .cache import CompiledKernel
from .compile import build, compile_cached
from .launch import CudaLauncher, Launcher, SessionLauncher, SimLauncher, Touched
from .signature import Signature
from .simulating import current_session, session_number
from .template import capture

_planning_only: contextvars.ContextVar[bool] = contextvars.ContextVar("planning_only", default=False)


@contextlib.contextmanager
def planning_only() -> Iterator[None]:
    """A context in which calls are checked and planned, but not compiled or launched: results are not written.

    Plans stay in this process, which must not use them later. It is for processes that only ask, as
    ``cute-nvfp4 support`` does.
    """
    token = _planning_only.set(True)
    try:
        yield
    finally:
        _planning_only.reset(token)


class _NoLauncher(Launcher):
    """The launcher of calls within ``planning_only``: it launches nothing."""

    def __call__(self, values: tuple, owners: tuple) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Kernel:
    """A host function and its arguments, for every configuration.

    name: the name in caches and messages. arguments: the record of the arguments (:mod:`.signature`). host: makes the
    ``@cute.jit`` function ``host(arguments, stream)`` of a configuration. It imports the DSL, which takes seconds: it
    is a ``Lazily`` or a ``ByGeneration``, or imports when it is called. can_implement: why no kernel can be made of a
    configuration; empty if one can. Configurations are frozen dataclasses with a field ``arch``, and hold everything
    that the compiled code depends on.
    """

    name: str
    arguments: type
    host: Callable[[Any], Callable[..., Any]]
    can_implement: Callable[[Any], str] = lambda config: ""

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (kernels live as long as the process)
    def signature(self, config: Any) -> Signature:
        return Signature(self.arguments, config)

    def compile(self, config: Any) -> CompiledKernel:
        """The kernel of ``config``: from this process, from disk, or compiled now. Needs no GPU and no tensors.

        Raises:
            OperandError: no kernel implements the configuration; the message says which limit, and by how much.
        """
        return compile_cached((self.name, config), lambda: self.build(config))

    def build(self, config: Any) -> CompiledKernel:
        """Compiles the kernel now, without the caches."""
        reason = self.can_implement(config)
        if reason:
            raise OperandError(reason)
        return build(self.host(config), self.signature(config).examples(), name=self.name, arch=config.arch.name)

    def launcher(self, config: Any, target: Target, device: torch.device, arguments: Any, touched: Touched) -> Launcher:
        """Makes a launcher of ``config`` with ``arguments``; each call gives only the values that vary.

        arguments: the kernel's record, of plain numbers; addresses and other varying values are unused (0 will do).
        touched: from the owners that a call names to the tensors that the kernel may touch.
        """
        if _planning_only.get():
            if reason := self.can_implement(config):
                raise OperandError(reason)
            return _NoLauncher()
        kernel, signature = self.compile(config), self.signature(config)
        values = signature.values(arguments, 0)
        plan = functools.partial(capture, types=signature.types, values=values, varying=signature.varying)
        if target.backend == "sim":
            return SimLauncher(kernel, plan(kernel), plan, touched)
        session = current_session()
        if session is not None:
            return SessionLauncher(kernel, plan(kernel), device_index(device), session)
        return CudaLauncher(kernel, plan(kernel), device_index(device))

    def run(self, config: Any, target: Target, device: torch.device, arguments: Any, touched: Touched) -> None:
        """Makes one call; plans it unless a call like it was planned before. ``touched`` takes no owners.

        It is for rare calls: an operation that is called often keeps its launcher.
        """
        signature = self.signature(config)
        values = signature.values(arguments, 0)
        varying = frozenset(signature.varying)
        fixed = tuple(v for i, v in enumerate(values) if i not in varying)
        key = (self.name, config, target, device, session_number(), fixed)
        found = _launchers.get(key)
        if found is None:
            found = _launchers[key] = self.launcher(config, target, device, arguments, lambda touched: touched())
        found(tuple(values[i] for i in signature.varying), (touched,))


_launchers = Bounded()

"""A kernel of the package as the operations see it: compiled for a configuration, and run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OperandError
from ..target import Target
from .backend import current_stream, on_device
from .cache import CompiledKernel
from .compile import build, compile_cached
from .launch import Tensors, launcher
from .signature import Signature


@dataclass(frozen=True)
class Kernel:
    """A host function and its arguments, for every configuration.

    name: what caches and messages call it. arguments: the record of its arguments (:mod:`.signature`). host: makes the
    ``@cute.jit`` function ``host(arguments, stream)`` of a configuration; it imports the DSL, which takes seconds.
    can_implement: why no kernel can be made of a configuration, or an empty string. Configurations are frozen
    dataclasses with a field ``arch``, and hold all that the compiled code depends on.
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
            OperandError: the configuration cannot be; the message says which limit, and by how much.
        """
        return compile_cached((self.name, config), lambda: self.build(config))

    def build(self, config: Any) -> CompiledKernel:
        """Compiles it now, without asking the caches."""
        reason = self.can_implement(config)
        if reason:
            raise OperandError(reason)
        return build(self.host(config), self.signature(config).examples(), name=self.name, arch=config.arch.name)

    def run(
        self, config: Any, target: Target, device: torch.device, arguments: Any, tensors: Callable[[], Tensors]
    ) -> None:
        """Launches on the current stream of ``device``, or simulates.

        arguments: the kernel's record, of plain numbers, pointers as addresses. tensors: what the kernel may touch;
        only asked for in the simulator.
        """
        signature = self.signature(config)
        launch = launcher(self.compile(config), target, signature.types)
        with on_device(target, device):
            launch(signature.values(arguments, current_stream(target, device)), tensors)

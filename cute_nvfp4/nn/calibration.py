"""An observer of magnitudes, for global scales from many batches instead of one."""

from __future__ import annotations

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.ops.quantize import tensor_amax
from cute_nvfp4.quantization.blocks import global_scale_from_amax
from cute_nvfp4.quantization.hadamard import Hadamard, resolve_hadamard
from cute_nvfp4.quantization.rules import resolve_rule


class AmaxObserver:
    """Remembers the largest finite magnitude of the tensors that it observes, for ``quantize(global_scale=…)``.

    momentum: None keeps the maximum over all batches; a number in (0, 1] keeps the moving average of the batches'
        maxima, new = (1 − momentum) · old + momentum · batch, which forgets outliers (larger values then saturate).
    hadamard: the rotation that ``quantize`` will be given; magnitudes are those after it.

    ``amax`` is a float32 tensor on the device of the first batch, or None before it. Nothing waits for the device.
    """

    def __init__(self, *, momentum: float | None = None, hadamard: Hadamard | int | None = None) -> None:
        if momentum is not None and not 0 < momentum <= 1:
            raise OperandError.of("momentum", got=momentum, expected="None, or 0 < momentum <= 1")
        self.momentum = momentum
        self.hadamard = resolve_hadamard(hadamard)
        self.amax: torch.Tensor | None = None
        self.batches = 0

    def observe(self, x: torch.Tensor) -> torch.Tensor:
        """Observes a batch of any shape with K last, and returns it unchanged."""
        amax = tensor_amax(x.reshape(-1, x.shape[-1]), hadamard=self.hadamard)
        self.batches += 1
        if self.amax is None:
            self.amax = amax
        elif self.momentum is None:
            self.amax = torch.maximum(self.amax, amax.to(self.amax.device))
        else:
            self.amax = torch.lerp(self.amax, amax.to(self.amax.device), self.momentum)
        return x

    def global_scale(self, rule: str = "max") -> torch.Tensor:
        """The NVFP4 global scale by ``rule`` for what was observed: a float32 tensor without dimensions."""
        if self.amax is None:
            raise OperandError.of("observer", got="no batch yet", expected="observe() first")
        return global_scale_from_amax(self.amax, resolve_rule(rule, NVFP4))

"""A session's replacements of torch classes that take a device, a stream or a list of profiled activities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_nvfp4.sim.session.torch_device import CudaMode, as_device


def generator_type() -> type:
    """Returns the class that replaces ``torch.Generator``."""
    real = torch.Generator

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Generator(metaclass=Meta):
        """Makes generators of the CPU, also for a CUDA device."""

        def __new__(cls, device: Any = "cpu") -> Any:
            asked = as_device(device)
            return real(device="cpu" if asked is not None and asked.type == "cuda" else device)

    return Generator


def profile_type() -> type:
    """Returns the class that replaces ``torch.profiler.profile``."""

    class Profile(torch.profiler.profile):
        """A profile of the host's work, as there is no device to profile."""

        def __init__(self, *, activities: Any = None, **kwargs: Any) -> None:
            super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)

    return Profile


def device_type(mode: CudaMode, select: Callable[[Any], None]) -> type:
    """Returns the class that replaces ``torch.cuda.device``."""

    class OnDevice:
        """Makes a device the current one inside a block; None and -1 change nothing."""

        def __init__(self, device: Any) -> None:
            self.idx = device

        def __enter__(self) -> None:
            self.prev_idx = mode.current
            select(self.idx)

        def __exit__(self, *_: object) -> None:
            select(self.prev_idx)

    return OnDevice


def stream_context_type(streams: list[Any]) -> type:
    """Returns the class that replaces ``torch.cuda.StreamContext``."""

    class StreamContext:
        """Makes a stream the current one inside a block; None changes nothing."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            streams.append(self.stream if self.stream is not None else streams[-1])

        def __exit__(self, *_: object) -> None:
            streams.pop()

    return StreamContext

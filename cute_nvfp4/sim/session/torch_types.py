"""Classes of torch that take a device or a list of activities, for a session: they work on the host."""

from __future__ import annotations

from typing import Any

import torch

from cute_nvfp4.sim.session.torch_device import as_device


def generator_type() -> type:
    real = torch.Generator

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Generator(metaclass=Meta):
        """A generator of the CPU, whatever device is asked for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            asked = as_device(device)
            return real(device="cpu" if asked is not None and asked.type == "cuda" else device)

    return Generator


def profile_type() -> type:
    class Profile(torch.profiler.profile):
        """A profile of the host's work: there is no device to profile."""

        def __init__(self, *, activities: Any = None, **kwargs: Any) -> None:
            super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)

    return Profile

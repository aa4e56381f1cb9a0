"""Fixtures for operations that are run in the simulator."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=("sm_100a", "sm_90a"))
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each architecture in turn, as the one that CPU tensors are simulated on."""
    monkeypatch.setenv("CUTE_NVFP4_ARCH", request.param)
    return request.param


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold what no result has, until the kernels write them."""
    empty = torch.empty

    def poison(*args: object, **options: object) -> torch.Tensor:
        out = empty(*args, **options)
        return out.fill_(0xA5 if out.dtype is torch.uint8 else float("nan"))

    monkeypatch.setattr(torch, "empty", poison)

"""Fixtures for operations that are run in the simulator, or with ``--backend cuda`` on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import backends, sampling


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take ``arch`` run for each architecture in turn; on a GPU for the one it has."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "arch" in metafunc.fixturenames and not any("arch" in sampling.names(mark) for mark in marks):
        metafunc.parametrize("arch", backends.architectures(), indirect=True)


@pytest.fixture
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The architecture that CPU tensors are simulated on, or that of the GPU."""
    if backends.backend() == "sim":
        monkeypatch.setenv("CUTE_NVFP4_ARCH", request.param)
    elif reason := backends.why_skipped((request.param,)):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are simulated on sm_90a."""
    monkeypatch.setenv("CUTE_NVFP4_ARCH", "sm_90a")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold what no result has, until the kernels write them."""

    def poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poison(*args: object, **options: object) -> torch.Tensor:
            out = make(*args, **options)
            if out.is_floating_point():
                return out.fill_(float("nan"))
            return out.fill_(0xA5) if out.dtype is torch.uint8 else out

        return poison

    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))

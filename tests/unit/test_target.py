"""Which architecture and backend a call gets."""

from __future__ import annotations

import pytest
import torch

from cute_nvfp4 import simulating
from cute_nvfp4.errors import TargetError
from cute_nvfp4.runtime import backend
from cute_nvfp4.runtime.backend import resolve, sm_count
from cute_nvfp4.target import ARCHITECTURES, Target, architecture


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_NVFP4_ARCH", raising=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Makes up a GPU: ``gpu(capability, multiprocessors)``."""

    def make(capability: tuple[int, int], multiprocessors: int = 100) -> None:
        class Properties:
            multi_processor_count = multiprocessors

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
        forget()

    def forget() -> None:
        backend._device_architecture.cache_clear()
        backend._resolve.cache_clear()

    yield make
    forget()


def test_figures() -> None:
    facts = {a.name: (a.capability, a.sm_count, a.vector_bytes, a.has_fp4_convert) for a in ARCHITECTURES.values()}
    assert facts == {
        "sm_90a": ((9, 0), 132, 16, False),
        "sm_100a": ((10, 0), 148, 32, True),
        "sm_103a": ((10, 3), 148, 32, True),
        **{f"sm_120{letter}": ((12, 0), 170, 32, True) for letter in "af"},
        **{f"sm_121{letter}": ((12, 1), 48, 32, True) for letter in "af"},
    }
    assert all(a.shared_bytes == (99 if a.generation == "sm120" else 227) * 1024 for a in ARCHITECTURES.values())
    assert architecture("sm_90a") is ARCHITECTURES["sm_90a"]


@pytest.mark.parametrize("name", ["sm_91", "SM_100A", "", "sm_122a"])
def test_unknown_architectures(name: str) -> None:
    with pytest.raises(TargetError, match=f"architecture: got '{name}', expected one of sm_90a, sm_100a, sm_103a"):
        architecture(name)


@pytest.mark.parametrize("name", ["sm_90", "sm_100", "sm_120", "sm_121"])
def test_a_target_without_its_letter(name: str) -> None:
    with pytest.raises(TargetError, match=f"plain target {name} lacks the FP4 and block-scaled .*: use {name}a"):
        architecture(name)


def test_cpu_tensors() -> None:
    """By exact torch, or, where that is asked for, in the simulator."""
    assert resolve() == resolve("auto", "cpu") == Target(architecture("sm_100a"), "reference")
    assert resolve("sim") == Target(architecture("sm_100a"), "sim")
    assert resolve("sim", torch.device("cpu"), "sm_90a") == Target(architecture("sm_90a"), "sim")
    assert resolve("reference") == Target(architecture("sm_100a"), "reference")


def test_within_simulating() -> None:
    with simulating():
        assert resolve() == Target(architecture("sm_100a"), "sim")
        with simulating("sm_90a"):
            assert resolve() == resolve("sim") == Target(architecture("sm_90a"), "sim")
            assert resolve("auto", "cpu", "sm_103a").arch.name == "sm_103a"
            assert resolve("reference").backend == "reference"
        assert resolve().arch.name == "sm_100a"
    assert resolve().backend == "reference"


def test_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses what is simulated, unless the call does; empty is unset."""
    monkeypatch.setenv("CUTE_NVFP4_ARCH", "sm_90a")
    assert resolve().arch.name == "sm_90a"
    assert resolve(arch="sm_103a").arch.name == "sm_103a"
    monkeypatch.setenv("CUTE_NVFP4_ARCH", "")
    assert resolve().arch.name == "sm_100a"
    monkeypatch.setenv("CUTE_NVFP4_ARCH", "sm_1")
    with pytest.raises(TargetError, match="architecture: got 'sm_1'"):
        resolve()


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("cuda", "cpu"), r"device of the operands for backend='cuda': got cpu, expected a CUDA device\. Move the"),
        (("sim", "cuda:0"), r"device of the operands for backend='sim': got cuda:0, expected cpu"),
        (("auto", "meta"), r"device of the operands: got meta, expected cuda or cpu"),
        (("gpu", "cpu"), r"backend: got 'gpu', expected one of auto, cuda, sim, reference"),
    ],
)
def test_refusals(arguments: tuple, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        resolve(*arguments)


def test_a_gpu_decides_its_architecture(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu((9, 0), 114)
    monkeypatch.setenv("CUTE_NVFP4_ARCH", "sm_100a")  # is for the simulator
    for device in ("cuda", "cuda:0"):
        found = resolve("auto", device)
        assert found == resolve("cuda", device) == Target(architecture("sm_90a"), "cuda")
        assert sm_count(found, torch.device(device)) == 114
    assert resolve("auto", "cuda:0", "sm_90a").backend == "cuda"
    with pytest.raises(TargetError, match=r"architecture for cuda:0: got sm_100a, expected sm_90a"):
        resolve("auto", "cuda:0", "sm_100a")


def test_a_gpu_without_a_kernel(gpu) -> None:
    gpu((8, 9))
    with pytest.raises(TargetError, match=r"cuda:0 \(Some GPU\): got \(8, 9\), expected one of sm_90a \(9, 0\), .*sim"):
        resolve("auto", "cuda:0")
    assert resolve("reference", "cuda:0").backend == "reference"


def test_multiprocessors_of_the_simulated_part() -> None:
    assert [sm_count(resolve(arch=a), torch.device("cpu")) for a in ARCHITECTURES] == [
        *(132, 148, 148),
        *(170, 48) * 2,
    ]

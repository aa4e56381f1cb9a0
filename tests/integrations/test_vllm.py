"""The plug-in of vLLM, against stand-ins of the classes that it is called by: vLLM itself is not installed here.
``support/vllm_contract.py`` holds it against vLLM's own, taken from a wheel.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
import zipfile
from abc import ABC, abstractmethod
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import pack, values
from support.vllm_contract import LINEAR, TAKEN, held

from cute_nvfp4 import simulating
from cute_nvfp4.errors import CuteNvfp4Error, OperandError
from cute_nvfp4.integrations import vllm as module

N, K = 48, 128


class NvFp4LinearKernel(ABC):
    """What ``NvFp4LinearKernel`` of vLLM 0.30 asks of its subclasses."""

    def __init__(self, config: Any) -> None:
        assert self.can_implement(config)[0]
        assert self.is_supported(90)[0]
        self.config = config

    def input_quant_key(self) -> None:
        return None

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]: ...

    @classmethod
    @abstractmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]: ...

    @abstractmethod
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...

    def init_kernels_after_ipc_load(self, layer: torch.nn.Module) -> None:
        """Only tensors come over: what else a kernel keeps on the layer is made here."""
        return

    @abstractmethod
    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None): ...


class PlatformEnum(enum.Enum):
    CUDA = enum.auto()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[type]]:
    """Its kernels: Marlin is the first that works on Hopper."""
    marlin = type("MarlinNvFp4LinearKernel", (), {})
    kernels = {PlatformEnum.CUDA: [marlin]}
    linear = types.ModuleType("vllm.model_executor.kernels.linear")
    linear._POSSIBLE_NVFP4_KERNELS = kernels
    linear.register_linear_kernel = lambda made, platform, kind="mp": kind == "nvfp4" and kernels[platform].append(made)
    nvfp4 = types.ModuleType("vllm.model_executor.kernels.linear.nvfp4")
    nvfp4.NvFp4LinearKernel = NvFp4LinearKernel
    platforms = types.ModuleType("vllm.platforms")
    platforms.PlatformEnum = PlatformEnum
    parents = {name: types.ModuleType(name) for name in ("vllm", "vllm.model_executor", "vllm.model_executor.kernels")}
    parents["vllm.model_executor.kernels"].linear = linear
    for made in (*parents.values(), linear, nvfp4, platforms):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setenv(module.SWITCH, "1")
    return kernels


def layer(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer as vLLM has it after loading, and its values."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    data, scale, amax = pack(weight)
    made = torch.nn.Module()
    made.output_size_per_partition, made.input_size_per_partition, made.params_dtype = N, K, dtype
    tensors = {"weight": data, "weight_scale": scale, "weight_global_scale": torch.tensor([amax / 2688])}
    for name, tensor in tensors.items():
        made.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return made, values(data, scale, amax)


def test_registered_before_the_others(registry: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    module.register()
    module.register()
    names = [kernel.__name__ for kernel in registry[PlatformEnum.CUDA]]
    assert names == ["CuteNvfp4LinearKernel", "MarlinNvFp4LinearKernel"]
    kernel = registry[PlatformEnum.CUDA][0]
    assert kernel.is_supported(90) == (True, None) and kernel.is_supported(100) == (False, "sm_100 is not Hopper")
    assert kernel(None).input_quant_key() is None


def test_off_unless_asked_for(registry: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", ""):
        monkeypatch.setenv(module.SWITCH, value)
        module.register()
    monkeypatch.delenv(module.SWITCH)
    module.register()
    assert len(registry[PlatformEnum.CUDA]) == 1


def test_another_vllm_is_an_error(registry: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = sys.modules["vllm.model_executor.kernels.linear"]
    monkeypatch.setattr(linear, "register_linear_kernel", lambda *_: None)
    with pytest.raises(CuteNvfp4Error, match="registry of vLLM: got another"):
        module.register()
    monkeypatch.setitem(sys.modules, "vllm.model_executor.kernels", None)
    with pytest.raises(CuteNvfp4Error, match="CUTE_NVFP4_VLLM=0 turns this plug-in off"):
        module.register()


@pytest.mark.kernels("sm_90a")
@pytest.mark.sim_only("counts the simulator's launches")
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, K), (2, 3, K), (20, K)], ids=str)
def test_products(registry: dict, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """By the kernels; a weight that is packed, and nothing beside it."""
    made, weight = layer(dtype)
    x, bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype), torch.randn(N).to(dtype)
    with simulating("sm_90a") as runs:
        kernel = module.kernel_class()(None)
        kernel.process_weights_after_loading(made)
        y, biased = kernel.apply_weights(made, x), kernel.apply_weights(made, x, bias)
        # a process that gets the tensors alone, and the sizes
        other = torch.nn.Module()
        other.output_size_per_partition, other.input_size_per_partition = N, K
        for name, tensor in made.named_parameters():
            other.register_parameter(name, tensor)
        kernel.init_kernels_after_ipc_load(other)
        assert kernel.apply_weights(other, x).equal(y)
    assert len(runs) >= 4 and made.weight.dtype is torch.uint8 and made.weight_scale.numel() == 0
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-6)
    assert y.dtype is dtype and biased.equal(y + bias)


def test_what_does_not_fit() -> None:
    made, _ = layer()
    made.input_size_per_partition = 2 * K
    with pytest.raises(OperandError, match=r"layer of vLLM: got weight \(48, 64\), scales \(48, 8\)"):
        module.prepare_layer(made)


def test_the_self_check_fails_for_another_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = module.prepare_weight

    def wrong(weight: Any, **options: Any) -> Any:
        made = prepare(weight, **options)
        made.packed[0, 0, 5] ^= 0x11
        made.packed[0, 0, 6] ^= 0xFF
        return made

    made, _ = layer()
    module.prepare_layer(made)
    monkeypatch.setattr(module, "prepare_weight", wrong)
    with pytest.raises(OperandError, match="self-check of a layer of vLLM: got distance"):
        module.prepare_layer(layer()[0])


def test_the_entry_point() -> None:
    found = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "cute_nvfp4"]
    if not found:
        pytest.skip("the package was not installed since it has entry points")
    assert found[0].load() is module.register


REGISTRY = """
from vllm.platforms import PlatformEnum
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

_POSSIBLE_NVFP4_KERNELS = {PlatformEnum.CUDA: [MarlinNvFp4LinearKernel]}

def register_linear_kernel(kernel_class, platform, kernel_type="mp"):
    _POSSIBLE_NVFP4_KERNELS[platform].append(kernel_class)
"""
HEAD = """
from abc import ABC, abstractmethod
from typing import Any

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey

"""


@pytest.mark.parametrize(
    "change, words",
    [
        (("", ""), None),
        ((", bias: torch.Tensor | None = None", ""), "where vLLM has (self, layer"),
        (("process_weights_after_loading", "pack"), "pack is missing"),
    ],
)
def test_a_wheel_that_asks_for_something_else(change: tuple[str, str], words: str | None, tmp_path: Path) -> None:
    """``python -m tests.support.vllm_contract WHEEL`` says what does not fit: here a wheel of stand-ins."""
    base = HEAD + inspect.getsource(NvFp4LinearKernel).replace(*change)
    nvfp4 = f"from {LINEAR}.nvfp4.base import NvFp4LinearKernel"
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for place, source in zip(TAKEN.values(), (REGISTRY, nvfp4, base)):
            wheel.writestr(place, source)
    found = held(tmp_path / "vllm.whl")
    assert not found if words is None else any(words in line for line in found)
    assert "vllm" not in sys.modules

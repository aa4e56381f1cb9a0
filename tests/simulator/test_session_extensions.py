"""``torch.utils.cpp_extension`` in a simulated session."""

from __future__ import annotations

import importlib
import sys

import pytest

from cute_nvfp4.errors import TargetError
from cute_nvfp4.runtime.session import simulated_gpu

MODULE = "torch.utils.cpp_extension"
CUDA = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }"


@pytest.mark.parametrize("loaded_before", [True, False])
def test_cuda_sources_are_refused_with_the_reason(loaded_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    if loaded_before:
        importlib.import_module(MODULE)
    finders = list(sys.meta_path)
    with simulated_gpu("sm_100a"):
        from torch.utils.cpp_extension import load, load_inline

        with pytest.raises(TargetError, match=r"load_inline with CUDA sources needs a GPU: nvcc .* no PTX"):
            load_inline("mine", "void run();", CUDA, functions=["run"])
        with pytest.raises(TargetError, match="load_inline with CUDA sources"):
            load_inline("mine", "void run();", with_cuda=True)
        with pytest.raises(TargetError, match=r"cpp_extension\.load with CUDA sources"):
            load("mine", ["mine.cpp", "mine.cu"])
    assert sys.meta_path == finders
    module = sys.modules[MODULE]
    assert module.load is not load and module.load_inline is not load_inline


def test_extensions_in_c_plus_plus_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(MODULE)
    asked = []
    monkeypatch.setattr(module, "load_inline", lambda name, cpp_sources, cuda_sources=None: asked.append(name))
    with simulated_gpu("sm_100a"):
        module.load_inline("mine", "void run();")
    assert asked == ["mine"]

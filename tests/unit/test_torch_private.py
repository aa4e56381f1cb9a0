"""Names of torch that it promises nothing of: what stands in for each gives the same."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_nvfp4.runtime import torch_private
from cute_nvfp4.runtime.session import simulated_gpu

NAMES = ("_len_torch_dispatch_stack", "_increment_version", "_cuda_getCurrentRawStream")
GUARDS = "torch._C._dynamo.guards"


@pytest.fixture(params=["private", "public"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module as it is, and as it is loaded where torch has none of the names."""
    if request.param == "private":
        assert torch_private.guards is not torch_private.PythonGuards, f"torch {torch.__version__} has no TensorGuards"
        assert torch_private.dispatch_modes is torch._C._len_torch_dispatch_stack
        assert torch_private.increment_versions is torch._C._increment_version
        return torch_private
    for name in NAMES:
        monkeypatch.delattr(torch._C, name, raising=False)
    monkeypatch.setitem(sys.modules, GUARDS, None)
    spec = importlib.util.spec_from_file_location("torch_public", torch_private.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.undo()
    assert module.guards is module.PythonGuards and module.raw_stream is module._raw_stream
    return module


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_dispatch_modes_are_counted(ways: types.ModuleType) -> None:
    assert ways.dispatch_modes() == 0
    with Nothing():
        assert ways.dispatch_modes() == 1
        with FakeTensorMode():
            assert ways.dispatch_modes() == 2
    assert ways.dispatch_modes() == 0


def test_versions_are_incremented(ways: types.ModuleType) -> None:
    x, y = torch.zeros(2), torch.zeros(3)
    with torch.inference_mode():
        z = torch.zeros(4)
    ways.increment_versions((x, z))
    ways.increment_versions((x, y))
    ways.increment_versions(())
    assert (x._version, y._version) == (2, 1)
    w = torch.ones(2, requires_grad=True)
    product = w * x
    ways.increment_versions((x,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


class Special(Tensor):
    """A subclass without behaviour."""


def base() -> Tensor:
    return torch.zeros(4, 6)


OTHERS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "like": (base, True),
    "other contents": (lambda: torch.ones(4, 6), True),
    "a view with the same strides": (lambda: torch.zeros(8, 6)[4:], True),
    "rows": (lambda: torch.zeros(5, 6), False),
    "strides": (lambda: torch.zeros(4, 12)[:, :6], False),
    "dimensions": (lambda: torch.zeros(1, 4, 6), False),
    "dtype": (lambda: torch.zeros(4, 6, dtype=torch.float16), False),
    "device": (lambda: torch.zeros(4, 6, device="meta"), False),
    "gradient": (lambda: torch.zeros(4, 6, requires_grad=True), False),
    "subclass": (lambda: torch.zeros(4, 6).as_subclass(Special), False),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False), False),
    "negated": (lambda: torch._neg_view(torch.zeros(4, 6)), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_guards_know_tensors_that_are_alike(ways: types.ModuleType, name: str) -> None:
    make, alike = OTHERS[name]
    first = torch.zeros(7)
    found = ways.guards([first, base()])
    assert found.check(first, make()) is alike
    assert ways.guards([first, make()]).check(first, base()) is alike
    assert found.check(first, base()) and not found.check(base(), first)


def test_guards_tell_what_the_modes_of_autograd_change(ways: types.ModuleType) -> None:
    """Tensors of inference mode, and others while it is on; without gradients nothing changes."""
    follows, plain = torch.zeros(3, requires_grad=True), torch.zeros(3)
    with torch.no_grad():
        found = ways.guards([follows])
        assert found.check(follows) and not found.check(plain)
    assert found.check(follows) and not found.check(plain)
    outside = {"plain": ways.guards([plain])}
    with torch.inference_mode():
        fresh = torch.zeros(3)
        inside = {name: ways.guards([x]) for name, x in (("plain", plain), ("fresh", fresh))}
        assert [inside["plain"].check(x) for x in (plain, fresh)] == [True, False]
        assert [inside["fresh"].check(x) for x in (plain, fresh)] == [False, True]
        assert [outside["plain"].check(x) for x in (plain, fresh)] == [False, False]
    assert [inside["plain"].check(x) for x in (plain, fresh)] == [False, True]
    assert [inside["fresh"].check(x) for x in (plain, fresh)] == [False, False]
    assert [outside["plain"].check(x) for x in (plain, fresh)] == [True, False]


def test_a_graph_that_is_compiled_is_not_exported() -> None:
    """The public way in place of the private one would not do: with torch 2.9 it is true in both."""

    def function(x: Tensor) -> Tensor:
        return x + 1 if torch_private.is_exporting() else x - 1

    torch._dynamo.reset()
    x = torch.zeros(3)
    assert torch.compile(function, fullgraph=True, backend="eager")(x).tolist() == [-1] * 3
    module = torch.nn.Module()
    module.forward = function
    assert torch.export.export(module, (x,)).module()(x).tolist() == [1] * 3
    assert not torch_private.is_exporting()


def test_the_stream_is_torchs(ways: types.ModuleType) -> None:
    with simulated_gpu("sm_90a"):
        stream = torch.cuda.Stream()
        for current in (torch.cuda.current_stream(), stream):
            with torch.cuda.stream(current):
                assert torch_private._raw_stream(0) == ways._raw_stream(0) == current.cuda_stream
        assert stream.cuda_stream != torch.cuda.current_stream().cuda_stream


PROGRAM = f"""
import sys, torch
increment = torch._C._increment_version
torch.autograd.graph.increment_version = lambda tensors: increment(tuple(tensors))  # as a torch without it would
for name in {NAMES!r}:
    if hasattr(torch._C, name):
        delattr(torch._C, name)
sys.modules[{GUARDS!r}] = None
import cute_nvfp4 as nv
from cute_nvfp4.runtime import torch_private as private
assert private.guards is private.PythonGuards and private.dispatch_modes is private._count_dispatch_modes
generator = torch.Generator().manual_seed(0)
x, w = torch.randn(3, 64, generator=generator).bfloat16(), torch.randn(48, 64, generator=generator).bfloat16()
weight = nv.prepare_weight(nv.quantize(w, backend="reference"), backend="reference")
expected = nv.gemm(x, weight, backend="reference")
with nv.simulating("sm_90a"):
    out = torch.zeros_like(expected)
    for _ in range(3):
        before = out._version
        nv.gemm(x, weight, out=out)
        assert torch.equal(out, expected) and out._version > before
        (found,) = nv.grouped_gemm([(x, weight)])
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
print("the same")
"""


def test_calls_without_any_of_the_names() -> None:
    """Twice and thrice, so that the calls which decide nothing any more are taken too."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "the same\n", ended.stderr

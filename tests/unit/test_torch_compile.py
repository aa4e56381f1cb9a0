"""The public functions and layers under ``torch.compile`` and ``torch.export``: one graph, no warnings, gradients."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from cute_nvfp4 import (
    BlockScaledTensor,
    GroupedRows,
    NVFP4Linear,
    gated_gemm,
    gemm,
    gemv,
    grouped_gemm,
    grouped_gemm_contiguous,
    quantize,
    rmsnorm_quantize,
    silu_mul_quantize,
    simulating,
)
from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """Warnings are errors, but for three of torch about itself and the interpreter.

    Dynamo makes an object of an autograd.Function; on exactly 3.13.0 it says that its guards are slower.
    """
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
        # torch 2.9 says it of what torch.export itself has saved
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        yield
    torch._dynamo.reset()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


A, B, B2 = (quantize(normal(rows, 64, seed=rows)) for rows in (40, 48, 48))
STACK = quantize(normal(3, 48, 64))
ROWS = GroupedRows.of(A, [0, 7, 7, 40])
OUT, STATUS = torch.empty(40, 48), torch.empty(1, dtype=torch.int32)


def leaves(result: Any) -> list[torch.Tensor]:
    return tree_flatten(result)[0]


def same(one: Any, other: Any) -> None:
    one, other = leaves(one), leaves(other)
    assert len(one) == len(other)
    for x, y in zip(one, other):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def norm_in_place(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor) -> Any:
    """The new residual in place of the old one, and the product that follows."""
    normed = rmsnorm_quantize(x, weight, residual=residual, residual_out=residual, global_scale=scale)
    return gemm(normed.quantized, B), normed.residual, residual


def norm_and_gate(x: torch.Tensor, residual: torch.Tensor, out: BlockScaledTensor) -> Any:
    normed = rmsnorm_quantize(x, None, residual=residual, global_scale=out.global_scale, out=out, return_normed=True)
    return normed, out, silu_mul_quantize(x, residual, global_scale="auto", return_activation=True)


def rows_in_fp8(x: torch.Tensor, residual: torch.Tensor) -> tuple:
    options = {"global_scale": None, "format": "fp8_e4m3"}
    normed = rmsnorm_quantize(x, None, residual=residual, **options)
    activation = silu_mul_quantize(x, residual, **options)
    return *(y for z in (normed.quantized, activation) for y in (z.data.float(), z.scale)), normed.residual


FUNCTIONS: dict[str, tuple[Callable, tuple]] = {
    "rmsnorm_quantize, in place": (
        norm_in_place,
        (normal(40, 64), normal(64), normal(40, 64, seed=1), torch.tensor(0.01)),
    ),
    "rmsnorm_quantize and silu_mul_quantize": (norm_and_gate, (normal(40, 64), normal(40, 64, seed=1), A)),
    "silu_mul_quantize": (lambda x: silu_mul_quantize(x, global_scale=0.02), (normal(40, 128),)),
    "rows in FP8": (rows_in_fp8, (normal(4, 64).bfloat16(), normal(4, 64, seed=1).bfloat16())),
    "gemv": (lambda a, b: gemv(a, b, alpha=2.0), (A, B)),
    "gemm": (lambda a, b, alpha: gemm(a, b, alpha=alpha, out_dtype=torch.float32), (A, B, torch.tensor([0.5]))),
    "gemm, out": (lambda a, b, out: gemm(a, b, out=out), (A, B, OUT)),
    "gated_gemm": (lambda a, b, c: gated_gemm(a, b, c, gate="relu"), (A, B, B2)),
    "gated_gemm, quantized": (lambda a, b, c: gated_gemm(a, b, c, out_global_scale=0.1), (A, B, B2)),
    "grouped_gemm": (lambda a, b, c: grouped_gemm([(a, b), (None, b), (b, c)], alpha=2.0), (A, B, B2)),
    "grouped_gemm, no alpha": (lambda a, b, c: grouped_gemm([(a, b), (b, c)]), (A, B, B2)),
    "grouped_gemm_contiguous": (lambda a, b: grouped_gemm_contiguous(a, b), (ROWS, STACK)),
    "grouped_gemm_contiguous, status": (
        lambda a, b, status: (grouped_gemm_contiguous(a, b, status=status), status),
        (ROWS, STACK, STATUS),
    ),
    "a chain": (
        lambda a, b: gemm(quantize(gemm(a, b, out_dtype=torch.float32), global_scale=0.1), B2_SQUARE),
        (A, B),
    ),
}
B2_SQUARE = quantize(normal(32, 48))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph(name: str) -> None:
    function, arguments = FUNCTIONS[name]
    want = function(*tree_map(torch.clone, arguments))
    same(torch.compile(function, fullgraph=True, backend="aot_eager")(*tree_map(torch.clone, arguments)), want)


def test_dynamic_rows() -> None:
    """Few graphs for many numbers of rows: of up to 128, of more, and the one that was traced first."""
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    def function(x: torch.Tensor, b: BlockScaledTensor) -> torch.Tensor:
        y = gemm(quantize(x), b, out_dtype=torch.float32)
        return y, rmsnorm_quantize(x, None, residual=x, global_scale=0.1), silu_mul_quantize(x, global_scale=0.1)

    compiled = torch.compile(function, fullgraph=True, backend=count, dynamic=True)
    for rows in (40, 41, 77, 129, 300):
        same(compiled(normal(rows, 64), B), function(normal(rows, 64), B))
    assert len(graphs) <= 3


def test_the_operator_asks_which_backend() -> None:
    """A trace knows nothing of ``simulating``: what was compiled before runs in the simulator within it."""
    compiled = torch.compile(lambda a, b: gemv(a, b), fullgraph=True, backend="eager")
    want = compiled(A, B)
    with simulating() as runs:
        got = compiled(A, B)
    assert [run.name for run in runs] == ["gemv"]
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_fake_tensors_and_other_modes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        a, b = (tree_map(mode.from_tensor, x) for x in (A, B))
        assert gemm(a, b).shape == (40, 48) and gemv(a, b).dtype is torch.float16
        with pytest.raises(OperandError, match="K of a and b"):
            gemm(a, quantize(torch.ones(48, 32)))
    graph = make_fx(lambda x: gemv(BlockScaledTensor(x, A.scale, A.global_scale), B))(A.data)
    assert torch.ops.cute_nvfp4.gemv.default in [node.target for node in graph.graph.nodes]


class Products(torch.nn.Module):
    def forward(self, a: BlockScaledTensor, x: torch.Tensor) -> tuple[torch.Tensor, BlockScaledTensor]:
        b = quantize(x, rule="four_six_mse")
        return gemm(a, b, out_dtype=torch.float32), b


def saved(program: torch.export.ExportedProgram) -> Callable:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """Operands as arguments and results, saved and loaded; nothing in it depends on the machine."""
    x = normal(48, 64)
    program = torch.export.export(Products(), (A, x), strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.cute_nvfp4.gemm.default in targets and torch.ops.cute_nvfp4.quantize.default in targets
    loaded = saved(program)
    for seed in (1, 2):
        a, x = quantize(normal(40, 64, seed=seed)), normal(48, 64, seed=seed)
        product, b = loaded(a, x)
        want, operand = Products()(a, x)
        assert isinstance(b, BlockScaledTensor) and b.format is NVFP4
        assert torch.equal(b.rowmajor_scale(), operand.rowmajor_scale())
        same((product, b.data, b.global_scale), (want, operand.data, operand.global_scale))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_rows(strict: bool) -> None:
    layer = NVFP4Linear.from_linear(torch.nn.Linear(64, 48)).requires_grad_(False)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(layer, (normal(40, 64),), strict=strict, dynamic_shapes={"x": {0: rows}})
    loaded = saved(program)
    for count in (2, 40, 128, 129, 300):
        x = normal(count, 64, seed=count)
        same(loaded(x), layer(x))


def test_trees() -> None:
    """Operands and grouped rows are nodes of torch's trees, of any format, and of trees of something else."""
    for x in (A, quantize(normal(2, 40, 64), "mxfp4"), ROWS):
        tensors, spec = tree_flatten(x)
        again = tree_unflatten(tensors, spec)
        assert type(again) is type(x) and again.format is x.format and (again.global_scale is x.global_scale)
        assert again.data is x.data and again.scale is x.scale
        assert tree_map(lambda t: t.shape, x).data == x.data.shape
    with pytest.raises(TypeError, match="data of nvfp4"):
        tree_map(torch.Tensor.float, A)


LINEARS = {
    "bias, computed": {"bias": True},
    "no bias, computed": {"bias": False},
    "bias, given": {"bias": True, "input_global_scale": torch.tensor(0.002)},
    "no bias, given": {"bias": False, "input_global_scale": torch.tensor(0.002)},
    "decoded": {"bias": True, "input_rule": None},
}


def gradients(layer: NVFP4Linear, function: Callable) -> list[torch.Tensor]:
    layer.zero_grad()
    x = normal(3, 5, 64).requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("name", LINEARS)
def test_linear(name: str) -> None:
    """Straight through: dx = dy · W and db = Σ dy, in eager mode, compiled, and as float64 has them."""
    options = dict(LINEARS[name])
    layer = NVFP4Linear.from_linear(torch.nn.Linear(64, 48, bias=options.pop("bias")), **options)
    found = gradients(layer, layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for one, other in zip(gradients(layer, compiled), found):
        torch.testing.assert_close(one, other)
    dy = 2 * found[0].double()
    exact = [dy @ layer.weight.dequantize(torch.float64), *([dy.sum((0, 1))] if layer.bias is not None else [])]
    for one, other in zip(found[1:], exact):
        torch.testing.assert_close(one, other.float())
    torch._dynamo.reset()
    with torch.no_grad():
        same(torch.compile(layer, fullgraph=True, backend="aot_eager")(normal(7, 64)), layer(normal(7, 64)))


def test_no_gradient_costs_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = NVFP4Linear.from_linear(torch.nn.Linear(64, 48)).requires_grad_(False)
    monkeypatch.setattr("cute_nvfp4.nn.linear._Product.apply", None)
    layer(normal(7, 64))
    with torch.no_grad():
        layer(normal(7, 64).requires_grad_())


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "torch.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), {})
    assert (tmp_path / "layer.pt2").exists()

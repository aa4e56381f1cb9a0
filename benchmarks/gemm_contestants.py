"""The contestants of ``gemm.py``: this package's products, and its peers on the same operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from gemm_shapes import Shape
from torch.nn.functional import linear, silu

import cute_nvfp4 as nv
from cute_nvfp4.errors import CuteNvfp4Error

BF16 = torch.bfloat16
Call = Callable[[], list[torch.Tensor]]
"""Computes the whole problem and returns the results, one for each group."""


class NotAvailableError(Exception):
    """A contestant cannot run here: a package, or a kernel for this GPU, is missing."""


class Problem(NamedTuple):
    """The operands of a shape: lists with one operand for each group.

    x (M, K) in bf16, and a, the same values in NVFP4; weights (N, K) in NVFP4, or (2N, K) for a gated product: all rows
    of the gate, then all rows of up; dense: the weights' values in bf16, which holds them exactly: (groups, N or 2N,
    K).
    """

    shape: Shape
    x: list[torch.Tensor]
    a: list[nv.BlockScaledTensor]
    weights: list[nv.BlockScaledTensor]
    dense: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, device: str = "cuda", seed: int = 1111) -> Problem:
        """Draws normal values, quantized without a global scale."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int) -> torch.Tensor:
            return torch.randn(rows, shape.k, device=device, dtype=torch.bfloat16, generator=generator)

        x = list(normal(sum(shape.m)).split(shape.m))
        a = [nv.quantize(rows, global_scale=None) for rows in x]
        weights = [nv.quantize(normal(shape.products * shape.n), global_scale=None) for _ in shape.m]
        return cls(shape, x, a, weights, torch.stack([weight.dequantize(torch.bfloat16) for weight in weights]))

    def weights_in(self, form: str) -> list[nv.BlockScaledTensor]:
        """The weights in ``form``: as they are, or their values in MXFP4."""
        return self.weights if form == "nvfp4" else [nv.quantize(w, form) for w in self.dense]

    def reference(self, activations: str) -> Iterator[torch.Tensor]:
        """Yields each group's result in float64.

        activations: "bf16" or "nvfp4"; "fp8", with 4-bit weights rounded to E4M3; "fp8 weights", with weights that
        memory holds in E4M3; or "fp8, mxfp4", with weights in MXFP4.
        """
        rows = {
            "bf16": lambda: self.x,
            "nvfp4": lambda: [a.dequantize(torch.float64) for a in self.a],
        }.get(activations, lambda: [nv.quantize(x, "fp8_e4m3").dequantize(torch.float64) for x in self.x])()
        for i, x in enumerate(rows):
            weight = self.dense[i]
            if activations == "fp8":
                weight = nv.prepare_weight(self.weights[i], dtype=torch.float8_e4m3fn).dequantize(torch.float64)
            elif activations == "fp8 weights":
                weight = in_e4m3(weight).dequantize(torch.float64)
            elif activations == "fp8, mxfp4":
                weight = nv.quantize(weight, "mxfp4").dequantize(torch.float64)
            product = x.double() @ weight.double().t()
            if self.shape.problem == "gated":
                gate, up = product.chunk(2, -1)
                product = silu(gate) * up
            yield product


def in_e4m3(weight: torch.Tensor) -> nv.RowScaledTensor:
    """A weight in E4M3, each row with a scale."""
    return nv.quantize(weight, "fp8_e4m3")


class Contestant(NamedTuple):
    """A contestant. calls: makes the ways to compute a problem, of which the fastest counts; raises NotAvailableError
    with a reason."""

    name: str
    title: str
    activations: str
    calls: Callable[[Problem], list[Call]]
    runs: Callable[[Shape], bool] = lambda shape: True


@contextmanager
def refusals() -> Iterator[None]:
    """Within this block, a call that this package refuses raises NotAvailableError."""
    try:
        yield
    except CuteNvfp4Error as error:
        raise NotAvailableError(str(error)) from error


def ours(problem: Problem, activations: str, prepared: bool) -> list[Call]:
    """This package's product. prepared: whether weights are repacked in advance."""
    shape, options = problem.shape, {"out_dtype": torch.bfloat16}
    rows = problem.x if activations == "bf16" else problem.a
    weights = problem.weights
    with refusals():
        if prepared:
            dtype = torch.bfloat16 if activations == "bf16" else torch.float16
            gated = shape.problem == "gated"
            weights = [nv.prepare_weight(*(halves(w) if gated else (w,)), dtype=dtype) for w in weights]
        if shape.problem == "gated":
            return checked(lambda: [nv.gated_gemm(rows[0], weights[0], **options)])
        if shape.problem == "grouped":
            pairs = list(zip(rows, weights))
            return checked(lambda: nv.grouped_gemm(pairs, **options))
        return checked(lambda: [nv.gemm(rows[0], weights[0], **options)])


def halves(weight: nv.BlockScaledTensor) -> tuple[nv.BlockScaledTensor, ...]:
    """The gate and up of a weight that has all rows of the gate, then all rows of up."""
    parts = zip(weight.data.chunk(2), weight.rowmajor_scale()[0].chunk(2))
    return tuple(nv.BlockScaledTensor(data, scale, weight.global_scale, weight.format) for data, scale in parts)


def checked(call: Call) -> list[Call]:
    """Calls once, so that the kernel is planned, compiled or refused, and returns the call."""
    call()
    return [call]


def gemv(problem: Problem) -> list[Call]:
    """This package's GEMV, for products of one row."""
    out = torch.empty(problem.shape.n, dtype=torch.bfloat16, device=problem.dense.device)
    with refusals():
        return checked(lambda: [nv.gemv(problem.weights[0], problem.a[0], out=out).unsqueeze(0)])


def finished(problem: Problem, products: Call) -> Call:
    """A peer's products and, for a gated problem, silu(gate) · up in one Triton kernel."""
    if problem.shape.problem != "gated":
        return products
    fused = triton_module().silu_mul
    return lambda: [fused(product) for product in products()]


def cublas(problem: Problem) -> list[Call]:
    """torch's ``linear`` in bf16, called once for each group."""
    pairs = list(zip(problem.x, problem.dense))
    return [finished(problem, lambda: [linear(x, weight) for x, weight in pairs])]


def grouped_mm(problem: Problem) -> list[Call]:
    """torch's grouped product in bf16: one launch for all groups."""
    if not hasattr(torch, "_grouped_mm"):
        raise NotAvailableError(f"torch {torch.__version__} has no _grouped_mm")
    x, weights = torch.cat(problem.x), problem.dense.transpose(1, 2)
    ends = torch.tensor(problem.shape.m, device=x.device).cumsum(0).to(torch.int32)
    return [lambda: list(torch._grouped_mm(x, weights, offs=ends).split(problem.shape.m))]


def quack(problem: Problem) -> list[Call]:
    """quack's W4A16 GEMM with weights that it repacks in advance, in the configuration that it chooses."""
    try:
        from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight
    except ImportError as error:
        raise NotAvailableError(f"quack-kernels: {error}") from error
    form = {"wformat": "nvfp4"}
    groups = []
    for x, weight in zip(problem.x, problem.weights):
        data, scale = prepare_w4_weight(weight.data, weight.rowmajor_scale()[0].view(torch.float8_e4m3fn), **form)
        groups.append((x, data, scale, torch.empty(len(x), weight.rows, dtype=x.dtype, device=x.device)))
    return [finished(problem, lambda: [gemm_w4a16(x, w, sf, out=out, **form) for x, w, sf, out in groups])]


HUMMING_RULES = {
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "nvfp4"}, None),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        {"dtype": "float8e4m3", "quant_mode": "dynamic_token", "scale_dtype": "float32"},
    ),
}
"""How Humming is told the format of weights, as checkpoints have them, and the format that bf16 rows become. It refuses
NVFP4 weights with rows in FP8."""


def humming(problem: Problem, form: str) -> list[Call]:
    """Humming's product of weights in ``form`` that it repacks in advance, in the configuration that it chooses. The
    call includes the quantization of rows to FP8."""
    try:
        from humming.layer import HummingLayer
    except ImportError as error:
        raise NotAvailableError(f"humming-kernels: {error}") from error
    weights = problem.weights_in(form)
    groups, options = problem.shape.m, {}
    shape = problem.shape.products * problem.shape.n, problem.shape.k
    weight_rule, input_rule = HUMMING_RULES[form]
    if len(groups) > 1:
        options["num_experts"] = len(groups)
    layer = HummingLayer(*shape, dict(weight_rule), input_rule and dict(input_rule), **options, torch_dtype=BF16)
    layer = layer.to(problem.dense.device)
    dtype = torch.float8_e4m3fn if form == "nvfp4" else torch.uint8
    tensors = {
        "weight": torch.stack([w.data.view(torch.uint8) for w in weights]),
        "weight_scale": torch.stack([w.rowmajor_scale()[0].view(torch.uint8) for w in weights]).view(dtype),
    }
    if len(groups) == 1:
        tensors = {name: tensor[0] for name, tensor in tensors.items()}
    if form == "nvfp4":
        tensors["weight_scale_2"] = torch.ones_like(layer.weight_scale_2)
    layer.load_from_tensors(tensors)
    layer.transform()
    if len(groups) == 1:
        return [finished(problem, lambda: [layer(problem.x[0])])]
    x = torch.cat(problem.x)
    offsets = torch.tensor((0, *groups), device=x.device).cumsum(0)
    places = {"expert_layout": offsets, "compute_config": {"gemm_type": "grouped_contiguous"}}
    return [lambda: list(layer(x, **places).split(groups))]


def triton_module():
    """Imports ``gemm_triton`` if Triton is installed and finds a GPU's driver, which it looks for on first use."""
    try:
        import gemm_triton
        from triton.runtime import driver

        driver.active.get_current_target()
    except (ImportError, RuntimeError) as error:
        raise NotAvailableError(f"triton: {error}") from error
    return gemm_triton


def triton(problem: Problem) -> list[Call]:
    """The Triton baseline, in every configuration that ``gemm_triton`` lists for the largest group."""
    module = triton_module()
    weights = [module.repack(weight.data, weight.rowmajor_scale()[0]) for weight in problem.weights]
    groups = list(zip(problem.x, weights))

    def products(config) -> list[torch.Tensor]:
        return [module.gemm(x, weight, config) for x, weight in groups]

    listed = module.configs(max(problem.shape.m), problem.weights[0].rows, problem.shape.k)
    return [finished(problem, lambda config=config: products(config)) for config in listed]


def w4a8(problem: Problem, quantizes: bool, form: str = "nvfp4") -> list[Call]:
    """This package's product of rows in E4M3 and 4-bit weights. quantizes: whether the call includes the quantization
    of x. form: the format of the 4-bit weights."""
    shape, options = problem.shape, {"out_dtype": torch.bfloat16}
    with refusals():
        parts = [halves(w) if shape.problem == "gated" else (w,) for w in problem.weights_in(form)]
        weights = [nv.prepare_weight(*p, dtype=torch.float8_e4m3fn) for p in parts]
        if shape.problem == "grouped":
            return w4a8_groups(problem, weights, quantizes)
        x = problem.x[0] if quantizes else nv.quantize(problem.x[0], "fp8_e4m3")
        product = nv.gated_gemm if shape.problem == "gated" else nv.gemm
        return checked(lambda: [product(x, weights[0], **options)])


def w4a8_groups(problem: Problem, weights: list[nv.PreparedWeight], quantizes: bool) -> list[Call]:
    """W4A8 products of groups that are rows of one x, with a stack of the weights; for rows that are already quantized,
    also the products of a list of groups."""
    sizes, options = problem.shape.m, {"out_dtype": torch.bfloat16}
    parts = {name: torch.stack([getattr(w, name) for w in weights]) for name in ("packed", "row_factor")}
    stack, x = replace(weights[0], **parts), torch.cat(problem.x)
    offsets = torch.tensor((0, *sizes), device=x.device).cumsum(0).to(torch.int32)
    rows = x if quantizes else nv.quantize(x, "fp8_e4m3")

    def contiguous() -> list[torch.Tensor]:
        return list(nv.grouped_gemm_contiguous(rows, stack, offsets=offsets, **options).split(sizes))

    found = checked(contiguous)
    if not quantizes:
        pairs = [(nv.quantize(x, "fp8_e4m3"), weight) for x, weight in zip(problem.x, weights)]
        found += checked(lambda: nv.grouped_gemm(pairs, **options))
    return found


def scaled_mm(problem: Problem) -> list[Call]:
    """torch's FP8 product of operands that memory holds in E4M3, a scale a row, fast sums: a ceiling that reads twice
    the bytes."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise NotAvailableError("FP8 products need a GPU of compute capability 8.9")
    x, weight = nv.quantize(problem.x[0], "fp8_e4m3"), in_e4m3(problem.dense[0])
    scales, options = (x.scale[:, None], weight.scale[None]), {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return [finished(problem, lambda: [torch._scaled_mm(x.data, weight.data.t(), *scales, **options)])]


def of_one(shape: Shape) -> bool:
    """Whether a shape is one product, or two with a gate."""
    return shape.problem != "grouped"


OURS = (
    Contestant("w4a16", "W4A16, repacked", "bf16", lambda p: ours(p, "bf16", True)),
    Contestant("w4a4", "W4A4, repacked", "nvfp4", lambda p: ours(p, "nvfp4", True)),
    Contestant("w4a8", "W4A8, x quantized in the call", "fp8", lambda p: w4a8(p, True)),
    Contestant("w4a8-rows", "W4A8, x quantized before", "fp8", lambda p: w4a8(p, False)),
    Contestant("w4a8-mxfp4", "W4A8, weights in MXFP4", "fp8, mxfp4", lambda p: w4a8(p, True, "mxfp4")),
    Contestant("w4a16-plain", "W4A16", "bf16", lambda p: ours(p, "bf16", False)),
    Contestant("w4a4-plain", "W4A4", "nvfp4", lambda p: ours(p, "nvfp4", False)),
    Contestant("gemv", "GEMV (W4A4)", "nvfp4", gemv, lambda shape: shape.problem == "dense" and shape.m == (1,)),
    Contestant("scaled_mm", "torch FP8 x FP8", "fp8 weights", scaled_mm, of_one),
)
PEERS = (
    Contestant("cublas", "cuBLAS bf16", "bf16", cublas),
    Contestant("grouped_mm", "torch grouped", "bf16", grouped_mm, lambda shape: shape.problem == "grouped"),
    Contestant("quack", "quack W4A16", "bf16", quack),
    Contestant("triton", "Triton W4A16", "bf16", triton),
    Contestant("humming", "Humming W4A16", "bf16", lambda p: humming(p, "nvfp4")),
    Contestant("humming-w4a8", "Humming MXFP4 x FP8", "fp8, mxfp4", lambda p: humming(p, "mxfp4")),
)

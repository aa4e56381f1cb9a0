"""``quantize_model``: gives a model's linear layers NVFP4 weights, and reports what that did to each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.nn.awq import column_factors
from cute_nvfp4.nn.divergence import Judged
from cute_nvfp4.nn.expert_modules import activation_of, first_stack, why_not
from cute_nvfp4.nn.experts import ExpertForm, PackedExperts, Stack
from cute_nvfp4.nn.gptq_rounding import gptq, output_error
from cute_nvfp4.nn.input_rules import check_input_rule, takes_4_bits
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.nn.moments import Moments, Run, call, inputs_of, main_blocks
from cute_nvfp4.nn.report import LayerReport, ModelReport
from cute_nvfp4.nn.selection import Selection, matches, select_linears
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.quantize import quantize, tensor_amax
from cute_nvfp4.quantization.blocks import global_scale_from_amax
from cute_nvfp4.quantization.rules import resolve_rule
from cute_nvfp4.runtime.backend import Backend

METHODS = ("nearest", "gptq")


class QuantizedModel(NamedTuple):
    """The model, in which layers were replaced, and the report."""

    model: torch.nn.Module
    report: ModelReport


@dataclass(frozen=True)
class Recipe:
    """How layers are quantized: the options of ``quantize_model``."""

    rule: str = "max"
    method: str = "nearest"
    input_rule: str | None = None
    damping: float = 0.01
    backend: Backend = "auto"
    awq: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OperandError.of("method", got=repr(self.method), expected=f"one of {', '.join(METHODS)}")
        if resolve_rule(self.rule, NVFP4).choice == "hessian":
            hint = "method='gptq' weighs errors by activations."
            raise OperandError.of("rule", got="'hessian'", expected="a rule that needs only values", hint=hint)
        check_input_rule(self.input_rule)

    def weight(self, weight: torch.Tensor, moments: Moments | None) -> BlockScaledTensor:
        """The quantized weight (N, K padded to a multiple of 16), with columns times the factors of ``moments``."""
        factors = None if moments is None else moments.factors
        weight = weight if factors is None else weight.float() * factors
        if self.method == "nearest":
            return quantize(weight, rule=self.rule, pad=True)
        hessian, extra = moments.hessian, -weight.shape[1] % NVFP4.block
        hessian = hessian if factors is None else hessian / factors / factors[:, None]
        if extra:
            weight = torch.nn.functional.pad(weight, (0, extra))
            hessian = torch.nn.functional.pad(hessian, (0, extra, 0, extra))
        return gptq(weight, hessian, self.rule, damping=self.damping)

    def layer(self, linear: torch.nn.Linear, moments: Moments | None) -> NVFP4Linear:
        """The layer that replaces ``linear``, which keeps its tensors."""
        scale = None
        factors = None if moments is None else moments.factors
        if takes_4_bits(self.input_rule) and moments is not None:
            scale = moments.amax.global_scale(self.input_rule)
            if factors is not None:
                amax = (moments.columns / factors).amax()
                scale = global_scale_from_amax(amax, resolve_rule(self.input_rule, NVFP4))
        bias = None if linear.bias is None else linear.bias.detach().clone()
        made = NVFP4Linear(
            self.weight(linear.weight.detach(), moments),
            bias,
            in_features=linear.in_features,
            input_rule=self.input_rule,
            input_global_scale=scale,
            input_scale=None if factors is None else factors.reciprocal(),
            backend=self.backend,
        )
        return made.requires_grad_(False).train(linear.training)

    def choose_factors(self, layers: Mapping[str, torch.nn.Linear], moments: Mapping[str, Moments]) -> None:
        """Sets the column factors in the moments of the layers' inputs; layers with one input share them."""
        groups: dict[int, list[str]] = {}
        for name in layers:
            groups.setdefault(id(_reached(moments, name)), []).append(name)
        for names in groups.values() if self.awq else ():
            found, weights = moments[names[0]], [layers[name].weight.detach() for name in names]
            rule = self.input_rule if takes_4_bits(self.input_rule) else None
            found.factors = column_factors(weights, found.sample, self.rule, rule, amax=found.columns)

    def experts(self, module: torch.nn.Module) -> PackedExperts:
        """The experts that replace fused ones, rounded to nearest; gate and up of an expert share a global scale."""

        def stack(weights: torch.Tensor, parts: int) -> Stack:
            found = []
            for weight in weights.detach():
                scale = global_scale_from_amax(tensor_amax(weight), resolve_rule(self.rule, NVFP4))
                options = {"rule": self.rule, "global_scale": scale, "scale_layout": "rowmajor"}
                found.append([quantize(x, **options) for x in weight.chunk(parts)])
            return Stack.of(found)

        form = ExpertForm(activation=activation_of(module))
        first = stack(getattr(module, first_stack(module)), form.activation.halves)
        options = {"input_rule": self.input_rule, "backend": self.backend}
        return PackedExperts(first, stack(module.down_proj, 1), form, **options).train(module.training)

    def report_experts(self, name: str, module: torch.nn.Module, made: PackedExperts) -> list[LayerReport]:
        """The reports on the two tensors of all experts; they must not be prepared yet."""
        found = []
        for part, stack in zip((first_stack(module), "down_proj"), made.stacks()):
            squares, weight = [0.0, 0.0], getattr(module, part).detach()
            for i in range(made.num_experts):
                exact, decoded = weight[i].float(), made.decoded(stack, i)
                squares[0] += float((exact - decoded).square().sum())
                squares[1] += float(exact.square().sum())
            error = (squares[0] / squares[1]) ** 0.5 if squares[1] else 0.0
            sizes = weight.shape[0] * weight.shape[1], weight.shape[2]
            size, choice = stack.data.nbytes + stack.scale.nbytes, made.explain_backend()
            found.append(LayerReport(f"{name}.{part}", *sizes, "nearest", error, None, size, weight.nbytes, *choice))
        return found

    def report(self, name: str, linear: torch.nn.Linear, made: NVFP4Linear, moments: Moments | None) -> LayerReport:
        """The report on ``linear``; ``made`` must not be prepared yet."""
        weight, decoded = linear.weight.detach().float(), made.weight.dequantize()[:, : linear.in_features]
        if made.input_scale is not None:
            decoded = decoded * made.input_scale
        scale = weight.norm()
        choice = made.explain_backend()
        measured = moments is not None and moments.hessian is not None
        return LayerReport(
            name=name,
            rows=made.out_features,
            k=made.in_features,
            method=self.method if made.input_scale is None else f"awq, {self.method}",
            error=float((weight - decoded).norm() / scale) if scale > 0 else 0.0,
            output_error=output_error(weight, decoded, moments.hessian) if measured else None,
            bytes=made.weight_data.nbytes + made.weight_scale.nbytes,
            bytes_before=linear.weight.nbytes,
            backend=choice.backend,
            kernel=choice.kernel,
            reason=choice.reason,
        )


def quantize_model(
    model: torch.nn.Module,
    rule: str = "max",
    *,
    method: str = "nearest",
    input_rule: str | None = None,
    calibration: Iterable[Any] | None = None,
    ignore: Sequence[str] = (),
    untie: bool = False,
    awq: bool = False,
    judge: Iterable[Any] | None = None,
    damping: float = 0.01,
    backend: Backend = "auto",
    prepare: bool = True,
    progress: Callable[[LayerReport], None] = lambda report: None,
) -> QuantizedModel:
    """Replaces each linear layer of ``model`` by an ``NVFP4Linear``, in place, and returns ``(model, report)``.

    Args:
        rule: how scales of weights are chosen (docs/explanation/quantization.md).
        method: "nearest" rounds to nearest; "gptq" compensates errors in the columns and layers that follow, and needs
            ``calibration``.
        input_rule: how activations are quantized (W4A4); None leaves them in 16 bits (W4A16); "fp8" and "auto" are
            those of ``NVFP4Linear`` (W4A8).
        calibration: batches; the model is called with each, which is a tensor, a tuple of arguments, or a dict of named
            arguments. With "nearest" it gives W4A4 its input scales; without it each batch computes its own.
        ignore: layers that stay, by patterns as for ``select_linears`` ("lm_head", "*.gate", "re:.*vision.*").
        untie: also quantizes layers that share their weight with another module, such as a head with the embedding.
        awq: multiplies columns of weights by a power of the magnitudes of their activations before rounding, if that
            makes products closer; the layer multiplies x by the inverse (``nn.awq``). It needs ``calibration``.
        judge: batches that the model predicts before and after; ``report.divergence`` says how far apart these are. Use
            others than for ``calibration``, to which GPTQ is fitted. All logits are kept, four bytes each.
        damping: that of GPTQ's Hessians, as a share of the mean of their diagonals.
        backend: that of the layers. prepare: whether to call ``NVFP4Linear.prepare`` on each, which leaves one copy.
        progress: is called with each layer's report.

    Experts that have all matrices in two tensors become ``PackedExperts``, rounded to nearest whatever the method.

    Memory: the model and one more layer's weights; with calibration also the second moments of one block and the hidden
    states of all batches.

    Raises:
        OperandError: the rule or the method is unknown, a pattern matches nothing, or GPTQ has no calibration.
    """
    recipe = Recipe(rule, method, input_rule, damping, backend, awq)
    if (method == "gptq" or awq) and calibration is None:
        name = "GPTQ" if method == "gptq" else "AWQ"
        raise OperandError.of("calibration", got="None", expected=f"batches: {name} asks for activations")
    layers, report = select_linears(model, ignore, untie=untie), ModelReport()
    report.skipped = layers.skipped

    def replace(name: str, moments: Moments | None) -> None:
        linear = layers.pop(name)
        made = recipe.layer(linear, moments)
        report.layers.append(recipe.report(name, linear, made, moments))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)
        if prepare:
            made.prepare(linear.weight.dtype if linear.weight.dtype is torch.float16 else torch.bfloat16)
        progress(report.layers[-1])

    runs = calibration is not None or judge is not None
    with torch.no_grad(), _without_cache(model) if runs else contextlib.nullcontext():
        judged = None if judge is None else Judged(model, judge)
        if calibration is not None:
            _calibrated(model, layers, list(calibration), recipe, replace)
        for name in list(layers):
            replace(name, None)
        _replace_experts(model, recipe, ignore, prepare, report, progress)
        report.divergence = None if judged is None else judged.divergence(model)
    return QuantizedModel(model, report)


def _replace_experts(
    model: torch.nn.Module,
    recipe: Recipe,
    ignore: Sequence[str],
    prepare: bool,
    report: ModelReport,
    progress: Callable[[LayerReport], None],
) -> None:
    """Replaces experts that have all matrices in two tensors by ``PackedExperts``, rounded to nearest."""
    for name, module in list(model.named_modules()):
        if first_stack(module) is None:
            continue
        pattern = next((x for x in ignore if matches(name, x)), None)
        reason = f"ignored: {pattern}" if pattern is not None else why_not(module)
        if reason:
            report.skipped[name] = reason
            continue
        made = recipe.experts(module)
        report.layers += recipe.report_experts(name, module, made)
        if prepare:
            made.prepare(torch.float16 if module.down_proj.dtype is torch.float16 else torch.bfloat16)
        model.set_submodule(name, made)
        for layer in report.layers[-2:]:
            progress(layer)


def _calibrated(
    model: torch.nn.Module, layers: Selection, batches: list[Any], recipe: Recipe, replace: Callable
) -> None:
    """Replaces all layers: those of each block after it ran, others after the last block."""
    if not batches:
        raise OperandError.of("calibration", got="no batch", expected="at least one")

    def make() -> Moments:
        return Moments(recipe.input_rule)

    prefix, blocks = main_blocks(model, layers)
    inside = {i: {n: x for n, x in layers.items() if n.startswith(f"{prefix}.{i}.")} for i in range(len(blocks))}
    if blocks:
        run = Run(model, blocks, batches)
    for i, block in enumerate(blocks):
        moments = run.collect(i, block, inside[i], make)
        recipe.choose_factors(inside[i], moments)
        for name in inside[i]:
            replace(name, _reached(moments, name))
        run.advance(i, block)
    outside, moments = dict(layers), {}
    for batch in batches if outside else ():
        with inputs_of(outside) as found:
            call(model, batch)
        for name, x in found.items():
            moments.setdefault(name, make()).add(x)
    recipe.choose_factors(outside, moments)
    for name in outside:
        replace(name, _reached(moments, name))


def _reached(moments: Mapping[str, Moments], name: str) -> Moments:
    if name not in moments or not moments[name].rows:
        raise OperandError.of(
            "calibration",
            got=f"no row for {name}",
            expected="batches that reach every layer",
            hint="More text, or the layer's name in ignore.",
        )
    return moments[name]


@contextlib.contextmanager
def _without_cache(model: torch.nn.Module) -> Iterator[None]:
    """A context in which a transformers model keeps no keys and values, because blocks run more than once."""
    config = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before is not None:
        config.use_cache = False
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        if before is not None:
            config.use_cache = before

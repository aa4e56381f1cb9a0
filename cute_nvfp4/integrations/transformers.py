"""NVFP4 checkpoints in transformers: after ``import cute_nvfp4.integrations.transformers``, ``from_pretrained`` runs
them in 4 bits.

The import registers two quantization methods that transformers lacks: "modelopt" (NVIDIA's checkpoints; transformers
itself would take their packed bytes for weights) and "cute_nvfp4" (:class:`CuteNvfp4Config`, which also quantizes while
it loads). ``register(compressed_tensors=True)`` adds the NVFP4 and MXFP4 checkpoints of compressed-tensors, which
transformers would decode, and ``register(mxfp4=True)`` those of gpt-oss. The tensors of a file decide which layers are
quantized, so ``ignore`` lists and FP8 layers of mixed checkpoints need no care.
``experts_implementation="cute_nvfp4"`` runs the experts of a model in 16 bits as one ``moe``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.integrations.transformers_plans import exchanging, experts_of_rank, plan_whole_experts, planned, ranks
from cute_nvfp4.nn.expert_modules import first_stack, why_not
from cute_nvfp4.nn.experts import PackedExperts
from cute_nvfp4.nn.layout_configs import compressed_tensors_config, is_packed, modelopt_config
from cute_nvfp4.nn.layouts import LAYOUTS, MODELOPT, tensors_of
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.nn.loaded_shards import whole_experts, whole_tensors
from cute_nvfp4.nn.routed import routed_experts
from cute_nvfp4.nn.routers import fuse_routers
from cute_nvfp4.nn.stored import StoredExperts, StoredLayers, StoredLinear, StoredStacks, linears, tensors_of_experts
from cute_nvfp4.nn.whole_model import Recipe, quantize_model
from cute_nvfp4.runtime.backend import Backend

METHOD = "cute_nvfp4"
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)")
_COMPRESSED, _MXFP4 = "compressed-tensors", "mxfp4"


class _Defaults:
    """How checkpoints of other libraries run; ``register`` sets it."""

    input_rule: str | None = None
    backend: Backend = "auto"


class CuteNvfp4Config(QuantizationConfigMixin):
    """How a model is quantized while it is loaded, and how its checkpoint is written.

    rule, input_rule, ignore, untie, backend: as in ``quantize_model``, which rounds to nearest here. ignore: None
    leaves out the head (``lm_head``). layout: that of the tensors in a checkpoint, "modelopt" or "compressed-tensors".
    """

    def __init__(
        self,
        rule: str = "max",
        input_rule: str | None = None,
        ignore: Sequence[str] | None = None,
        untie: bool = False,
        backend: Backend = "auto",
        layout: str = "modelopt",
        **unused: Any,
    ) -> None:
        Recipe(rule, input_rule=input_rule, backend=backend)
        if layout not in LAYOUTS:
            raise OperandError.of("layout", got=repr(layout), expected=" or ".join(LAYOUTS))
        self.quant_method = METHOD
        self.rule, self.input_rule, self.backend, self.layout, self.untie = rule, input_rule, backend, layout, untie
        self.ignore = None if ignore is None else list(ignore)


class PublishedConfig(QuantizationConfigMixin):
    """The configuration of another library's checkpoint, kept and written again unchanged."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    @property
    def input_rule(self) -> str | None:
        """The rule that ``register`` was given."""
        return _Defaults.input_rule

    @property
    def backend(self) -> Backend:
        """The backend that ``register`` was given."""
        return _Defaults.backend

    @property
    def layout(self) -> str:
        """The name of the layout that the checkpoint's library writes."""
        return self.quant_method


class CuteNvfp4Quantizer(HfQuantizer):
    """Loads, quantizes and saves models with ``NVFP4Linear`` layers."""

    def validate_environment(self, *args: Any, **options: Any) -> None:
        """Refuses the plans of older versions of transformers, which cut tensors after they are loaded."""
        if options.get("tp_plan") is not None or options.get("device_mesh") is not None:
            raise ValueError(
                "tensor parallel loading needs transformers 5.24 or later. Or drop tp_plan and device_mesh, and then "
                "call parallelize_module with the styles of cute_nvfp4.nn (docs/how-to/use_two_gpus.md)"
            )

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **options: Any) -> Any:
        self._linears: dict[str, torch.nn.Linear] = {}
        self._experts: set[str] = set()
        self._styles: dict[str, str] = {}
        count = ranks(model)
        if not self.pre_quantized:
            if count > 1:
                expected, hint = "a checkpoint in 4 bits", "Write one by `cute-nvfp4 quantize` first."
                raise OperandError.of("a model that is divided", got="16 bits", expected=expected, hint=hint)
            return model
        if not checkpoint_files:
            raise OperandError.of("checkpoint", got="no files", expected="safetensors with quantized layers")
        stored = StoredLayers.read(checkpoint_files)
        if not stored.packed and not stored.stacks:
            got = "no layer in NVFP4 or MXFP4"
            raise OperandError.of("checkpoint", got=got, expected="one", hint=str(checkpoint_files))
        modules = dict(model.named_modules())
        for name, parts in stored.tensors.items():
            path = _module_path(name, modules, model.base_model_prefix)
            if self._is_expert(model, name, path, modules, StoredLinear(path, stored.packed.get(name), parts)):
                continue
            if not isinstance(modules.get(path), torch.nn.Linear):
                got = type(modules[path]).__name__ if path in modules else "no such module"
                raise OperandError.of(f"module {name!r} of the model", got=got, expected="torch.nn.Linear")
            self._linears[path] = modules[path]
            model.set_submodule(path, StoredLinear(path, stored.packed.get(name), parts))
            _untie(model, path)
        for name, parts in stored.stacks.items():
            path = _module_path(name, modules, model.base_model_prefix)
            if path not in modules or first_stack(modules[path]) != "gate_up_proj":
                got = type(modules[path]).__name__ if path in modules else "no such module"
                raise OperandError.of(f"module {name!r} of the model", got=got, expected="experts in two tensors")
            self._experts.add(path)
            model.set_submodule(path, StoredStacks(path, modules[path], parts))
        return model

    def _is_expert(self, model: Any, name: str, path: str, modules: dict[str, Any], layer: StoredLinear) -> bool:
        """Whether a layer belongs to experts that the model has in two tensors; if so, adds it to them."""
        match = _EXPERT.fullmatch(name)
        if match is None or path in modules:
            return False
        parent = _module_path(match["experts"], modules, model.base_model_prefix)
        if parent not in modules or not (parent in self._experts or first_stack(modules[parent])):
            return False
        if parent not in self._experts:
            reason = why_not(modules[parent])
            if reason:
                raise OperandError.of(parent, got=reason, expected="[gate; up] (E, 2 I, H), down (E, H, I), no bias")
            self._experts.add(parent)
            mine = experts_of_rank(model, parent, modules[parent].down_proj.shape[0])
            modules[parent] = StoredExperts(parent, modules[parent], mine)
            model.set_submodule(parent, modules[parent])
        layer.name = f"{parent}.{match['expert']}.{match['projection']}"
        modules[parent].add(match["expert"], match["projection"], layer)
        return True

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Changes the model's tensor parallel plan to the tensors in the file, and refuses what cannot be cut.

        Each rank then reads its shard of codes and scales, and packs it.
        """
        if plan is model.ep_plan and plan:
            plan_whole_experts(model, plan)
        if plan is model.tp_plan and plan:
            self._styles = planned(model, plan, {path: model.get_submodule(path) for path in self._linears})

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        """Whether a tensor belongs to a stored layer, whose tensors have the shapes of the file."""
        return isinstance(model.get_submodule(param_name.rpartition(".")[0]), (StoredLinear, StoredStacks))

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        config = self.quantization_config
        for path, old in self._linears.items():
            stored = model.get_submodule(path)
            made = stored.made(old, config.input_rule, config.backend).requires_grad_(False)
            if stored.cut is not None:
                made = exchanging(made, old, stored.cut, self._styles[path])
            model.set_submodule(path, made.eval())
        for path in self._experts:
            made = model.get_submodule(path).made(config.input_rule, config.backend).requires_grad_(False)
            model.set_submodule(path, made.eval())
        if not self.pre_quantized:
            ignore = config.ignore
            if ignore is None:
                ignore = ["lm_head"] if any(name == "lm_head" for name, _ in model.named_modules()) else []
            options = {"input_rule": config.input_rule, "untie": config.untie, "backend": config.backend}
            model, model.quantization_report = quantize_model(model, config.rule, ignore=ignore, **options)
            for name in linears(model):
                _untie(model, name)
        half = model.dtype if model.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
        for layer in model.modules():
            if isinstance(layer, (NVFP4Linear, PackedExperts)):
                layer.prepare(half)
        fuse_routers(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The tensors of a checkpoint in the configured layout. If the model is divided, every rank must call this."""
        layers, layout = linears(model), LAYOUTS.get(self.quantization_config.layout, MODELOPT)
        experts = {name: x for name, x in model.named_modules() if isinstance(x, PackedExperts)}
        prefixes = tuple(f"{name}." for name in (*layers, *experts))
        found = {name: x for name, x in model.state_dict().items() if not name.startswith(prefixes)}
        for name, layer in layers.items():
            parts = whole_tensors(tensors_of(layer, layout), layer.shard)
            found |= {f"{name}.{part}": x for part, x in parts.items()}
        for name, module in experts.items():
            parts = whole_experts(tensors_of_experts(module, layout), module.shard)
            found |= {f"{name}.{part}": x for part, x in parts.items()}
        return found, {}

    def is_serializable(self) -> bool:
        """Always True."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Always False: codes have no derivative."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Always True: the layers compile to one graph, without breaks."""
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        # a saved configuration holds the name of a dtype
        wide = dtype if isinstance(dtype, torch.dtype) else model.dtype
        if any(layer.shard is not None for layer in linears(model).values()):
            raise OperandError.of("dequantize", got="a divided model", expected="a model that one process has")
        for name, layer in linears(model).items():
            made = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            made.weight = torch.nn.Parameter(layer._decoded(wide), requires_grad=False)
            if layer.bias is not None:
                made.bias = torch.nn.Parameter(layer.bias.detach().to(made.weight.dtype), requires_grad=False)
            model.set_submodule(name, made.eval())
        return model


def _untie(model: Any, name: str) -> None:
    """Marks a quantized layer as no longer tied: it has a weight of its own now."""
    if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
        model.config.tie_word_embeddings = False


def _module_path(name: str, modules: dict[str, Any], prefix: str) -> str:
    """The model's name for a layer of a checkpoint, with or without the base model's prefix."""
    others = f"{prefix}.{name}", name.removeprefix(f"{prefix}.")
    return next((other for other in (name, *others) if other in modules), name)


class _ModelOptConfig(PublishedConfig):
    @classmethod
    def from_dict(cls, config_dict: dict, return_unused_kwargs: bool = False, **options: Any) -> Any:
        algorithm = config_dict.get("quant_algo", "NVFP4")
        packed = any(format in str(algorithm) for format in ("NVFP4", "MXFP4")) or algorithm == "MIXED_PRECISION"
        if not packed or "SVD" in str(algorithm):
            expected = "one with NVFP4 or MXFP4 layers, without a low-rank part"
            raise OperandError.of("quant_algo", got=algorithm, expected=expected)
        return super().from_dict(config_dict, return_unused_kwargs, **options)


def save_pretrained(model: Any, folder: str | Path, layout: str = "modelopt", **options: Any) -> None:
    """Writes a model of this package so that the library of ``layout`` can read it: tensors and its configuration.

    options: those of the model's own ``save_pretrained``, which writes the layout that the model was loaded from.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    quantizes = any(layer.input_global_scale is not None for layer in linears(model).values())
    if layout not in LAYOUTS:
        raise OperandError.of("layout", got=repr(layout), expected=" or ".join(LAYOUTS))
    if layout == MODELOPT.name:
        awq = any(layer.input_scale is not None for layer in linears(model).values())
        fields = modelopt_config(names, quantizes, awq=awq)
    else:
        formats = {layer.format.name: layer.format for layer in linears(model).values()}
        fields = compressed_tensors_config(names, quantizes, formats.popitem()[1] if len(formats) == 1 else NVFP4)
    before = getattr(model, "hf_quantizer", None), getattr(model.config, "quantization_config", None)
    model.config.quantization_config = PublishedConfig(**fields)
    model.hf_quantizer = CuteNvfp4Quantizer(model.config.quantization_config)
    try:
        model.save_pretrained(folder, **options)
    finally:
        model.hf_quantizer, model.config.quantization_config = before
        if before[0] is None:
            del model.hf_quantizer, model.config.quantization_config


def register(
    *,
    compressed_tensors: bool = False,
    mxfp4: bool = False,
    input_rule: str | None = None,
    backend: Backend = "auto",
) -> None:
    """Sets how checkpoints of other libraries run.

    compressed_tensors: whether to take its NVFP4 and MXFP4 checkpoints, too; others stay with transformers. mxfp4:
    whether to take gpt-oss's, too, which transformers decodes, or runs by kernels from a hub. input_rule: how
    activations are quantized; None: they stay in 16 bits, whatever the checkpoint asks for. backend: of the layers.
    """
    Recipe(input_rule=input_rule, backend=backend)
    _Defaults.input_rule, _Defaults.backend = input_rule, backend
    for method, config in ((METHOD, CuteNvfp4Config), ("modelopt", _ModelOptConfig)):
        if method not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
            auto.register_quantization_config(method)(config)
            auto.register_quantizer(method)(CuteNvfp4Quantizer)
    ALL_EXPERTS_FUNCTIONS.register(METHOD, routed_experts)
    for method, wanted in ((_COMPRESSED, compressed_tensors), (_MXFP4, mxfp4)):
        for registry in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
            if wanted and not isinstance(registry[method], _Choice):
                registry[method] = _Choice(registry[method])


class _Choice:
    """Replaces a class of transformers for compressed-tensors or MXFP4; checkpoints with 4-bit weights use ours."""

    def __init__(self, theirs: type) -> None:
        self.theirs = theirs

    def from_dict(self, config_dict: dict, **options: Any) -> Any:
        return (PublishedConfig if is_packed(config_dict) else self.theirs).from_dict(config_dict, **options)

    def __call__(self, config: Any, **options: Any) -> HfQuantizer:
        return (CuteNvfp4Quantizer if isinstance(config, PublishedConfig) else self.theirs)(config, **options)


register()

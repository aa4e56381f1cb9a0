"""The two layouts in which NVFP4 checkpoints are published, read and written: tensors of a layer by name.

Both store a linear layer ``X`` with W (N, K) as packed E2M1, low nibble first, and row-major E4M3 scales; they differ
in names, and in whether a global scale multiplies or divides:

| | ModelOpt | compressed-tensors |
|---|---|---|
| E2M1, uint8 (N, K/2) | X.weight | X.weight_packed |
| scales, float8_e4m3fn (N, K/16) | X.weight_scale | X.weight_scale |
| global scale, float32, one element | X.weight_scale_2, multiplies | X.weight_global_scale, divides |
| global scale of activations, optional | X.input_scale, multiplies | X.input_global_scale, divides |
| (K,) to multiply activations by, optional | X.pre_quant_scale | |
| (N,), optional | X.bias | X.bias |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.runtime.backend import Backend

_ALIGNMENT = 16


@dataclass(frozen=True)
class Layout:
    """The names of a publisher's tensors, and whether its global scales divide."""

    name: str
    weight: str
    global_scale: str
    input_global_scale: str
    divides: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of everything that belongs to a layer."""
        return self.weight, "weight_scale", self.global_scale, self.input_global_scale, "pre_quant_scale", "bias"


MODELOPT = Layout("modelopt", "weight", "weight_scale_2", "input_scale", divides=False)
COMPRESSED_TENSORS = Layout(
    "compressed-tensors", "weight_packed", "weight_global_scale", "input_global_scale", divides=True
)
LAYOUTS = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS)}


@dataclass(frozen=True)
class CheckpointLayer:
    """A linear layer of a checkpoint. Global scales multiply, whatever the file's did.

    stored: what the file has besides the weight and its scales, by its names: what ``tensors_of`` writes again.
    """

    name: str
    convention: str
    weight: BlockScaledTensor
    input_global_scale: torch.Tensor | None
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    stored: dict[str, torch.Tensor] = field(default_factory=dict)

    def linear(self, *, input_rule: str | None = "max", backend: Backend = "auto") -> NVFP4Linear:
        """The layer as a module."""
        made = NVFP4Linear(
            self.weight,
            self.bias,
            input_rule=input_rule,
            input_global_scale=self.input_global_scale,
            input_scale=self.input_scale,
            backend=backend,
        )
        made.stored = self.convention, self.stored
        return made


def quantized_layers(names: Iterable[str]) -> Iterator[tuple[str, Layout]]:
    """Layers among the names of a checkpoint's tensors that have the global scale of either layout."""
    for name in names:
        for layout in LAYOUTS.values():
            suffix = f".{layout.global_scale}"
            if name.endswith(suffix):
                yield name.removesuffix(suffix), layout


def read_layer(name: str, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> CheckpointLayer:
    """The layer ``name`` of its tensors by the names that they have within it.

    Raises:
        OperandError, OperandTypeError: tensors that are missing, or not of this module's shapes and dtypes.
    """
    for part in (layout.weight, "weight_scale", layout.global_scale):
        if part not in tensors:
            raise OperandError.of("checkpoint", got=f"no tensor '{name}.{part}'", expected="one, beside its layer's")
    data, scale = tensors[layout.weight], tensors["weight_scale"]
    for what, tensor, dtype in (("weight", data, torch.uint8), ("weight_scale", scale, NVFP4.scale_dtype)):
        if tensor.dtype is not dtype:
            raise OperandTypeError.of(f"{what} of {name}", got=tensor.dtype, expected=dtype)
    given = tensors.get(layout.input_global_scale)
    return CheckpointLayer(
        name,
        layout.name,
        BlockScaledTensor(
            # a file need not align its tensors
            data if data.data_ptr() % _ALIGNMENT == 0 else data.clone(),
            scale.view(torch.uint8),
            _multiplier(f"{name}, weights", tensors[layout.global_scale], layout),
        ),
        None if given is None else _multiplier(f"{name}, inputs", given, layout),
        tensors.get("pre_quant_scale"),
        tensors.get("bias"),
        {part: x for part, x in tensors.items() if part not in (layout.weight, "weight_scale", "bias")},
    )


def tensors_of(linear: NVFP4Linear, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a layer as ``layout`` has them, by the names within it. A layer that was read from that layout
    gives back what was read, every bit: global scales that divide are not divided twice.

    Raises:
        OperandError: padding along K, which neither layout has; an input scale that the layout has no name for.
    """
    weight = linear.weight
    if weight.k != linear.in_features:
        expected = f"a multiple of {NVFP4.block}"
        raise OperandError.of(f"in_features for the layout {layout.name}", got=linear.in_features, expected=expected)
    source, stored = linear.stored
    known = stored if source == layout.name else {k: x for k, x in stored.items() if k not in _names_of_all()}
    scale = weight.rowmajor_scale()[0].view(NVFP4.scale_dtype)
    found = {layout.weight: weight.data.view(torch.uint8), "weight_scale": scale}
    one = torch.ones((), device=weight.device)
    scales = {layout.global_scale: one if weight.global_scale is None else weight.global_scale}
    if linear.input_global_scale is not None:
        scales[layout.input_global_scale] = linear.input_global_scale
    for part, value in scales.items():
        found[part] = value.detach().reshape((1,)).reciprocal() if layout.divides else value.detach().reshape(())
        before = stored.get(part) if source == layout.name else None
        if before is not None and _multiplier(part, before, layout).equal(value.reshape(())):
            found[part] = before
    if linear.input_scale is not None:
        if layout is not MODELOPT:
            raise OperandError.of("input_scale", got="one", expected="none: compressed-tensors has no name for it")
        found["pre_quant_scale"] = linear.input_scale
    if linear.bias is not None:
        found["bias"] = linear.bias.detach()
    return {name: x.contiguous() for name, x in ({k: x for k, x in known.items() if k not in found} | found).items()}


def _names_of_all() -> set[str]:
    return {part for layout in LAYOUTS.values() for part in layout.parts}


def _multiplier(what: str, value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A stored global scale as the number that multiplies."""
    if value.numel() != 1:
        raise OperandError.of(f"global scale of {what}", got=f"shape {tuple(value.shape)}", expected="one element")
    value = value.to(torch.float32).reshape(())
    if not (torch.isfinite(value) and value > 0):
        raise OperandError.of(f"global scale of {what}", got=float(value), expected="a positive number")
    return 1.0 / value if layout.divides else value

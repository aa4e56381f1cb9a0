"""The layouts of published NVFP4 and MXFP4 checkpoints, for reading and writing: the tensors of a layer, by name.

ModelOpt and compressed-tensors store a linear layer ``X`` with W (N, K) as packed E2M1, low nibble first, and row-major
scales. They differ in names, and in whether a global scale multiplies or divides. NVFP4:

| | ModelOpt | compressed-tensors |
|---|---|---|
| E2M1, uint8 (N, K/2) | X.weight | X.weight_packed |
| scales, float8_e4m3fn (N, K/16) | X.weight_scale | X.weight_scale |
| global scale, float32, one element | X.weight_scale_2, multiplies | X.weight_global_scale, divides |
| global scale of activations, optional | X.input_scale, multiplies | X.input_global_scale, divides |
| (K,) to multiply activations by, optional | X.pre_quant_scale | |
| (N,), optional | X.bias | X.bias |

MXFP4 has the same names, but no global scale of weights; its scales are UE8M0, uint8 (N, K/32). The files of gpt-oss
store all experts of a layer in stacks of MXFP4 (``nn.stored``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import MXFP4, NVFP4, Format
from cute_nvfp4.nn.linear import NVFP4Linear, linear_class
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.runtime.backend import Backend

_ALIGNMENT = 16


class TensorInfo(NamedTuple):
    """The shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """The names of a publisher's tensors, whether its global scales divide, and the format.

    MXFP4 has no global scale.
    """

    name: str
    weight: str
    global_scale: str
    input_global_scale: str
    divides: bool
    format: Format = NVFP4

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of the tensors that every quantized layer has."""
        return (self.weight, "weight_scale", *([self.global_scale] if self.format is NVFP4 else []))

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales in a file."""
        return NVFP4.scale_dtype if self.format is NVFP4 else torch.uint8

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all tensors that a layer may have."""
        return *self.needed, self.input_global_scale, "pre_quant_scale", "bias"

    def of(self, format: Format) -> Layout:
        """The layout of the same publisher for another format."""
        return replace(self, format=format)


MODELOPT = Layout("modelopt", "weight", "weight_scale_2", "input_scale", divides=False)
COMPRESSED_TENSORS = Layout(
    "compressed-tensors", "weight_packed", "weight_global_scale", "input_global_scale", divides=True
)
LAYOUTS = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS)}


@dataclass(frozen=True)
class CheckpointLayer:
    """A linear layer of a checkpoint. Its global scales multiply, whatever those of the file do.

    stored: the file's small tensors, by its names, which ``tensors_of`` writes again.
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
        made = linear_class(self.weight.format)(
            self.weight,
            self.bias,
            input_rule=input_rule,
            input_global_scale=self.input_global_scale,
            input_scale=self.input_scale,
            backend=backend,
        )
        made.stored = self.convention, self.stored
        return made


def quantized_layers(found: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Layout]]:
    """The layers among a checkpoint's tensors that have one of the layouts: NVFP4 layers have a global scale, MXFP4
    layers packed bytes and scales that are bytes."""
    for name, info in sorted(found.items()):
        layer, _, part = name.rpartition(".")
        for layout in LAYOUTS.values():
            if part == layout.global_scale:
                yield layer, layout
            elif part == layout.weight and info.dtype is torch.uint8 and f"{layer}.{layout.global_scale}" not in found:
                scale = found.get(f"{layer}.weight_scale")
                if scale is not None and scale.dtype is torch.uint8:
                    yield layer, layout.of(MXFP4)


def read_layer(name: str, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> CheckpointLayer:
    """The layer ``name``, from its tensors by their names within it.

    Raises:
        OperandError, OperandTypeError: tensors are missing, or do not have this module's shapes and dtypes.
    """
    for part in layout.needed:
        if part not in tensors:
            raise OperandError.of("checkpoint", got=f"no tensor '{name}.{part}'", expected="one, beside its layer's")
    data, scale = tensors[layout.weight], tensors["weight_scale"]
    for what, tensor, dtype in (("weight", data, torch.uint8), ("weight_scale", scale, layout.scale_dtype)):
        if tensor.dtype is not dtype:
            raise OperandTypeError.of(f"{what} of {name}", got=tensor.dtype, expected=dtype)
    # with MXFP4 it is the scale of FP8 activations, which this package does not use
    input_global_scale = tensors.get(layout.input_global_scale) if layout.format is NVFP4 else None
    return CheckpointLayer(
        name,
        layout.name,
        BlockScaledTensor(
            aligned(data),
            scale.view(torch.uint8),
            _multiplier(f"{name}, weights", tensors[layout.global_scale], layout) if layout.format is NVFP4 else None,
            layout.format,
        ),
        None if input_global_scale is None else _multiplier(f"{name}, inputs", input_global_scale, layout),
        tensors.get("pre_quant_scale"),
        tensors.get("bias"),
        {part: x for part, x in tensors.items() if part not in (layout.weight, "weight_scale", "bias")},
    )


def aligned(data: torch.Tensor) -> torch.Tensor:
    """Packed bytes at an address that kernels can read; a file need not align its tensors."""
    return data if data.data_ptr() % _ALIGNMENT == 0 else data.clone()


def tensors_of(linear: NVFP4Linear, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a layer as the publisher of ``layout`` stores them, in the layer's format, by name within it.

    A layer that was read from that layout returns what was read, bit for bit: global scales that divide are not divided
    twice.

    Raises:
        OperandError: the layer has padding along K, which neither layout has, or an input scale without a name there.
    """
    weight = linear.weight
    layout = layout.of(weight.format)
    if weight.k != linear.in_features:
        expected = f"a multiple of {layout.format.block}"
        raise OperandError.of(f"in_features for the layout {layout.name}", got=linear.in_features, expected=expected)
    source, stored = linear.stored
    known = stored if source == layout.name else {k: x for k, x in stored.items() if k not in _names_of_all()}
    scale = weight.rowmajor_scale()[0].view(layout.scale_dtype)
    found = {layout.weight: weight.data.view(torch.uint8), "weight_scale": scale}
    scales = {}
    if layout.format is NVFP4:
        one = torch.ones((), device=weight.device)
        scales[layout.global_scale] = one if weight.global_scale is None else weight.global_scale
    if linear.input_global_scale is not None:
        scales[layout.input_global_scale] = linear.input_global_scale
    for part, value in scales.items():
        found[part] = value.detach().reshape((1,)).reciprocal() if layout.divides else value.detach().reshape(())
        before = stored.get(part) if source == layout.name else None
        if before is not None and _multiplier(part, before, layout).equal(value.reshape(())):
            found[part] = before
    if linear.input_scale is not None:
        if layout.name != MODELOPT.name:
            raise OperandError.of("input_scale", got="one", expected="none: compressed-tensors has no name for it")
        found["pre_quant_scale"] = linear.input_scale
    if linear.bias is not None:
        found["bias"] = linear.bias.detach()
    return {name: x.contiguous() for name, x in ({k: x for k, x in known.items() if k not in found} | found).items()}


def _names_of_all() -> set[str]:
    return {part for layout in LAYOUTS.values() for part in layout.parts}


def _multiplier(what: str, value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A stored global scale as a multiplier."""
    if value.numel() != 1:
        raise OperandError.of(f"global scale of {what}", got=f"shape {tuple(value.shape)}", expected="one element")
    value = value.to(torch.float32).reshape(())
    if not (torch.isfinite(value) and value > 0):
        raise OperandError.of(f"global scale of {what}", got=float(value), expected="a positive number")
    return 1.0 / value if layout.divides else value

"""The NVFP4 or MXFP4 weight that a layer holds: as a checkpoint has it, repacked for Hopper, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_nvfp4.formats import NVFP4, Format
from cute_nvfp4.nn.released import Rewritten, rewritten, unpacked
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.calls import addresses
from cute_nvfp4.ops.dispatch import is_recorded, recording
from cute_nvfp4.ops.prepare_weight import prepare_weight
from cute_nvfp4.ops.row_product import RowProduct
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.runtime.backend import Backend, resolve
from cute_nvfp4.runtime.bounded import Bounded
from cute_nvfp4.scale_layout import blocked_flat, to_blocked

if TYPE_CHECKING:
    from typing_extensions import Self


class _Kept(NamedTuple):
    """The weight as an operand, and where its tensors were when they were checked; what was planned with it and with
    the global scale of x, by kind of row (None: nothing is); the weight as it was prepared."""

    operand: BlockScaledTensor
    places: tuple[int, ...]
    input_global_scale: torch.Tensor | None
    rows: dict[tuple, RowProduct | None]
    prepared: dict[torch.dtype, _Prepared]


class _Prepared(NamedTuple):
    """A prepared weight, and versions of the buffers that it was made of."""

    weight: PreparedWeight
    versions: tuple[int, ...]


PREPARED = {torch.bfloat16: "weight_prepared_bfloat16", torch.float16: "weight_prepared_float16"}
"""Buffers of prepared weights, by the dtype of the products: no part of a state_dict."""
_REWRITTEN = ("weight_rewritten_places", "weight_rewritten_contents")
"""Buffers of the blocks that packing rewrote, where the prepared weight is the only one."""
_UNSAVED = ("_kept", "_prepared_from", "_sole")


class HeldWeight(torch.nn.Module):
    """The part of ``NVFP4Linear`` and ``MXFP4Linear`` that holds W (N, K): buffers ``weight_data`` (N, K / 2),
    ``weight_scale``, blocked and flat, and ``weight_global_scale``, None for MXFP4, and what products on Hopper read
    instead of the first two.

    in_features: columns that are no padding. input_rule: that of x, or None: it says in which dtype weights are
    multiplied. backend: of the products.
    """

    format: Format = NVFP4
    _kept: _Kept | None = None
    _prepared_from: tuple[torch.Tensor | None, ...] = (None, None)
    _released: torch.dtype | None = None
    _wanted: torch.dtype | None = None
    _sole: PreparedWeight | None = None

    def __init__(self, weight: BlockScaledTensor, in_features: int, input_rule: str | None, backend: Backend) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = weight.rows
        self.input_rule = input_rule
        self.backend = backend
        self.register_buffer("weight_data", weight.data.view(torch.uint8))
        self.register_buffer("weight_scale", _flat_scale(weight))
        self.register_buffer("weight_global_scale", weight.global_scale)

    @property
    def weight(self) -> BlockScaledTensor:
        """The weight as an operand, (N, K) with K padded to a multiple of 16: one object, until a buffer changes. Of a
        layer that holds the repacked weight only it is unpacked each time."""
        if self._released is not None:
            return unpacked(self._sole_weight(), self._rewritten, self.format)
        operand, _ = self._checked()
        return operand

    def _checked(self) -> tuple[BlockScaledTensor, dict[tuple, RowProduct | None] | None]:
        """The weight, and what was planned with it; None while torch records, when nothing is kept."""
        # torch.nn.Module's own attributes take longer than dictionaries
        buffers = self._buffers
        data, scale, factor = buffers["weight_data"], buffers["weight_scale"], buffers["weight_global_scale"]
        if torch.compiler.is_dynamo_compiling():
            return BlockScaledTensor(data, scale, factor, self.format), None
        given = buffers.get("input_global_scale")
        if self._kept is not None:
            kept, places, before, rows, _ = self._kept
            if kept.data is data and kept.scale is scale and kept.global_scale is factor and before is given:
                # a tensor may have got other memory, or contents swapped in
                if places == addresses(data, scale, factor):
                    return kept, rows
        operand = BlockScaledTensor(data, scale, factor, self.format)
        if is_recorded(data):
            return operand, None
        self._forget()
        self._kept = _Kept(operand, addresses(data, scale, factor), given, Bounded(), {})
        return operand, self._kept.rows

    def prepare(self, dtype: torch.dtype = torch.bfloat16, *, release: bool = True) -> Self:
        """Repacks the weight for Hopper's tensor cores now, where it is: before a graph is captured or a model is
        compiled, where the layer cannot. Elsewhere than on Hopper it waits until the layer moves there. Returns the
        layer.

        dtype: of x where x is not quantized, bfloat16 or float16. ``load_state_dict`` writes the packed weight, too;
        who writes to the buffers otherwise while gradients are off (inference mode, ``.data``) calls this again.
        release: gives up ``weight_data`` and ``weight_scale``, which ``state_dict`` has nevertheless, in every bit; so
        do ``weight`` and moves to other devices. One row of x is then multiplied by ``gemm``, and x in another dtype by
        a weight that is decoded for each call. False keeps both; a layer that released them stays so.
        """
        self._wanted = dtype if release else None
        if not self._on_hopper(self._weight_device()):
            return self
        dtype = torch.float16 if self.input_rule is not None and self.format is NVFP4 else dtype
        if self._released is not None:
            if self._released is dtype:
                return self
            self._restore()
        self._prepare(dtype)
        if release:
            self._release(dtype)
        return self

    def replace_weight(self, weight: BlockScaledTensor, in_features: int) -> None:
        """Puts another weight in the place of this one, such as a shard of it; prepared, if this one was."""
        released = self._released
        prepared = () if released is not None or self._kept is None else tuple(self._kept.prepared)
        self._released = None
        self._forget()
        self.in_features, self.out_features = in_features, weight.rows
        self._buffers["weight_data"], self._buffers["weight_scale"] = weight.data.view(torch.uint8), _flat_scale(weight)
        for dtype in (released,) if released is not None else prepared:
            self._prepare(dtype)
        if released is not None:
            self._release(released)

    def _weight_device(self) -> torch.device:
        data = self._buffers["weight_data"]
        return self._buffers[PREPARED[self._released]].device if data is None else data.device

    def _on_hopper(self, device: torch.device) -> bool:
        if device.type not in ("cpu", "cuda"):
            return False
        target = resolve(self.backend, device)
        return target.backend != "reference" and target.arch.generation == "sm90"

    def _prepare(self, dtype: torch.dtype, memory: torch.Tensor | None = None) -> PreparedWeight:
        """Made in ``memory`` if given, or written anew in the memory that it has: graphs read it there."""
        weight, _ = self._checked()
        made, kept = prepare_weight(weight, dtype=dtype), self._kept.prepared
        if memory is None and dtype in kept:
            memory = kept[dtype].weight.packed
        if memory is not None and memory.device == made.device:
            memory.copy_(made.packed)
            made = replace(made, packed=memory)
        if dtype not in kept:
            self._register(made)
            self._prepared_from = weight.data, weight.scale
        kept[dtype] = _Prepared(made, _versions(weight))
        return made

    def _release(self, dtype: torch.dtype) -> None:
        """Leaves the prepared weight alone, with the blocks that packing rewrote."""
        made = self._kept.prepared[dtype].weight
        lost = rewritten(self._kept.operand, made)
        self._forget()
        for name in ("weight_data", "weight_scale"):
            self._buffers[name] = None
        self._register(made)
        for name, tensor in zip(_REWRITTEN, lost or (None, None)):
            self.register_buffer(name, tensor, persistent=False)
        self._released = dtype

    def _register(self, made: PreparedWeight) -> None:
        """Keeps the tensors of a prepared weight as buffers. Its global scale is the layer's, but for MXFP4, whose
        scales packing may move by a power of two."""
        name = PREPARED[made.dtype]
        self.register_buffer(name, made.packed, persistent=False)
        if self.format is not NVFP4:
            self.register_buffer(f"{name}_factor", made.global_scale, persistent=False)

    def _factor(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The global scale of the weight that is prepared for ``dtype``."""
        return self._buffers["weight_global_scale" if self.format is NVFP4 else f"{PREPARED[dtype]}_factor"]

    def _restore(self) -> None:
        """The checkpoint's bytes in the place of the prepared weight."""
        weight = self.weight
        self._released = None
        self._forget()
        self._buffers["weight_data"], self._buffers["weight_scale"] = weight.data, weight.scale

    def _sole_weight(self) -> PreparedWeight:
        """The prepared weight that is the only one: one object, until a buffer changes."""
        packed, factor = self._buffers[PREPARED[self._released]], self._factor(self._released)
        kept, tracing = self._sole, torch.compiler.is_dynamo_compiling()
        if not tracing and kept is not None and kept.packed is packed and kept.global_scale is factor:
            return kept
        k = -(-self.in_features // self.format.block) * self.format.block
        made = PreparedWeight(packed, self.out_features, k, self._released, factor)
        if not tracing and not is_recorded(packed):
            self._sole = made
        return made

    @property
    def _rewritten(self) -> Rewritten | None:
        found = Rewritten(*(self._buffers.get(name) for name in _REWRITTEN))
        return None if found.places is None else found

    def _prepared(self, x: torch.Tensor, dtype: torch.dtype) -> PreparedWeight | None:
        """The weight for products in ``dtype`` where they take a prepared one; None elsewhere, and while torch records
        or captures and there is none yet."""
        if self._released is not None:
            usable = self._released is dtype and (torch.compiler.is_dynamo_compiling() or self._on_hopper(x.device))
            return self._sole_weight() if usable else None
        weight, planned = self._checked()
        if torch.compiler.is_dynamo_compiling():
            packed, (data, scale) = self._buffers.get(PREPARED[dtype]), self._prepared_from
            # within torch.func.functional_call the weight may be another
            if packed is None or data is not weight.data or scale is not weight.scale:
                return None
            return PreparedWeight(packed, weight.rows, weight.k, dtype, self._factor(dtype))
        if planned is None or recording() or not self._on_hopper(x.device):
            return None
        found = self._kept.prepared.get(dtype)
        if found is not None and found.versions == _versions(weight):
            return found.weight
        return None if x.is_cuda and torch.cuda.is_current_stream_capturing() else self._prepare(dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._released is not None:
            weight = self.weight
            destination[prefix + "weight_data"] = weight.data
            destination[prefix + "weight_scale"] = weight.scale

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        released = self._released
        if released is not None:
            memory = self._buffers[PREPARED[released]]
            self._restore()
        super()._load_from_state_dict(*args, **options)
        if released is not None:
            self._prepare(released, memory)
            self._release(released)
            return
        for dtype in self._kept.prepared if self._kept is not None else ():
            self._prepare(dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # what moves elsewhere is not kept here
        self._kept, self._sole = None, None
        if self._released is None:
            self._forget()
        super()._apply(fn, recurse)
        there = self._on_hopper(self._weight_device())
        if self._released is not None and not there:
            self._restore()
        elif there and self._wanted is not None:
            self.prepare(self._wanted)
        return self

    def _forget(self) -> None:
        """Drops what was made of other buffers."""
        self._kept, self._sole, self._prepared_from = None, None, (None, None)
        for name in (*PREPARED.values(), *(f"{name}_factor" for name in PREPARED.values()), *_REWRITTEN):
            self._buffers.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        """The state that is copied and pickled: the buffers, and no operand beside them."""
        return {name: value for name, value in self.__dict__.items() if name not in _UNSAVED}


def _versions(weight: BlockScaledTensor) -> tuple[int, ...]:
    """They change when data or scales are written to, but for tensors of inference mode."""
    return tuple(-1 if x.is_inference() else x._version for x in (weight.data, weight.scale))


def _flat_scale(weight: BlockScaledTensor) -> torch.Tensor:
    """The blocked scales' bytes in one dimension, without a copy where they are blocked already."""
    blocked = weight.blocked_scale() if weight.scale_layout == "blocked" else to_blocked(weight.rowmajor_scale())
    return blocked_flat(blocked.view(torch.uint8))

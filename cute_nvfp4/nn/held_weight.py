"""The NVFP4 or MXFP4 weight that a layer holds: as a checkpoint stores it, repacked for its GPU, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4, Format
from cute_nvfp4.nn.input_rules import E4M3, product_dtypes, takes_4_bits
from cute_nvfp4.nn.released import Rewritten, rewritten, unpacked
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.dispatch import is_recorded, recording
from cute_nvfp4.ops.groups import addresses
from cute_nvfp4.ops.prepare_weight import prepare_weight
from cute_nvfp4.ops.row_product import RowProduct
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.runtime.backend import Backend, resolve
from cute_nvfp4.runtime.bounded import Bounded
from cute_nvfp4.scale_layout import blocked_flat, to_blocked
from cute_nvfp4.weight_packing import packing_of

if TYPE_CHECKING:
    from typing_extensions import Self


class _Kept(NamedTuple):
    """What a layer keeps of its weight, until a buffer changes.

    operand: the weight. addresses: those of its tensors when they were checked. input_global_scale: that of x. rows:
    what was planned for them, by kind of row (None: nothing can be). prepared: the prepared weights.
    """

    operand: BlockScaledTensor
    addresses: tuple[int, ...]
    input_global_scale: torch.Tensor | None
    rows: dict[tuple, RowProduct | None]
    prepared: dict[torch.dtype, _Prepared]


class _Prepared(NamedTuple):
    """A prepared weight, and the versions of the buffers that it was made from."""

    weight: PreparedWeight
    versions: tuple[int, ...]


HALVES = torch.bfloat16, torch.float16
"""Dtypes of an x that is not rounded; the weight keeps every value."""
PREPARED = {dtype: f"weight_prepared_{str(dtype).removeprefix('torch.')}" for dtype in (*HALVES, E4M3)}
"""The buffers of prepared weights, by the dtype of the products; they are not in a state_dict."""
_ROW_FACTOR = "weight_row_factor_bits"
"""The buffer of the row factors of the weight prepared for FP8; it holds bits, which no model's dtype changes."""
_REWRITTEN = ("weight_rewritten_places", "weight_rewritten_contents")
"""The buffers of the blocks that packing rewrote, if the prepared weight is the only copy."""
_UNSAVED = ("_kept", "_prepared_from", "_sole")


class HeldWeight(torch.nn.Module):
    """The part of ``NVFP4Linear`` and ``MXFP4Linear`` that holds W (N, K).

    The buffers are ``weight_data`` (N, K / 2), ``weight_scale``, blocked and flat, ``weight_global_scale``, None for
    MXFP4, and prepared weights, which products may read instead of the first two.

    in_features: the columns without padding. input_rule: the rule for x, or None; it decides in which dtype weights are
    multiplied (``input_rules``). backend: that of the products.
    """

    format: Format = NVFP4
    _kept: _Kept | None = None
    _prepared_from: tuple[torch.Tensor | None, ...] = (None, None)
    _released: torch.dtype | None = None
    _wanted: torch.dtype | None = None
    _sole: tuple[PreparedWeight, ...] = ()

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
        """The weight as an operand, (N, K) with K padded to a multiple of 16: one object, until a buffer changes.

        A layer that holds only the repacked weight unpacks it each time.
        """
        if self._released is not None:
            return unpacked(self._sole_weight(), self._rewritten, self.format)
        operand, _ = self._checked()
        return operand

    def _checked(self) -> tuple[BlockScaledTensor, dict[tuple, RowProduct | None] | None]:
        """The weight, and what was planned with it; None while torch records, because nothing is kept then."""
        # dictionaries are faster than the attributes of torch.nn.Module
        buffers = self._buffers
        data, scale, factor = buffers["weight_data"], buffers["weight_scale"], buffers["weight_global_scale"]
        if torch.compiler.is_dynamo_compiling():
            return BlockScaledTensor(data, scale, factor, self.format), None
        input_global_scale = buffers.get("input_global_scale")
        if self._kept is not None:
            kept, earlier, before, rows, _ = self._kept
            if (
                kept.data is data
                and kept.scale is scale
                and kept.global_scale is factor
                and before is input_global_scale
            ):
                # a tensor may have got other memory, or swapped contents
                if earlier == addresses(data, scale, factor):
                    return kept, rows
        operand = BlockScaledTensor(data, scale, factor, self.format)
        if is_recorded(data):
            return operand, None
        self._forget()
        self._kept = _Kept(operand, addresses(data, scale, factor), input_global_scale, Bounded(), {})
        return operand, self._kept.rows

    def prepare(self, dtype: torch.dtype = torch.bfloat16, *, release: bool = True) -> Self:
        """Repacks the weight for products that read it so: on Hopper, and on Blackwell those of 16-bit x.

        It is needed before a graph is captured or a model is compiled, because the layer cannot repack then. Where no
        product reads a packed weight, repacking waits until the layer moves to another device. Returns the layer.

        dtype: that of an x that is not quantized, bfloat16 or float16. ``load_state_dict`` writes the packed weight,
        too; whoever writes to the buffers otherwise while gradients are off (inference mode, ``.data``) must call this
        again. release: frees ``weight_data`` and ``weight_scale``; ``state_dict``, ``weight`` and moves to other
        devices restore every bit. ``gemm`` then multiplies a single row of x, and x in another dtype needs a weight
        that is decoded in each call. False keeps both; a layer that released them stays so.
        """
        self._wanted = dtype if release else None
        there, dtypes = self._weight_device(), product_dtypes(self.input_rule, dtype, self.format)
        dtypes = tuple(one for one in dtypes if self._reads_prepared(there, one))
        if not dtypes:
            return self
        if self._released is not None:
            if self._released_dtypes == dtypes:
                return self
            self._restore()
        for one in dtypes:
            self._prepare(one)
        if release:
            self._release(dtypes)
        return self

    def replace_weight(self, weight: BlockScaledTensor, in_features: int) -> None:
        """Replaces this weight by another one, such as a shard of it; prepares it if this one was prepared."""
        released = self._released is not None
        prepared = self._released_dtypes if released else () if self._kept is None else tuple(self._kept.prepared)
        self._released = None
        self._forget()
        self.in_features, self.out_features = in_features, weight.rows
        self._buffers["weight_data"], self._buffers["weight_scale"] = weight.data.view(torch.uint8), _flat_scale(weight)
        for dtype in prepared:
            self._prepare(dtype)
        if released:
            self._release(prepared)

    @property
    def _released_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the released weight is prepared for; the one from which it is unpacked comes first."""
        held = (dtype for dtype, name in PREPARED.items() if self._buffers.get(name) is not None)
        return (self._released, *(dtype for dtype in held if dtype is not self._released))

    def _weight_device(self) -> torch.device:
        data = self._buffers["weight_data"]
        return self._buffers[PREPARED[self._released]].device if data is None else data.device

    def _reads_prepared(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether products in ``dtype`` read a prepared weight on ``device``: on Hopper all do, on Blackwell those with
        x in 16 bits."""
        if device.type not in ("cpu", "cuda"):
            return False
        target = resolve(self.backend, device)
        if target.backend == "reference":
            return False
        return target.arch.generation == "sm90" or (dtype in HALVES and not takes_4_bits(self.input_rule))

    def _prepare(self, dtype: torch.dtype, memory: PreparedWeight | None = None) -> PreparedWeight:
        """Prepares the weight, in ``memory`` or in the memory that it has already, because graphs read it there."""
        weight, rows = self._checked()
        if rows is None:
            got = "a call under a mode of torch that records operations"
            raise OperandError.of("prepare", got=got, expected="one before it, or after it")
        made, kept = prepare_weight(weight, dtype=dtype), self._kept.prepared
        if memory is None and dtype in kept:
            memory = kept[dtype].weight
        if memory is not None and memory.device == made.device:
            memory.packed.copy_(made.packed)
            if made.row_factor is not None:
                memory.row_factor.copy_(made.row_factor)
            made = replace(made, packed=memory.packed, row_factor=memory.row_factor)
        if dtype not in kept:
            self._register(made)
            self._prepared_from = weight.data, weight.scale
        kept[dtype] = _Prepared(made, _versions(weight))
        return made

    def _release(self, dtypes: Sequence[torch.dtype]) -> None:
        """Frees the checkpoint's bytes; keeps the prepared weights, and the blocks that the first packing rewrote."""
        made = [self._kept.prepared[dtype].weight for dtype in dtypes]
        lost = rewritten(self._kept.operand, made[0])
        self._forget()
        for name in ("weight_data", "weight_scale"):
            self._buffers[name] = None
        for one in made:
            self._register(one)
        for name, tensor in zip(_REWRITTEN, lost or (None, None)):
            self.register_buffer(name, tensor, persistent=False)
        self._released = dtypes[0]

    def _register(self, made: PreparedWeight) -> None:
        """Keeps the tensors of a prepared weight as buffers. Its global scale is the layer's, except for MXFP4, whose
        scales packing may move by a power of two."""
        name = PREPARED[made.dtype]
        self.register_buffer(name, made.packed, persistent=False)
        if self.format is not NVFP4:
            self.register_buffer(f"{name}_factor", made.global_scale, persistent=False)
        if made.row_factor is not None:
            self.register_buffer(_ROW_FACTOR, made.row_factor.view(torch.int32), persistent=False)

    def _held(self, dtype: torch.dtype) -> PreparedWeight | None:
        """The prepared weight made of the buffers, or None."""
        packed, factor = self._buffers.get(PREPARED[dtype]), None
        if packed is None:
            return None
        if dtype is E4M3:
            factor = self._buffers[_ROW_FACTOR].view(torch.float32)
        k = -(-self.in_features // self.format.block) * self.format.block
        options = {"packing": packing_of(self.format), "row_factor": factor}
        return PreparedWeight(packed, self.out_features, k, dtype, self._factor(dtype), **options)

    def _factor(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The global scale of the weight that is prepared for ``dtype``."""
        return self._buffers.get("weight_global_scale" if self.format is NVFP4 else f"{PREPARED[dtype]}_factor")

    def _restore(self) -> None:
        """Replaces the prepared weight by the checkpoint's bytes."""
        weight = self.weight
        self._released = None
        self._forget()
        self._buffers["weight_data"], self._buffers["weight_scale"] = weight.data, weight.scale

    def _sole_weight(self, dtype: torch.dtype | None = None) -> PreparedWeight | None:
        """The prepared weight for products in ``dtype``, by default the released one; None if there is none.

        It is one object, until a buffer changes.
        """
        dtype, tracing = dtype or self._released, torch.compiler.is_dynamo_compiling()
        packed, factor = self._buffers.get(PREPARED[dtype]), self._factor(dtype)
        if not tracing:
            for kept in self._sole:
                if kept.packed is packed and kept.global_scale is factor:
                    return kept
        made = self._held(dtype)
        if made is not None and not tracing and not is_recorded(packed):
            self._sole = (*(x for x in self._sole if x.dtype is not dtype), made)
        return made

    @property
    def _rewritten(self) -> Rewritten | None:
        found = Rewritten(*(self._buffers.get(name) for name in _REWRITTEN))
        return None if found.places is None else found

    def _prepared(self, x: torch.Tensor, dtype: torch.dtype) -> PreparedWeight | None:
        """The weight for products in ``dtype`` that take a prepared one.

        None for other products; also while torch records or captures, if no weight is prepared yet.
        """
        if self._released is not None:
            usable = torch.compiler.is_dynamo_compiling() or self._reads_prepared(x.device, dtype)
            return self._sole_weight(dtype) if usable else None
        weight, planned = self._checked()
        if torch.compiler.is_dynamo_compiling():
            # torch.func.functional_call may have put another weight here
            data, scale = self._prepared_from
            return self._held(dtype) if data is weight.data and scale is weight.scale else None
        if planned is None or recording() or not self._reads_prepared(x.device, dtype):
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
            memory = [self._sole_weight(dtype) for dtype in self._released_dtypes]
            self._restore()
        super()._load_from_state_dict(*args, **options)
        if released is not None:
            for one in memory:
                self._prepare(one.dtype, one)
            self._release([one.dtype for one in memory])
            return
        for dtype in self._kept.prepared if self._kept is not None else ():
            self._prepare(dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # keep nothing of a weight that moves elsewhere
        self._kept, self._sole = None, ()
        if self._released is None:
            self._forget()
        super()._apply(fn, recurse)
        if self._released is not None:
            there = self._weight_device()
            if not all(self._reads_prepared(there, dtype) for dtype in self._released_dtypes):
                self._restore()
        if self._wanted is not None:
            self.prepare(self._wanted)
        return self

    def _forget(self) -> None:
        """Drops everything that was made from other buffers."""
        self._kept, self._sole, self._prepared_from = None, (), (None, None)
        for name in (_ROW_FACTOR, *PREPARED.values(), *(f"{name}_factor" for name in PREPARED.values()), *_REWRITTEN):
            self._buffers.pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        """The state that is copied and pickled: the buffers, without the operands made from them."""
        return {name: value for name, value in self.__dict__.items() if name not in _UNSAVED}


def _versions(weight: BlockScaledTensor) -> tuple[int, ...]:
    """The autograd version counters of data and scales; tensors of inference mode have none."""
    return tuple(-1 if x.is_inference() else x._version for x in (weight.data, weight.scale))


def _flat_scale(weight: BlockScaledTensor) -> torch.Tensor:
    """The bytes of the blocked scales in one dimension; a copy only if they are not blocked already."""
    blocked = weight.blocked_scale() if weight.scale_layout == "blocked" else to_blocked(weight.rowmajor_scale())
    return blocked_flat(blocked.view(torch.uint8))

"""Where a work tile's operands are: behind tensor maps of their own, or at an origin in tensors that all tiles
share."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.tensor_utils import TensorMapManager, TensorMapUpdateMode

from .arguments import MAP_BYTES


class Origin(NamedTuple):
    """Where one operand of a work tile starts. batch: its matrix; row, atom: its first row and its first scale atom
    (None for 0); data_map, scale_map: tensor maps that replace those of the copies (None to keep them)."""

    batch: Int32
    row: Int32 | None = None
    atom: Int32 | None = None
    data_map: cute.Pointer | None = None
    scale_map: cute.Pointer | None = None


class Origins(NamedTuple):
    """The origins of A and B."""

    a: Origin
    b: Origin


class OperandMaps(NamedTuple):
    """The tensor maps of A, B and their scale factors: as addresses, or as the copies that hold them."""

    a: Any
    sfa: Any
    b: Any
    sfb: Any


@dsl_user_op
def address_of_map(atom: cute.CopyAtom, *, loc: Any = None, ip: Any = None) -> Int64:
    """The generic address of the tensor map in a copy atom: in kernel parameters, if the host made it."""
    space = cute.AddressSpace.generic
    kind = cute_ir.PtrType.get(cute_nvgpu.TmaDescriptorTiledType.get(), space, MAP_BYTES // 2)
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    return Int64(cute_nvgpu.get_tma_desc_addr(kind, executable, loc=loc, ip=ip).toint(loc=loc, ip=ip))


def map_pointer(address: Any, space: cute.AddressSpace = cute.AddressSpace.generic) -> cute.Pointer:
    """A pointer to the tensor map at ``address``, as copies and fences take it."""
    manager = TensorMapManager(TensorMapUpdateMode.SMEM, MAP_BYTES)
    words = cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8)
    return manager.get_tensormap_ptr(words, space)

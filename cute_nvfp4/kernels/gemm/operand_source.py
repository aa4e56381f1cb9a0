"""Where the tiles of a group are found: tensor maps of its own, or a place in tensors that all groups share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.tensor_utils import TensorMapManager, TensorMapUpdateMode

from .arguments import MAP_BYTES
from .grouped_config import MAPS
from .grouped_scheduler import entry
from .tile_scheduler import Work


@dataclass
class Origin:
    """Where an operand of a tile starts: its first row and scale atom (None for 0), its matrix, and the addresses of
    the maps of data and scales that replace those of the copies (None for their own)."""

    batch: Any
    row: Any = None
    atom: Any = None
    maps: tuple = (None, None)


def origins(config: Any, work: Work, batch: Any) -> tuple[Origin, Origin]:
    """Of A and of B, for a batch of a GEMM or a group of a grouped one."""
    if config.maps == "":
        return Origin(batch), Origin(batch)
    table = work.groups.table
    if config.maps == "shared":
        row, atom = (entry(config, table, name, batch)[0] for name in ("row", "atom"))
        dealt, stacked = Origin(Int32(0), row, atom), Origin(batch)
        return (dealt, stacked) if config.ragged == "a" else (stacked, dealt)
    if config.maps == "parameters":
        maps = [entry(config, table, name, batch)[0] for name in MAPS]
    else:
        first = work.groups.maps + Int64(batch) * (len(MAPS) * MAP_BYTES)
        maps = [first + i * MAP_BYTES for i in range(len(MAPS))]
    a, sfa, b, sfb = (map_pointer(address) for address in maps)
    return Origin(Int32(0), maps=(a, sfa)), Origin(Int32(0), maps=(b, sfb))


@dsl_user_op
def address_of_map(atom: cute.CopyAtom, *, loc: Any = None, ip: Any = None) -> Int64:
    """The generic address of the tensor map that a copy atom holds: in a kernel's parameters, if the host made it."""
    space = cute.AddressSpace.generic
    kind = cute_ir.PtrType.get(cute_nvgpu.TmaDescriptorTiledType.get(), space, MAP_BYTES // 2)
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    return Int64(cute_nvgpu.get_tma_desc_addr(kind, executable, loc=loc, ip=ip).toint(loc=loc, ip=ip))


def map_pointer(address: Any, space: cute.AddressSpace = cute.AddressSpace.generic) -> cute.Pointer:
    """A pointer to the tensor map at ``address``, as copies and fences take it."""
    manager = TensorMapManager(TensorMapUpdateMode.SMEM, MAP_BYTES)
    words = cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8)
    return manager.get_tensormap_ptr(words, space)


@cute.jit
def acquire(config: cutlass.Constexpr[Any], work: Work, group: Int32, unit: Int32):
    """Lets this warp's copies see a group's maps, which the kernel before wrote, when it meets the group first."""
    start = entry(config, work.groups.table, "start", group)[0]
    if unit - start < work.workers:
        first = work.groups.maps + Int64(group) * (len(MAPS) * MAP_BYTES)
        for i in cutlass.range_constexpr(len(MAPS)):
            cpasync.fence_tma_desc_acquire(map_pointer(first + i * MAP_BYTES, cute.AddressSpace.gmem))

"""Operands in global memory as TMA sees them, and their ring of stages in shared memory.

Scale factors are a grid of 512-byte atoms, and a tile's scale factors are a box of that grid: they need no layout but
``scale_layout``'s atom. The architecture's MMA decides how data lies in a stage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS
from .arguments import ELEMENT_DTYPES, Operand
from .config import INTERLEAVED_ROWS, GemmConfig
from .shared_plan import StagePlan

ELEMENT_TYPES = {name: getattr(cutlass, dtype) for name, dtype in ELEMENT_DTYPES.items()}
# TMA moves scales as 16-bit words: an atom has 256 of them, which is the longest row of a box
SCALE_WORD = cutlass.Int16
ATOM_WORDS = ATOM_BYTES // 2


class TmaCopy(NamedTuple):
    """A TMA copy atom, and the global tensor of coordinates that its partitions index."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class OperandLoad(NamedTuple):
    """TMA loads of one matrix and of its scales. batches: matrices that its data has."""

    data: TmaCopy
    scales: TmaCopy
    batches: Int32


class Loads(NamedTuple):
    """The loads of every A and every B."""

    a: tuple[OperandLoad, ...]
    b: tuple[OperandLoad, ...]


UNPACKED_TYPE = cutlass.Uint8
"""The type of an element's place in shared memory where TMA unpacks it."""


def element_types(config: GemmConfig) -> tuple[type, type]:
    """The DSL types of the elements of A and B, as the MMA reads them."""
    return ELEMENT_TYPES[config.a_format], ELEMENT_TYPES[config.b_format]


def shared_types(config: GemmConfig) -> tuple[type, type]:
    """The types of the elements' places in shared memory, of A and B."""
    pairs = zip(element_types(config), config.unpacked)
    return tuple(UNPACKED_TYPE if unpacked else dtype for dtype, unpacked in pairs)


def unpacking(config: GemmConfig, which: int) -> dict[str, type]:
    """Options of the TMA copy of an A (``which`` 0) or a B (1): an internal type wider than the tensor's unpacks it."""
    return {"internal_type": UNPACKED_TYPE} if config.unpacked[which] else {}


def staged(inner: Any, one: cute.Layout, config: GemmConfig, element: type, stages: int) -> Any:
    """``one`` stage's layout, swizzled by ``inner``, with a mode for the ring: a stage has all operands, so that
    consecutive stages are ``StagePlan.bytes`` apart."""
    distance = StagePlan(config).bytes * 8 // element.width
    outer = cute.append(one, cute.make_layout(stages, stride=distance))
    return cute.make_composed_layout(inner, 0, outer)


def scale_layouts(config: GemmConfig, stages: int) -> tuple[cute.Layout, cute.Layout]:
    """Layouts of the scales of A and B in shared memory: (WORD of an atom, ATOM_K, ATOM_MN, STAGE)."""
    stage = StagePlan(config)
    distance = stage.bytes // 2

    def layout(atoms: int) -> cute.Layout:
        shape = (ATOM_WORDS, stage.atoms_k, atoms, stages)
        return cute.make_layout(shape, stride=(1, ATOM_WORDS, ATOM_WORDS * stage.atoms_k, distance))

    return layout(1), layout(stage.atoms_n)


class SharedOperands(NamedTuple):
    """The ring of stages in shared memory: a tensor for each A and each B, and for the scales of each. On sm_120a the
    data is (ROW, K, STAGE)."""

    sA: tuple[cute.Tensor, ...]  # (MMA, MMA_M, MMA_K, STAGE)
    sB: tuple[cute.Tensor, ...]  # (MMA, MMA_N, MMA_K, STAGE)
    sSFA: tuple[cute.Tensor, ...]  # (WORD, ATOM_K, ATOM_M, STAGE)
    sSFB: tuple[cute.Tensor, ...]  # (WORD, ATOM_K, ATOM_N, STAGE)


def shared_operands(config: GemmConfig, base: cute.Pointer, layouts: tuple[Any, Any], stages: int) -> SharedOperands:
    """The tensors of all stages; the first stage starts at ``base``. layouts: of A and B, swizzled."""
    at = StagePlan(config).offsets
    layout_a, layout_b = layouts
    layout_sfa, layout_sfb = scale_layouts(config, stages)
    type_a, type_b = shared_types(config)

    def data(offsets: tuple[int, ...], dtype: type, layout: Any) -> tuple[cute.Tensor, ...]:
        pointers = [cute.recast_ptr((base + x).align(1024), swizzle_=layout.inner, dtype=dtype) for x in offsets]
        return tuple(cute.make_tensor(pointer, layout.outer) for pointer in pointers)

    def scales(offsets: tuple[int, ...], layout: cute.Layout) -> tuple[cute.Tensor, ...]:
        pointers = [cute.recast_ptr((base + x).align(128), dtype=SCALE_WORD) for x in offsets]
        return tuple(cute.make_tensor(pointer, layout) for pointer in pointers)

    return SharedOperands(
        data(at.a, type_a, layout_a),
        data(at.b, type_b, layout_b),
        scales(at.sfa, layout_sfa),
        scales(at.sfb, layout_sfb),
    )


def interleaved(config: GemmConfig, which: int) -> bool:
    """Whether the two matrices A (``which`` 0) or B (1) alternate in one tensor."""
    return config.interleaved and config.counts[which] == 2


@cute.jit
def data_tensor(operand: Operand, k: Int32, alternate: cutlass.Constexpr[bool]) -> cute.Tensor:
    """The data as a tensor (rows, K, L), K contiguous. Strides are multiples of 16 bytes, as TMA needs (of 32, where it
    unpacks). alternate: whether every other block of INTERLEAVED_ROWS rows belongs to another matrix."""
    aligned = operand.data.alignment * 8 // operand.data.dtype.width
    row_stride = cute.assume(operand.row_stride, aligned)
    rows, row_strides = operand.rows, row_stride
    if cutlass.const_expr(alternate):
        rows = (INTERLEAVED_ROWS, operand.rows // INTERLEAVED_ROWS)
        row_strides = (row_stride, row_stride * (2 * INTERLEAVED_ROWS))
    strides = (row_strides, 1, cute.assume(operand.batch_stride, aligned))
    return cute.make_tensor(operand.data, cute.make_layout((rows, k, operand.batches), stride=strides))


@cute.jit
def scale_tensor(
    operand: Operand, k: Int32, batch: Int32, block: cutlass.Constexpr[int], alternate: cutlass.Constexpr[bool]
) -> cute.Tensor:
    """The grid of scale atoms as a tensor (WORD, REST_K, REST_MN, L) of 16-bit words."""
    rest_mn = cute.ceil_div(operand.rows if operand.scale_rows is None else operand.scale_rows, ATOM_ROWS)
    rest_k = cute.ceil_div(k, ATOM_COLS * block)
    shape = (ATOM_WORDS, rest_k, rest_mn, batch)
    band = Int64(rest_k) * (ATOM_WORDS * (2 if alternate else 1))
    strides = (1, ATOM_WORDS, cute.assume(band, ATOM_WORDS), cute.assume(operand.scale_batch // 2, ATOM_WORDS))
    return cute.make_tensor(cute.recast_ptr(operand.scale, dtype=SCALE_WORD), cute.make_layout(shape, stride=strides))


def describe_scales(
    config: GemmConfig, which: int, operand: Operand, k: Int32, batch: Int32, op: Any, places: int = 1
) -> TmaCopy:
    """The TMA load, by ``op``, of the scales of an A (``which`` 0) or a B (1). places: CTAs that share a load."""
    layout = cute.slice_(scale_layouts(config, 1)[which], (None, None, None, 0))
    tensor = scale_tensor(operand, k, batch, config.kind.block, interleaved(config, which))
    atom = cpasync.make_tiled_tma_atom(op, tensor, layout, layout.shape, num_multicast=places)
    return TmaCopy(atom[0], atom[1])

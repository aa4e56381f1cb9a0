"""Operands of the tcgen05 kernels: what is checked, and the plain numbers that describe one to a host function."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from ..errors import OperandError, explain
from ..formats import as_bytes
from ..operand import BlockScaledTensor
from ..scale_layout import blocked_bytes

FACTORS = 3
"""Numbers on the device that may multiply a product: alpha and the two global scales."""
K_MULTIPLE = 32
"""TMA wants rows of a multiple of sixteen bytes: 32 elements of four bits."""
# data, scale, rows, row stride, batch stride, matrices, batch stride of the scales
OPERAND_TYPES = (
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64,
)  # fmt: skip


def check_scales(operands: Mapping[str, BlockScaledTensor], backend: str) -> None:
    """Raises unless the kernels can read these operands.

    In the simulator the sign of NVFP4's scales is looked at too; on a GPU that would mean waiting for it.
    """
    for name, operand in operands.items():
        if operand.scale_layout != "blocked":
            raise OperandError(
                explain(
                    f"scales of {name}",
                    got=operand.scale_layout,
                    expected="blocked: tensor memory takes them as 128x4 atoms",
                    hint="scale_layout.to_blocked(scale) makes them so.",
                )
            )
        if operand.k % K_MULTIPLE:
            raise OperandError(
                explain(f"K of {name}", got=operand.k, expected=f"a multiple of {K_MULTIPLE}", hint="Pad K with zeros.")
            )
        strides = [s for size, s in zip(operand.data.shape[:-1], operand.data.stride()) if size > 1]
        if operand.data.data_ptr() % 16 or any(s % 16 for s in strides):
            raise OperandError(
                explain(
                    f"alignment of {name}",
                    got=f"address {operand.data.data_ptr():#x}, strides {operand.data.stride()}",
                    expected="multiples of 16 bytes, which TMA needs",
                    hint=".contiguous() or .clone() aligns.",
                )
            )
        if backend == "sim" and operand.format.scale == "e4m3":
            codes = as_bytes(operand.blocked_scale())
            negative = int(((codes & 0x80) != 0).sum())
            if negative:
                raise OperandError(
                    explain(
                        f"scales of {name}",
                        got=f"{negative} negative ones",
                        expected="none: a block-scaled MMA reads them as unsigned (UE4M3)",
                        hint="Move the sign into the elements.",
                    )
                )


def arguments_of(operand: BlockScaledTensor) -> list[int]:
    """Values of ``OPERAND_TYPES``; strides of data in elements, of scales in bytes."""
    data, each = operand.data, operand.format.elements_per_byte
    row = data.stride(-2) * each if operand.rows > 1 else operand.k
    # one matrix for all of L, or L of them
    repeated = operand.batch == 1 or data.stride(0) == 0
    batch = operand.rows * operand.k if repeated else data.stride(0) * each
    scales = operand.scale.data_ptr()
    scale_batch = blocked_bytes(operand.rows, operand.format.scale_columns(operand.k))
    return [data.data_ptr(), scales, operand.rows, row, batch, 1 if repeated else operand.batch, scale_batch]


def example_pointer(dtype: Any, alignment: int) -> Any:
    """A pointer that is never read: compiling needs only dtype, space and alignment."""
    from cutlass.cute import AddressSpace
    from cutlass.cute.runtime import make_ptr

    return make_ptr(dtype, alignment, AddressSpace.gmem, assumed_align=alignment)


def example_operand(element: Any) -> tuple:
    """An operand as a host function takes it, for compiling."""
    import cutlass

    i32, i64 = cutlass.Int32(1), cutlass.Int64(1)
    return example_pointer(element, 16), example_pointer(cutlass.Uint8, 16), i32, i64, i64, i32, i64

"""Operands of the tcgen05 kernels: what is checked, and the record that describes one to a host function."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import OperandError
from ..formats import as_bytes
from ..kernels.gemm.arguments import Operand
from ..operand import BlockScaledTensor, row_alignment
from ..scale_layout import blocked_bytes

K_MULTIPLE = 32
"""TMA wants rows of a multiple of sixteen bytes: 32 elements of four bits."""


def check_operands(operands: Mapping[str, BlockScaledTensor], backend: str) -> None:
    """Raises unless the kernels can read these operands.

    In the simulator the signs of NVFP4's scales are checked too; on a GPU that would mean waiting for it.
    """
    for name, operand in operands.items():
        if operand.scale_layout != "blocked":
            raise OperandError.of(
                f"scales of {name}",
                got=operand.scale_layout,
                expected="blocked: tensor memory takes them as 128x4 atoms",
                hint="scale_layout.to_blocked(scale) makes them so.",
            )
        if operand.k % K_MULTIPLE:
            raise OperandError.of(
                f"K of {name}", got=operand.k, expected=f"a multiple of {K_MULTIPLE}", hint="Pad K with zeros."
            )
        if row_alignment(operand.data, 16) < 16:
            raise OperandError.of(
                f"alignment of {name}",
                got=f"address {operand.data.data_ptr():#x}, strides {operand.data.stride()}",
                expected="multiples of 16 bytes, which TMA needs",
                hint=".contiguous() or .clone() aligns.",
            )
        if backend == "sim":
            check_signs(name, operand)


def check_signs(name: str, operand: BlockScaledTensor) -> None:
    """Raises if a scale is negative: values, which each call in the simulator looks at."""
    if operand.format.scale != "e4m3":
        return
    negative = int(((as_bytes(operand.blocked_scale()) & 0x80) != 0).sum())
    if negative:
        raise OperandError.of(
            f"scales of {name}",
            got=f"{negative} negative ones",
            expected="none: a block-scaled MMA reads them as unsigned (UE4M3)",
            hint="Move the sign into the elements.",
        )


def check_signs_of(a: BlockScaledTensor, *others: object) -> None:
    """``check_signs`` of the operands of a call, which come first."""
    weights = [x for x in others[:2] if isinstance(x, BlockScaledTensor)]
    names = ("b",) if len(weights) == 1 else ("b1", "b2")
    for name, operand in zip(("a", *names), (a, *weights)):
        check_signs(name, operand)


def operand_record(operand: BlockScaledTensor, name: str = "", after: tuple[int, int] = (0, 0)) -> Operand:
    """The operand in plain numbers; strides of data in elements, of scales in bytes. name: of the argument that has it;
    without one there are no addresses. after: bytes of data and of scales before those of the operand."""
    data, each = operand.data, operand.format.elements_per_byte
    # one matrix for all of L, or L of them
    repeated = operand.batch == 1 or data.stride(0) == 0
    return Operand(
        data=f"{name}.data + {after[0]}" if name else 0,
        scale=f"{name}.scale + {after[1]}" if name else 0,
        rows=operand.rows,
        row_stride=data.stride(-2) * each if operand.rows > 1 else operand.k,
        batch_stride=operand.rows * operand.k if repeated else data.stride(0) * each,
        batches=1 if repeated else operand.batch,
        scale_batch=blocked_bytes(operand.rows, operand.format.scale_columns(operand.k)),
    )
